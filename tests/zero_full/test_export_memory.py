"""An export of any size: little memory, and word of how far it has come."""

import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from zero_full.checkpoint.export_inspect import Progress

# Progress ----------------------------------------------------------------------------------------


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), StringIO()], ids=["terminal", "file"])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(stream: StringIO) -> None:
    seconds = iter(range(0, 1000, 4))
    with Progress("exporting", 40 * 10**6, stream, lambda: next(seconds)) as progress:
        for _ in range(10):
            progress.advance(4 * 10**6)
    text = stream.getvalue()
    if stream.isatty():
        assert text.count("\r") == 12 and "\n" not in text
        assert "exporting [############            ]  50%, 20.0 MB of 40.0 MB, 1.00 MB/s" in text
        assert text.split("\r")[-2].strip() == ""  # nothing is left
    else:
        assert [line[:14] for line in text.splitlines()] == [
            "exporting: 30%",
            "exporting: 60%",
            "exporting: 90%",
        ]


# Memory ------------------------------------------------------------------------------------------


LARGE = r"""
import re, sys
from pathlib import Path
import torch
from zero_full.checkpoint.consolidate import ExportOptions, consolidate
from zero_full.checkpoint.source import Source, StoredTensor

class OnTheFly(Source):
    path, kind, aliases, numbers, shared = Path("x"), "made on the fly", {}, {}, {}

    def __init__(self, *sizes):
        self.tensors = {f"parameters/{n}": StoredTensor((n,), torch.float32, ((0, n),)) for n in sizes}

    def read(self, key, start, stop):
        return torch.arange(start, stop, dtype=torch.float32)

    def verify(self, key, start, stop):
        pass

def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

out, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
consolidate(OnTheFly(1000), out / "small", ExportOptions(dtype))
before = peak()
consolidate(OnTheFly(50_000_000, 25_000_000), out / "large", ExportOptions(dtype, max_shard_bytes=10**8))
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells the peak of a process")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_does_not_grow_with_the_largest_tensor(tmp_path: Path, dtype: str) -> None:
    """300 MB in two tensors, exported in 64 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(tmp_path), dtype], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 * 2**20, done.stdout
    file = tmp_path / "large" / "model-00002-of-00002.safetensors"
    with safe_open(file, "pt") as opened:
        part = opened.get_slice("50000000")[49_999_990:]
    assert torch.equal(part, torch.arange(49_999_990, 50_000_000).float().to(part.dtype))
