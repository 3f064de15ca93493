"""The DeepSpeed script whose import was changed: run as a user runs it, with the specification's JSON."""

import json
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from zero_full.examples import from_deepspeed

SPECIFIED = {
    "train_batch_size", "steps_per_print", "optimizer", "scheduler", "gradient_clipping",
    "prescale_gradients", "bf16", "fp16", "wall_clock_breakdown", "zero_optimization",
}  # fmt: skip


LAUNCHED = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
IN_ONE_LAUNCH = [("fp32", 0), ("fp32", 1), ("bf16", 2)]
ONE_AFTER_ANOTHER = f"""
import sys
from zero_full.examples import from_deepspeed
for dtype, stage in {IN_ONE_LAUNCH}:
    sys.argv[1:] = ["--dtype", dtype, "--stage", str(stage)]
    from_deepspeed.main()
"""


def shares_and_errors(*arguments: str) -> tuple[list[float], str]:
    """What the first rank says is right, epoch by epoch in per cent, and what was written to stderr."""
    done = subprocess.run([*LAUNCHED, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    return [float(share) for share in re.findall(r"([\d.]+)% right", done.stdout)], done.stderr


def assert_stages(stages: list[int], said: str) -> None:
    """The report of the configuration, which one rank or more write, has these stages in this order."""
    reported = re.findall(r"zero_optimization.stage +(\d) +user", said)
    assert [stage for stage, _ in groupby(map(int, reported))] == stages


@pytest.mark.rotates
def test_the_script_runs_and_learns() -> None:
    (before, after), said = shares_and_errors(
        "-m", "zero_full.examples.from_deepspeed", "--dtype", "fp16", "--stage", "2"
    )
    assert after > 80 > before
    assert_stages([2], said)


@pytest.mark.slow
def test_the_script_learns_at_other_stages_and_in_other_numbers(tmp_path: Path) -> None:
    """In the same processes: most of a launch is the import of torch."""
    script = tmp_path / "one_after_another.py"
    script.write_text(ONE_AFTER_ANOTHER)
    shares, said = shares_and_errors(str(script))
    assert len(shares) == 2 * len(IN_ONE_LAUNCH)
    assert all(after > 80 > before for before, after in zip(shares[::2], shares[1::2], strict=True))
    assert_stages([stage for _, stage in IN_ONE_LAUNCH], said)


def test_its_configuration_is_the_specifications() -> None:
    given = json.loads(from_deepspeed.CONFIG.read_text())
    assert given.keys() == SPECIFIED
    assert given["zero_optimization"].keys() == {
        "stage", "allgather_partitions", "reduce_scatter", "allgather_bucket_size", "reduce_bucket_size",
        "overlap_comm", "contiguous_gradients", "cpu_offload",
    }  # fmt: skip
