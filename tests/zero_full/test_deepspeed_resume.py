"""A run of DeepSpeed goes on here: at other stages and numbers of ranks, with the same values and losses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zero_full
from tests.worlds import run_each
from tests.zero_full.deepspeed_cases import truth_of, unpacked
from tests.zero_full.deepspeed_files import (
    CASES,
    MOMENTS,
    MORE_STEPS,
    Odd,
    configuration,
    groups_of,
    train,
)
from zero_full.__main__ import main

# Case, what is loaded, and at which stage, by number of ranks. If they are as many as there were, they go on.
LATEST, UNIVERSAL = "latest", "latest_universal"
PLACES = [
    (1, [("stage1_alone", LATEST, 3), ("stage3_sub_groups", UNIVERSAL, 0), ("stage3_all", LATEST, 2)]),
    (2, [("plain_fp32", LATEST, 3), ("stage1_elastic", LATEST, 2), ("stage2_round_robin", LATEST, 3)]),
    (3, [("stage2_fp32", UNIVERSAL, 3), ("stage2_aligned", LATEST, 1), ("stage3_persistent", LATEST, 3)]),
    (4, [("stage3_all", LATEST, 1), ("stage1_bf16_groups", LATEST, 3), ("plain_bf16", LATEST, 2)]),
]


@pytest.mark.rotates
@pytest.mark.parametrize(("world", "cases"), PLACES)
def test_a_run_goes_on(world: int, cases: list[tuple[str, str, int]], tmp_path: Path) -> None:
    for name, _, _ in cases:
        unpacked(name, tmp_path)
    run_each(goes_on, world, [(tmp_path / name, latest, stage) for name, latest, stage in cases])


def goes_on(comm: Any, folder: Path, latest: str, stage: int) -> None:
    case = CASES[folder.name]
    truth, rest = truth_of(folder)
    engine = engine_of(folder.name, stage)
    tag = None if latest == LATEST else (folder / latest).read_text()
    path, client_state = engine.load_checkpoint(folder, tag)
    assert path == str(folder / (folder / latest).read_text()) and client_state["epoch"] == 3
    for name, param in engine.module.named_parameters():
        if not (param.requires_grad and f"state/exp_avg/{name}" in truth):
            continue
        assert torch.equal(zero_full.safe_get_full_fp32_param(param), truth[f"parameters/{name}"]), name
        assert zero_full.safe_get_full_optimizer_state(param, "step") == rest["step"], name
        for key in MOMENTS:
            found = zero_full.safe_get_full_optimizer_state(param, key)
            assert torch.equal(found, truth[f"state/{key}/{name}"]), (key, name)
    assert engine.global_steps == rest["global_steps"] and engine.skipped_steps == rest["skipped_steps"]
    assert engine.get_lr() == [group["lr"] for group in rest["groups"]]
    if case.dtype == "fp16":
        assert engine.optimizer.scaler.scale == rest["scaler"]["cur_scale"]
    if case.world == comm.world_size:
        steps = range(case.steps, case.steps + MORE_STEPS)
        tolerance = 1e-5 if case.dtype == "fp32" else 0.02
        expected = rest["after"][comm.rank]
        assert train(engine, comm.rank, steps) == pytest.approx(expected, rel=tolerance)
    engine.destroy()


def engine_of(name: str, stage: int) -> Any:
    case = CASES[name]
    config = configuration(replace(case, stage=stage, zero={}))
    model = Odd(case)
    optimizer = torch.optim.AdamW(groups_of(model, case.groups), lr=0.01)
    return zero_full.initialize(model=model, optimizer=optimizer, config=config)[0]


def test_a_universal_checkpoint_is_found_without_latest(tmp_path: Path) -> None:
    folder = unpacked("stage2_fp32", tmp_path)
    (folder / "latest").unlink()
    path, _ = engine_of("stage2_fp32", 0).load_checkpoint(folder)
    assert path == str(folder / "global_step3_universal")


def test_an_own_checkpoint_beside_deepspeeds_is_found_wherever_it_is(tmp_path: Path) -> None:
    folder, engine = unpacked("stage1_alone", tmp_path), engine_of("stage1_alone", 0)
    engine.load_checkpoint(folder)
    engine.save_checkpoint(folder, tag="mine")
    assert engine.load_checkpoint(folder)[0] == str(folder / "mine")
    (folder / "mine").rename(folder / "replaced-00000000-mine")  # as in the middle of the next save
    assert engine.load_checkpoint(folder)[0] == str(folder / "replaced-00000000-mine")
    assert engine.load_checkpoint(folder, "global_step3")[0] == str(folder / "global_step3")


def test_a_flipped_bit_is_found_before_anything_changes(tmp_path: Path) -> None:
    folder, engine = unpacked("stage2_fp32", tmp_path), engine_of("stage2_fp32", 0)
    engine.load_checkpoint(folder, "global_step3")
    before = [p.detach().clone() for p in engine.module.parameters()]
    written = next(p for p in before if p.numel() > 1).flatten()[1:2].numpy().tobytes()
    paths = (folder / "global_step3").glob("*optim_states.pt")
    path, content = next((p, p.read_bytes()) for p in sorted(paths) if written in p.read_bytes())
    place = content.index(written)
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with pytest.raises(zero_full.CheckpointError, match=rf"{path.name}: the checksum of .* does not match"):
        engine.load_checkpoint(folder, "global_step3")
    assert all(map(torch.equal, engine.module.parameters(), before))


def test_the_state_of_another_schedule_is_refused(tmp_path: Path) -> None:
    folder, case = unpacked("stage2_fp32", tmp_path), CASES["stage2_fp32"]
    model = Odd(case)
    optimizer = torch.optim.AdamW(groups_of(model, case.groups), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    config = {key: value for key, value in configuration(case).items() if key != "scheduler"}
    engine = zero_full.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
    message = "the state of a schedule with last_batch_iteration, not of a ExponentialLR"
    with pytest.raises(zero_full.CheckpointError, match=message):
        engine.load_checkpoint(folder, "global_step3")
    engine.load_checkpoint(folder, "global_step3", load_lr_scheduler_states=False)


def test_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    case, model = CASES["stage2_fp32"], Odd(CASES["stage2_fp32"])
    optimizer = torch.optim.AdamW(groups_of(model, 3)[::-1], lr=0.01)
    config = configuration(replace(case, stage=0))
    engine = zero_full.initialize(model=model, optimizer=optimizer, config=config)[0]
    with pytest.raises(
        zero_full.CheckpointError,
        match=r"is in the optimizer's parameter group [02], but was saved in group [02]",
    ):
        engine.load_checkpoint(unpacked("stage2_fp32", tmp_path))


def test_frozen_parameters_that_were_left_out_are_told(tmp_path: Path) -> None:
    engine = engine_of("stage2_excluded", 2)
    with pytest.raises(zero_full.CheckpointError, match=r"lacks base\.weight"):
        engine.load_checkpoint(unpacked("stage2_excluded", tmp_path))
    path, _ = engine.load_checkpoint(unpacked("stage2_excluded", tmp_path), load_module_strict=False)
    assert path is not None


def test_it_can_be_exported_and_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpacked("stage3_all", tmp_path)
    assert main(["export", str(folder), str(folder / "out"), "--dtype", "fp32"]) == 0
    found, truth = load_file(folder / "out" / "model.safetensors"), load_file(folder / "truth.safetensors")
    for name in ("embed.weight", "base.weight", "gain"):
        assert torch.equal(found[name], truth[f"parameters/{name}"])
    assert main(["inspect", str(folder), "--verify"]) == 0
    said = capsys.readouterr().out
    assert "DeepSpeed, stage 3" in said and "0.19.8" in said and "are what was written" in said
