"""After `initialize`, glibc keeps the memory of freed gradients for the next step."""

import os
import platform
import subprocess
import sys
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
import torch
from torch import nn

import zero_full
from tests.worlds import new_pool

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
COUNT = """
import resource, sys, torch, zero_full
from torch import nn

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):  # a step: gradients of 16 layers, and all are freed
        made = [torch.ones(2**18) for _ in range(16)]
        del made
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10

config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
print(new_pages())
zero_full.initialize(model=nn.Linear(4, 4), config=config)
new_pages()
print(new_pages())
"""


@GLIBC
@pytest.mark.parametrize("given", ["nothing", "a threshold"])
def test_steps_after_initialize_take_no_new_pages_unless_the_user_has_set_a_threshold(given: str) -> None:
    setting = {"MALLOC_MMAP_THRESHOLD_": "65536"} if given == "a threshold" else {}
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **setting}
    made = subprocess.run(
        [sys.executable, "-c", COUNT],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    before, after = map(int, made.stdout.split())
    assert (after > before // 2) if setting else (before > 20 * after)


def pages_of_a_step(comm: Any, zero: dict[str, int]) -> int:
    """New pages in a step of stage 2 with 48 MiB of gradients in fp32."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    config = {
        **{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "optimizer": {"type": "AdamW"}},
        "zero_optimization": {"stage": 2, **zero},
    }
    engine = zero_full.initialize(model=model, config=config)[0]
    for step in range(6):
        if step == 3:
            before = getrusage(RUSAGE_SELF).ru_minflt
        engine.backward(engine(torch.ones(1, 1024)).sum())
        engine.step()
    engine.destroy()
    return (getrusage(RUSAGE_SELF).ru_minflt - before) // 3


@GLIBC
def test_buckets_of_stage_2_are_small_enough_that_steps_take_no_new_pages() -> None:
    with new_pool(2) as pool:
        derived = max(pool.run(pages_of_a_step, 2, {}))
        whole = max(pool.run(pages_of_a_step, 2, {"reduce_bucket_size": 10**9}))
    assert whole >= 48 * 2**20 // 4096 > 4 * derived
