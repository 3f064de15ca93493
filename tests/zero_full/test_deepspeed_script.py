"""The DeepSpeed script whose import was changed: run as a user runs it, with the specification's JSON."""

import json
import re
import subprocess
import sys

import pytest

from zero_full.examples import from_deepspeed

SPECIFIED = {
    "train_batch_size", "steps_per_print", "optimizer", "scheduler", "gradient_clipping",
    "prescale_gradients", "bf16", "fp16", "wall_clock_breakdown", "zero_optimization",
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "stage"), [("fp32", 0), ("fp32", 1), ("bf16", 2), ("fp16", 2)])
def test_the_script_runs_and_learns(dtype: str, stage: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "zero_full.examples.from_deepspeed", "--dtype", dtype, "--stage", str(stage)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    right = [float(share) for share in re.findall(r"([\d.]+)% right", done.stdout)]
    assert len(right) == 2 and right[1] > 80 > right[0]
    assert re.search(rf"zero_optimization.stage +{stage} +user", done.stderr)
    assert "Error" not in done.stderr


def test_its_configuration_is_the_specifications() -> None:
    given = json.loads(from_deepspeed.CONFIG.read_text())
    assert given.keys() == SPECIFIED
    assert given["zero_optimization"].keys() == {
        "stage", "allgather_partitions", "reduce_scatter", "allgather_bucket_size", "reduce_bucket_size",
        "overlap_comm", "contiguous_gradients", "cpu_offload",
    }  # fmt: skip
