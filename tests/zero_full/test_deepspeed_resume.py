"""A run goes on from what the real DeepSpeed has saved, at any stage and number of ranks."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zero_full
from tests.worlds import POOL
from tests.zero_full.deepspeed_files import CASES, CLIENT_STATE, FOLDER, Odd, groups_of

FOUND = [
    ("stage1_bf16_groups", None, 2, 3),
    ("stage2_round_robin", None, 3, 1),
    ("stage2_fp32", "latest_universal", 2, 2),
    ("stage3_all", None, 3, 2),
    ("stage3_sub_groups", "latest_universal", 1, 0),
    ("plain_fp32", None, 2, 3),
]


def resumed(comm: Any, name: str, folder: Path, latest: str | None, stage: int) -> list[str]:
    """What differs from the truth after a load; and from what a save and a load of our own give back."""
    case = CASES[name]
    torch.manual_seed(0)
    model = Odd(case)
    base = torch.optim.AdamW(groups_of(model, case.groups), lr=0.1)
    keys: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    if case.dtype != "fp32":
        keys[case.dtype] = {"enabled": True}
    engine = zero_full.initialize(model=model, optimizer=base, config=keys)[0]
    tag = None if latest is None else (folder / latest).read_text()
    path, client = engine.load_checkpoint(folder, tag)
    assert path is not None and client is not None and client["epoch"] == CLIENT_STATE["epoch"]
    truth, rest = load_file(folder / "truth.safetensors"), json.loads((folder / "truth.json").read_text())
    assert engine.global_steps == rest["global_steps"]
    wrong = []
    for name, param in engine.module.named_parameters():
        if f"state/exp_avg/{name}" in truth:
            found = {f"parameters/{name}": zero_full.safe_get_full_fp32_param(param)}
            for entry in ("exp_avg", "exp_avg_sq"):
                state = zero_full.safe_get_full_optimizer_state(param, entry)
                found[f"state/{entry}/{name}"] = state
            wrong += [k for k, v in found.items() if v is None or not torch.equal(v, truth[k].to(v.dtype))]
            step = zero_full.safe_get_full_optimizer_state(param, "step")
            wrong += [] if param.numel() == 0 or step == rest["step"] else [f"step of {name}: {step}"]
    loss = engine(torch.arange(3) + comm.rank)
    engine.backward(loss)
    engine.step()  # and it goes on
    engine.destroy()
    return wrong


@pytest.mark.parametrize(("name", "latest", "world", "stage"), FOUND)
def test_a_run_goes_on_from_deepspeeds(
    name: str, latest: str | None, world: int, stage: int, tmp_path: Path
) -> None:
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    assert POOL.run(resumed, world, name, tmp_path, latest, stage) == [[]] * world
