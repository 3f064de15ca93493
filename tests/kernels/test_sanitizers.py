"""The CPU's operators and block files under AddressSanitizer and UndefinedBehaviorSanitizer.

The threads of block files also run alone (`block_io_check.cpp`): without memory, and under stress, watched by
ThreadSanitizer.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zero_full.kernels import builder, toolchain

HERE = Path(__file__).parent
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
TESTS = [
    *("test_adam.py", "test_stochastic.py", "test_unscale.py", "test_lamb.py"),
    *("test_sign.py", "test_blocks.py", "test_sum.py", "test_files.py"),
]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the library is, under its usual name, with sanitizers compiled in."""
    cache, scratch = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("objects")
    tools = toolchain.toolchain("cpu")
    jobs = builder.commands("cpu", tools, (), scratch)
    for path, command in jobs.items():
        subprocess.run([*command, *SANITIZED, "-o", str(path)], check=True)
    link = builder.link_command("cpu", tools, list(jobs), cache / str(builder.name_for("cpu", tools)))
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


def run_pool(directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """`block_io_check.cpp`, compiled so, has run. Sources in the directory come before those of csrc."""
    program, places = directory / "check", [f"-I{directory}", f"-I{builder.sources()}"]
    source = str(HERE / "block_io_check.cpp")
    command = [
        _compiler(),
        "-std=c++17",
        "-g",
        "-O1",
        *flags,
        *places,
        source,
        "-pthread",
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    return subprocess.run([str(program)], env=env, capture_output=True, text=True)


def test_the_pool_goes_on_when_memory_ends_and_when_direct_access_is_refused(tmp_path: Path) -> None:
    done = run_pool(tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.slow
def test_the_pool_has_no_data_race(tmp_path: Path) -> None:
    done = run_pool(tmp_path, "-fsanitize=thread")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-5000:]


LOCK = "const std::lock_guard<std::mutex> lock(mutex_);"
MISTAKES = {
    "a transfer is forgotten without the lock": (LOCK + "\n  transfers_", "transfers_", "data race"),
    "memory that cannot be pinned is an error": (" || error == EFAULT", "", "wrong: a write"),
    "the end of memory passes the border of C": ("const std::bad_alloc&", "const std::bad_cast&", ""),
    "blocks of a refused transfer stay in the queue": ("queue_.pop_back();", "break;", "data race"),
    "a pool that is not made leaves threads behind": (
        "  } catch (...) {\n    close();",
        "  } catch (...) {",
        "terminate called",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_pool_is_noticed(tmp_path: Path, name: str) -> None:
    right, wrong, said = MISTAKES[name]
    shutil.copytree(builder.sources() / "io", tmp_path / "io")
    shutil.copy(builder.sources() / "bind_io.cpp", tmp_path)
    place = tmp_path / "io/block_io.cpp"
    assert place.read_text().count(right) == 1
    place.write_text("#include <typeinfo>\n" + place.read_text().replace(right, wrong))
    done = run_pool(tmp_path, "-fsanitize=thread", "-w")
    assert done.returncode != 0 and said in done.stderr
