"""Compilers that compile nothing: they count how often they are called, and make what they are asked for."""

from pathlib import Path

import pytest

from zero_full.kernels import library_cache

FAKE = """#!/bin/sh
case "$1" in
  --version) echo "version {version}"; exit 0;;
  --list-gpu-arch) printf 'compute_%s\\n' {gpus}; exit 0;;
esac
echo "$@" >> {calls}
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then sleep {delay}; echo made > "$2"; fi; shift; done
{end}
"""
NVCC_12_0 = (50, 60, 70, 75, 80, 86, 87, 89, 90)
NVCC_13_0 = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


class Compiler:
    """A C++ compiler, or nvcc. `end` is how it ends, as a line for the shell."""

    def __init__(
        self,
        path: Path,
        version: str = "1",
        end: str = "exit 0",
        delay: float = 0.0,
        gpus: tuple[int, ...] = NVCC_13_0,
    ) -> None:
        self.path, self.calls = path, path.with_name(f"{path.name}.calls")
        self.options = {"delay": delay, "gpus": " ".join(map(str, gpus)), "calls": self.calls}
        self.become(version, end)

    def become(self, version: str, end: str = "exit 0") -> None:
        """Another compiler with the same path."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(FAKE.format(version=version, end=end, **self.options))
        self.path.chmod(0o755)

    def lines(self) -> list[str]:
        """What it was called with."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def count(self) -> int:
        return len(self.lines())


def says(text: str, code: int = 1) -> str:
    """The end of a compiler that complains."""
    return f"echo '{text}' >&2; exit {code}"


MISTAKE = says("csrc/adam.cpp:3:1: error: this is no C++", 3)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for what is built on first use, and nothing installed."""
    place = tmp_path / "cache"
    monkeypatch.setenv("ZERO_FULL_CACHE", str(place))
    monkeypatch.setattr(library_cache, "BUILT", tmp_path / "built")
    return place


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """The C++ compiler of this test."""
    fake = Compiler(tmp_path / "c++")
    monkeypatch.setenv("CXX", str(fake.path))
    return fake


@pytest.fixture
def nvcc(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """The nvcc of this test, beside its C++ compiler. Nobody has named architectures."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv("ZERO_FULL_CUDA_ARCHS", raising=False)
    return Compiler(tmp_path / "cuda/bin/nvcc")
