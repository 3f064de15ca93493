"""Muon: whole matrices at every stage, in the bits of torch's own on one process."""

import pytest
import torch
from torch import Tensor

from tests.worlds import run_each
from tests.zero_full.muon_runs import BY_ADAM, Run, expected, trained

PRECISIONS = ("fp32", "bf16", "fp16")
HOST = {"offload_optimizer": {"device": "cpu"}}
MICS, PARTS = {"mics_shard_size": 2}, {"sub_group_size": 100}
RUNS = [
    *(Run(stage, precision) for stage in range(4) for precision in PRECISIONS),
    *(Run(stage, micro_batches=2, clip=1.0) for stage in range(4)),
    Run(2, "bf16", zero={"overlap_comm": True}),
    Run(3, "bf16", zero=PARTS),
    *(Run(stage, precision, 2, zero=HOST) for stage, precision in ((1, "bf16"), (2, "fp16"), (3, "fp32"))),
    Run(1, options={"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 2}),
]
IN_GROUPS = [
    *(Run(stage, "bf16", zero=MICS) for stage in (1, 2, 3)),
    Run(3, zero={**MICS, "sub_group_size": 50}),
]


def differences(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """What is off: AdamW's by more than rounding, Muon's by a bit."""
    wrong = [f"only one has {name}" for name in got.keys() ^ want.keys()]
    for name in got.keys() & want.keys():
        mine, theirs = got[name], want[name].to(got[name].dtype)
        by_adam = any(f".{each}." in name for each in BY_ADAM)
        tolerance = 4 * torch.finfo(mine.dtype).eps if by_adam else 0.0
        if not torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance / 4):
            wrong.append(f"{name} by {float((mine - theirs).abs().max())}")
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sharded_matrices_have_the_bits_of_torchs_muon(world: int) -> None:
    runs = [*RUNS, *(IN_GROUPS if world == 4 else [])]
    for run, ranks in zip(runs, run_each(trained, world, [(run,) for run in runs]), strict=True):
        want = expected(world, run)
        for rank, got in enumerate(ranks):
            assert not differences(got, want), (run, rank)
