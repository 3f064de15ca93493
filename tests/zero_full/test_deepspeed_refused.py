"""Files of DeepSpeed that are not complete, not of one run, or of a kind that is not read, are refused."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zero_full.deepspeed_cases import opened, rewritten, truth_of, unpacked
from tests.zero_full.deepspeed_files import CASES
from zero_full.checkpoint.deepspeed import open_deepspeed
from zero_full.checkpoint.unpickle import load_saved
from zero_full.errors import CheckpointError

# What is found ---------------------------------------------------------------------------------------


def test_a_checkpoint_is_found_by_latest_tag_or_folder(tmp_path: Path) -> None:
    folder = unpacked("stage2_fp32", tmp_path)
    tag, universal = (folder / "latest").read_text(), (folder / "latest_universal").read_text()

    def kind(*arguments: Any) -> str:
        source = open_deepspeed(*arguments)
        assert source is not None
        return source.kind

    assert (
        kind(folder) == kind(str(folder)) == kind(folder, tag) == kind(folder / tag) == "DeepSpeed, stage 2"
    )
    assert kind(folder, universal) == kind(folder / universal) == "DeepSpeed, universal"
    (folder / "latest").unlink()
    assert kind(folder) == "DeepSpeed, universal"
    (folder / "latest_universal").unlink()
    assert open_deepspeed(folder) is None


def test_nothing_of_deepspeeds_is_none(tmp_path: Path) -> None:
    assert open_deepspeed(tmp_path / "absent") is None and open_deepspeed(tmp_path, "tag") is None
    assert open_deepspeed(tmp_path) is None
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "model.safetensors").write_bytes(b"")
    (tmp_path / "latest").write_text("tag")
    assert open_deepspeed(tmp_path) is None and open_deepspeed(tmp_path / "tag") is None
    (tmp_path / "latest").write_text("gone")
    assert open_deepspeed(tmp_path) is None


@pytest.mark.parametrize("text", ["", "global_step9", "../elsewhere", "/etc", "a/../../b", ".", "\0"])
def test_latest_must_name_a_folder_beside_it(text: str, tmp_path: Path) -> None:
    folder = unpacked("stage1_alone", tmp_path)
    shutil.copytree(folder / "global_step3", folder.parent / "elsewhere")
    (folder / "latest").write_text(text)
    with pytest.raises(CheckpointError, match=r"latest names .*global_step3"):
        open_deepspeed(folder)


# What is not complete, or not of one run -------------------------------------------------------------

INCOMPLETE = [(name, place) for name in ("stage2_fp32", "stage3_all") for place in range(CASES[name].world)]


@pytest.mark.parametrize(("name", "rank"), INCOMPLETE)
def test_a_missing_or_truncated_file_of_a_rank_is_named(name: str, rank: int, tmp_path: Path) -> None:
    folder = unpacked(name, tmp_path)
    for path in sorted((folder / "global_step3").glob(f"*_rank_{rank}_*.pt")):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(CheckpointError, match=rf"states of rank {rank}") as caught:
            open_deepspeed(folder)
        assert "interrupted" in str(caught.value) and str(path.parent) in str(caught.value)
        for size in (0, 1000, len(content) - 1):
            path.write_bytes(content[:size])
            with pytest.raises(CheckpointError, match=f"{path.name} is truncated"):
                open_deepspeed(folder)
        path.write_bytes(content)
    opened(folder)


def test_missing_model_states_are_named(tmp_path: Path) -> None:
    for name in ("stage1_alone", "stage2_fp32", "plain_fp32"):
        folder = unpacked(name, tmp_path)
        (folder / "global_step3" / "mp_rank_00_model_states.pt").unlink()
        if name == "plain_fp32":
            assert open_deepspeed(folder) is None  # nothing is left
        else:
            with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt does not exist"):
                open_deepspeed(folder)


def test_missing_optimizer_states_are_named(tmp_path: Path) -> None:
    folder = unpacked("stage2_fp32", tmp_path)
    for path in (folder / "global_step3").glob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match="global_step3 has no optimizer state files"):
        open_deepspeed(folder)


def test_stage_3_needs_other_ranks_model_states_for_frozen_parameters_only(
    tmp_path: Path,
) -> None:
    folder = unpacked("stage3_persistent", tmp_path)
    for path in (folder / "global_step5").glob("zero_pp_rank_[12]_*model_states.pt"):
        path.unlink()
    opened(folder)


def test_a_run_with_fewer_ranks_under_the_same_tag_is_noticed(tmp_path: Path) -> None:
    old, new = (unpacked(name, tmp_path) / "global_step3" for name in ("stage2_fp32", "stage1_alone"))
    for path in new.glob("*.pt"):
        shutil.copy(path, old)
    with pytest.raises(CheckpointError, match="3 ranks, saved at world sizes 1 and 3"):
        open_deepspeed(old)


def test_two_precisions_under_the_same_tag_are_noticed(tmp_path: Path) -> None:
    folder = unpacked("stage2_fp32", tmp_path) / "global_step3"
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(path, folder / f"bf16_{path.name}")
    with pytest.raises(CheckpointError, match=f"bf16_{path.name} and {path.name} are both present"):
        open_deepspeed(folder)


def set_step(content: Any) -> None:
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] = 2


def drop_moment(content: Any) -> None:
    del content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg_sq"]


def set_stage(content: Any) -> None:
    content["optimizer_state_dict"]["zero_stage"] = 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_step, "'step': 2.0.*different saves"),
        (drop_moment, "different saves"),
        (set_stage, "different runs"),
    ],
)
def test_ranks_of_different_saves_are_noticed(
    change: Callable[[Any], None], said: str, tmp_path: Path
) -> None:
    folder = unpacked("stage2_fp32", tmp_path)
    path = folder / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    rewritten(path, lambda content: None)
    opened(folder)
    rewritten(path, change)
    with pytest.raises(CheckpointError, match=f"{path.name} .*{said}"):
        open_deepspeed(folder)


def test_model_states_of_another_model_are_noticed(tmp_path: Path) -> None:
    folder = unpacked("stage2_fp32", tmp_path)
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"

    def grow(content: Any) -> None:
        content["param_shapes"][0]["embed.weight"] = (12, 3)

    rewritten(path, grow)
    with pytest.raises(CheckpointError, match=r"not hold all|of different runs"):
        open_deepspeed(folder)
    rewritten(path, lambda content: content["param_shapes"].pop())
    with pytest.raises(CheckpointError, match="have different groups"):
        open_deepspeed(folder)


def test_files_of_an_unknown_kind_are_an_error_that_names_the_folder(tmp_path: Path) -> None:
    folder = unpacked("stage2_fp32", tmp_path)
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    for key, value in (("buffer_names", None), ("param_shapes", [1, 2, 3]), ("global_steps", "x")):
        shutil.copy(folder / "global_step3_universal" / path.name, path)
        rewritten(path, lambda content, key=key, value=value: content.update({key: value}))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match="global_step3: the files differ from those of DeepSpeed"):
            open_deepspeed(folder)
    for content, said in (([], "not a model state file"), ({"module": 1, "dp_world_size": 1}, "no module")):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=f"{path.name} .*{said}"):
            open_deepspeed(folder)


# What is not read ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mp_rank_01_model_states.pt", "tensor or pipeline"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor or pipeline"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "has experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "has experts"),
        ("layer_01-model_00-model_states.pt", "pipeline parallelism"),
        ("offloaded_tensors", "on NVMe"),
    ],
)
def test_what_is_not_read_is_refused_with_the_reason(name: str, said: str, tmp_path: Path) -> None:
    folder = unpacked("stage2_fp32", tmp_path) / "global_step3"
    (folder / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{folder}.*{said}"):
        open_deepspeed(folder)


def changed_contents() -> Iterator[tuple[str, str, Any, str]]:
    """File, key, value, and what is said."""
    model, optimizer = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    yield model, "mp_world_size", 2, "tensor or pipeline parallelism"
    yield model, "checkpoint_parallel_dimensions", {"pp_degree": 2, "tp_degree": 1}, "tensor or pipeline"
    yield model, "num_experts", [4], "a model with experts"
    yield model, "ds_autoep_layers", [{"ep_size": 2}], "a model with experts"
    yield model, "module", None, "pipeline parallelism"
    yield optimizer, "partition_count", [3, 1, 3], "a model with experts"
    yield optimizer, "ds_zero_partition_groups", [{"partition_count": 1}], "a model with experts"


@pytest.mark.parametrize(("name", "key", "value", "said"), [*changed_contents()])
def test_a_model_that_was_cut_otherwise_is_refused(
    name: str, key: str, value: Any, said: str, tmp_path: Path
) -> None:
    folder = unpacked("stage2_fp32", tmp_path) / "global_step3"

    def change(content: Any) -> None:
        content.get("optimizer_state_dict", content)[key] = value

    rewritten(folder / name, change)
    with pytest.raises(CheckpointError, match=f"{name} .*{said}|{name}: .*{said}"):
        open_deepspeed(folder)


def test_a_loss_scale_that_has_no_equal_is_left_out(tmp_path: Path) -> None:
    folder = unpacked("plain_fp16", tmp_path)
    path = folder / "global_step5" / "mp_rank_00_model_states.pt"
    rewritten(path, lambda content: content["optimizer"].update(scale_factor=4.0))
    assert "scaler" not in opened(folder).shared


# Without ZeRO ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "groups", "said"),
    [
        ([(2, 2), (2,), (3, 2), (3,)], [[(2, 2), (3, 2)], [(2,), (3,)]], None),  # as most have it
        ([(2, 2), (2,), (3, 2), (3,)], [[(3, 2)], [(2,), (3,)]], None),  # with a frozen one
        ([(2, 2), (2, 2), (2,)], [[(2, 2), (2,)]], "in several ways"),  # which of the two is frozen?
        ([(2, 2), (2, 2)], [[(2, 2)], [(2, 2)]], "in several ways"),
        ([(2, 2), (2,)], [[(2,), (2, 2)]], "does not match"),  # not the model's order
        ([(2, 2)], [[(2, 2), (2, 2)]], "does not match"),
        ([(2, 2)], [[]], None),
    ],
)
def test_without_zero_names_are_found_or_nothing_is_guessed(
    shapes: list[tuple[int, ...]], groups: list[list[tuple[int, ...]]], said: str | None, tmp_path: Path
) -> None:
    places = iter(range(9))
    content = {
        "module": {f"p{number}": torch.zeros(shape) for number, shape in enumerate(shapes)},
        "dp_world_size": 1,
        "buffer_names": [],
        "optimizer": {"state": {}, "param_groups": [{"params": [next(places) for _ in g]} for g in groups]},
    }
    for place, shape in enumerate(shape for group in groups for shape in group):
        content["optimizer"]["state"][place] = {"exp_avg": torch.zeros(shape), "step": place}  # type: ignore[index]
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save(content, path)
    if said is not None:
        with pytest.raises(CheckpointError, match=f"{path}: .*{said}.*stage 1"):
            open_deepspeed(tmp_path)
        return
    source = open_deepspeed(tmp_path)
    assert source is not None
    found = [s.shape for key, s in source.tensors.items() if key.startswith("state/exp_avg/")]
    assert len(source.numbers) == len(found)
    assert sorted(found) == sorted(shape for group in groups for shape in group)
    assert len(source.shared["frozen"]) == len(shapes) - len(found)
    assert [source.tensors[f"parameters/p{number}"].shape for number in range(len(shapes))] == shapes


def test_weights_without_an_optimizer_are_read(tmp_path: Path) -> None:
    module = {"a": torch.arange(3.0), "b": torch.arange(2)}
    content = {"module": module, "dp_world_size": 1, "buffer_names": ["b"], "optimizer": None}
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    source = open_deepspeed(tmp_path)
    assert source is not None and source.tensors.keys() == {"parameters/a", "buffers/b"}
    assert source.read("parameters/a", 1, 3).tolist() == [1, 2] and source.numbers == {}


# Universal -------------------------------------------------------------------------------------------


def test_what_the_converter_has_mixed_up_is_refused(tmp_path: Path) -> None:
    folder = unpacked("stage2_round_robin", tmp_path)
    with pytest.raises(CheckpointError, match=r"round_robin_gradients.*Load the original checkpoint"):
        open_deepspeed(folder, "global_step3_universal")
    mixed = load_saved(folder / "global_step3_universal" / "zero" / "first.bias" / "fp32.pt")["param"].whole()
    assert not torch.equal(mixed, truth_of(folder)[0]["parameters/first.bias"])  # else it could be read


@pytest.mark.parametrize("name", ["stage2_fp32", "stage3_all"])
def test_an_interrupted_conversion_is_noticed(name: str, tmp_path: Path) -> None:
    folder = unpacked(name, tmp_path) / "global_step3_universal"
    content = (folder / "zero" / "gain" / "fp32.pt").read_bytes()
    (folder / "zero" / "gain" / "fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"gain/fp32\.pt does not exist"):
        open_deepspeed(folder)
    (folder / "zero" / "gain" / "fp32.pt").write_bytes(content[:100])
    with pytest.raises(CheckpointError, match=r"gain/fp32\.pt is truncated"):
        open_deepspeed(folder)
    (folder / "zero" / "gain" / "fp32.pt").write_bytes(content)
    (folder / "zero" / "optimizer_state.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer_state\.pt does not exist"):
        open_deepspeed(folder)
    for path in folder.glob("*model_states.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match="lacks the model states of rank 0"):
        open_deepspeed(folder)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"cat_dim": 1}, "a cat_dim"),
        ({"vocab_tensor": True}, "vocab_tensor"),
        ({"cat_dim": 0, "param_n_sub_params": 2}, "param_n_sub_params"),
        ({"sub_param_shape": (3, -1)}, "sub_param_shape"),
        ({"is_expert_param": True, "ep_num_experts": 2}, "ep_num_experts, is_expert_param"),
    ],
)
def test_what_was_merged_from_cut_models_is_refused(extra: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = unpacked("stage2_fp32", tmp_path) / "global_step3_universal"
    path = folder / "zero" / "gain" / "exp_avg.pt"
    torch.save({"param": torch.ones(1), **extra}, path)
    with pytest.raises(CheckpointError, match=f"{path} was merged .* it has {said}"):
        open_deepspeed(folder)
    torch.save({"param": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=rf"{path} is not a tensor of shape \(1,\)"):
        open_deepspeed(folder)


def test_names_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = unpacked("stage2_fp32", tmp_path) / "global_step3_universal"
    shutil.copytree(folder / "zero" / "gain", folder.parent / "gain")

    def rename(content: Any) -> None:
        content["param_shapes"][2] = {"../../gain": (1,)}

    rewritten(folder / "mp_rank_00_model_states.pt", rename)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_deepspeed(folder)
