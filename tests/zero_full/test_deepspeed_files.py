"""Checkpoints that the real DeepSpeed has written are read, exactly, and no more of them than is asked for.

`deepspeed_files` has written them, with what DeepSpeed says that they hold.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zero_full.deepspeed_cases import opened, rewritten, truth_of, unpacked
from tests.zero_full.deepspeed_files import CASES, CLIENT_STATE, Odd, groups_of
from zero_full.checkpoint.deepspeed import open_deepspeed
from zero_full.checkpoint.inspection import verify
from zero_full.checkpoint.torch_file import SavedTensor, TorchArchive
from zero_full.checkpoint.unpickle import load_saved
from zero_full.errors import CheckpointError
from zero_full.precision.scaler import DynamicScale, StaticScale

READABLE = [name for name, case in CASES.items() if case.universal and name != "stage2_round_robin"]
KINDS = [(name, "latest") for name in CASES] + [(name, "latest_universal") for name in READABLE]


# What is in it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "latest"), KINDS)
def test_every_tensor_is_what_deepspeed_says(name: str, latest: str, tmp_path: Path) -> None:
    folder = unpacked(name, tmp_path)
    source, (truth, _) = opened(folder, latest), truth_of(folder)
    left_out = {"parameters/base.weight"} if CASES[name].exclude_frozen else set()
    assert source.tensors.keys() == truth.keys() - left_out
    for key, stored in source.tensors.items():
        expected = truth[key].reshape(-1)
        assert (stored.shape, stored.dtype) == (tuple(truth[key].shape), truth[key].dtype), key
        assert torch.equal(source.read_across(key, 0, stored.numel), expected), key
        for start in range(0, stored.numel, 5):
            stop = min(start + 11, stored.numel)
            assert torch.equal(source.read_across(key, start, stop), expected[start:stop]), (key, start)
        for piece in stored.pieces:
            source.verify(key, *piece)


@pytest.mark.parametrize(("name", "latest"), KINDS)
def test_the_rest_is_what_deepspeed_says(name: str, latest: str, tmp_path: Path) -> None:
    case, folder = CASES[name], unpacked(name, tmp_path)
    source, (truth, rest) = opened(folder, latest), truth_of(folder)
    shared, trained = (
        source.shared,
        {key.split("/", 2)[2] for key in truth if key.startswith("state/exp_avg/")},
    )
    counters = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
    assert shared["counters"] == {counter: rest[counter] for counter in counters}
    assert shared["lr_scheduler"] == rest["lr_scheduler"]
    assert source.numbers.keys() == {f"parameters/{parameter}" for parameter in trained}
    for numbers in source.numbers.values():  # as torch's Adam keeps it
        assert numbers.keys() == {"step"} and torch.equal(numbers["step"], torch.tensor(rest["step"]))
    assert source.aliases == rest["tied"]
    about = {"world_size": case.world, "stage": case.stage, "step": rest["global_steps"]}
    assert shared["about"] == {**about, "deepspeed": "0.19.8"}
    noise = shared["client_state"].pop("noise")
    assert torch.equal(noise, CLIENT_STATE["noise"])
    assert shared["client_state"] == {key: value for key, value in CLIENT_STATE.items() if key != "noise"}
    named = (
        [] if case.exclude_frozen or name == "plain_fp32" else rest["frozen"]
    )  # the optimizer has it there
    assert shared["frozen"] == named
    assert bool(shared.get("excluded")) == case.exclude_frozen
    expected = [{k: v for k, v in group.items() if k != "step"} for group in rest["groups"]]
    if name == "stage1_elastic":  # DeepSpeed does not save options there
        expected = [{} for _ in expected]
    assert json.loads(json.dumps(shared["groups"])) == expected
    assert [trained & {*names} for names in shared["members"]] == [trained & names for names in members(name)]
    assert source.private(0) == {} and source.path.is_dir()


def members(name: str) -> list[set[str]]:
    """The names in each group that the optimizer was given."""
    model = Odd(CASES[name])
    names = {param: parameter for parameter, param in model.named_parameters()}
    return [{names[param] for param in group["params"]} for group in groups_of(model, CASES[name].groups)]


@pytest.mark.parametrize("name", CASES)
def test_the_loss_scale_can_be_taken_over(name: str, tmp_path: Path) -> None:
    folder = unpacked(name, tmp_path)
    rest, shared = truth_of(folder)[1], opened(folder).shared
    saved = rest["scaler"]
    if not saved or name == "plain_bf16_flat":
        assert "scaler" not in shared
        return
    dynamic = saved.get("dynamic", saved.get("dynamic_loss_scale"))
    scale = DynamicScale() if dynamic else StaticScale()
    scale.load_state_dict(shared["scaler"])
    assert scale.scale == saved["cur_scale"]
    if isinstance(scale, DynamicScale):
        assert (scale.steps, scale.last_overflow) == (saved["cur_iter"], saved["last_overflow_iter"])
        assert (scale.window, scale.minimum, scale.hysteresis, scale.lives) == (2, 1, 1, 1)


def test_the_fixtures_have_what_they_are_for(tmp_path: Path) -> None:
    """Else they prove less than their names say."""
    skipped = {name: truth_of(unpacked(name, tmp_path))[1]["skipped_steps"] for name in CASES}
    assert {name for name, count in skipped.items() if count} == {
        *("stage1_elastic", "stage2_aligned", "stage3_persistent"),
    }
    aligned = load_saved(next(unpacked("stage2_aligned", tmp_path).rglob("*_0_*optim_states.pt")))
    assert any(map(any, aligned["optimizer_state_dict"]["param_alignment_paddings"]))
    small = load_saved(next(unpacked("stage2_fp32", tmp_path).rglob("*rank_2_*optim_states.pt")))
    assert 0 in [part.numel for part in small["optimizer_state_dict"]["single_partition_of_fp32_groups"]]
    groups = load_saved(next(unpacked("stage3_all", tmp_path).rglob("*_0_*optim_states.pt")))
    assert len(groups["optimizer_state_dict"]["fp32_flat_groups"]) > 3
    cut = opened(unpacked("stage1_elastic", tmp_path)).tensors["parameters/embed.weight"]
    one = opened(unpacked("stage3_all", tmp_path)).tensors["parameters/gain"]
    assert len(cut.pieces) == 2 and len(one.pieces) == 1


def test_another_save_has_another_identity(tmp_path: Path) -> None:
    """Ranks may find different files under one name."""
    folder = unpacked("stage2_fp32", tmp_path)
    before = opened(folder).identity
    assert before and before == opened(folder).identity != opened(unpacked("stage1_alone", tmp_path)).identity
    path = folder / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    rewritten(path, lambda content: None)
    same = opened(folder).identity

    def change(content: Any) -> None:
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0][0] += 1

    rewritten(path, change)
    assert opened(folder).identity not in (before, same)


def test_names_of_compiled_models_are_the_models(tmp_path: Path) -> None:
    module = {"_orig_mod.a.weight": torch.ones(2), "_orig_mod.b": torch.zeros(1)}
    adam = {"state": {0: {"exp_avg": torch.ones(2)}, 1: {"exp_avg": torch.ones(1)}}}
    content = {
        "module": module,
        "dp_world_size": 1,
        "buffer_names": [],
        "optimizer": {**adam, "param_groups": [{"params": [0, 1], "step": 4}]},
    }
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    source = open_deepspeed(tmp_path)
    assert source is not None and {"parameters/a.weight", "state/exp_avg/b"} < source.tensors.keys()
    assert source.shared["members"] == [["a.weight", "b"]]
    assert source.read("parameters/a.weight", 0, 2).tolist() == [1, 1]


# How it is read --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain_fp32", "stage2_round_robin", "stage3_all"])
def test_only_the_bytes_that_are_asked_for_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, asked, read = opened(unpacked(name, tmp_path)), list[int](), TorchArchive.read

    def counted(archive: TorchArchive, member: str, start: int, stop: int) -> bytearray:
        asked.append(stop - start)
        return read(archive, member, start, stop)

    monkeypatch.setattr(TorchArchive, "read", counted)
    for key, stored in source.tensors.items():
        for start, stop in stored.pieces:
            asked.clear()
            source.verify(key, start, stop)
            source.read(key, start, stop - 1)
            assert sum(asked) == (stop - 1 - start) * stored.dtype.itemsize


def test_a_flipped_byte_is_found_by_checks_of_whole_files(tmp_path: Path) -> None:
    folder = unpacked("stage2_fp32", tmp_path)
    path = next(folder.rglob("zero_pp_rank_1_*optim_states.pt"))
    assert verify(opened(folder)) == []
    values = load_saved(path)["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    content = path.read_bytes()
    place = content.index(values.whole().numpy().tobytes())
    path.write_bytes(content[:place] + b"\x55" + content[place + 1 :])
    (said,) = verify(opened(folder))
    assert path.name in said and "checksum" in said


def test_a_file_that_is_gone_is_found_by_verify(tmp_path: Path) -> None:
    folder = unpacked("stage3_all", tmp_path)
    path = next(folder.rglob("zero_pp_rank_3_*optim_states.pt"))
    source = opened(folder)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{path.name} has changed"):
        source.verify("parameters/embed.weight", 32, 33)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be read"):
        source.verify("parameters/embed.weight", 32, 33)
    source.verify("parameters/embed.weight", 0, 3)  # of another rank


def test_saved_tensors_are_not_changed_by_reading(tmp_path: Path) -> None:
    """What is read is a copy: whoever writes to it does not write to the next one's."""
    source = opened(unpacked("stage3_alone", tmp_path))
    first = source.read("parameters/first.weight", 0, 4)
    expected = first.clone()
    first.zero_()
    assert torch.equal(source.read("parameters/first.weight", 0, 4), expected)
    assert isinstance(
        load_saved(next(unpacked("stage3_alone", tmp_path).rglob("*model_states.pt")))["noise"], SavedTensor
    )
