"""After `initialize`, glibc keeps the memory of freed gradients for the next step."""

import os
import platform
import subprocess
import sys

import pytest

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
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
