"""The CPU's operators and block files under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_full.kernels import build, toolchain

HERE = Path(__file__).parent
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
TESTS = ["test_adam.py", "test_unscale.py", "test_lamb.py", "test_sign.py", "test_blocks.py", "test_files.py"]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the library is, under its usual name, with sanitizers compiled in."""
    cache, scratch = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("objects")
    tools = toolchain.toolchain("cpu")
    jobs = build.commands("cpu", tools, (), scratch)
    for path, command in jobs.items():
        subprocess.run([*command, *SANITIZED, "-o", str(path)], check=True)
    link = build.link_command("cpu", tools, list(jobs), cache / str(build.name_for("cpu", tools)))
    subprocess.run([*link, *SANITIZED], check=True)
    return cache


def run_in(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with the sanitizers' libraries, which must come first, and with this cache."""
    names = ("libasan.so", "libubsan.so", "libstdc++.so")  # ASan looks for the last one's exceptions at once
    found = [subprocess.check_output([_compiler(), f"-print-file-name={name}"], text=True) for name in names]
    env = {
        **os.environ,
        "LD_PRELOAD": " ".join(path.strip() for path in found),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep what they have until the end
        "ZERO_FULL_CACHE": str(cache),
    }
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, cwd=HERE)


def _compiler() -> str:
    return toolchain.toolchain("cpu").cxx


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTS)
def test_nothing_is_read_or_written_where_it_should_not(sanitized: Path, name: str) -> None:
    skipped = "not torch_finds_nothing_wrong and not fork"  # compiles other code; forks with threads
    done = run_in(sanitized, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", name, "-k", skipped)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


@pytest.mark.slow
def test_the_sanitizers_would_tell(sanitized: Path) -> None:
    """The operators trust what `bind.h` has checked; lie to one of them behind its back."""
    code = (
        "import torch; from zero_full.kernels.load import load, operators; here = torch.device('cpu'); "
        "ops = operators(here); print(load(here).path); short = torch.ones(64); "
        "long = torch.empty(0).set_(short.untyped_storage(), 0, (64,), (1,)); "
        "short.untyped_storage().resize_(128); ops.unscale_norm_check([long], 1.0)"
    )
    done = run_in(sanitized, "-c", code)
    assert str(sanitized) in done.stdout and done.returncode != 0 and "AddressSanitizer" in done.stderr
