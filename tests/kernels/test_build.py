"""Building: once for all ranks, again when something changes, and a reason wherever it cannot be."""

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zero_full.kernels import build, load
from zero_full.kernels.build import BuildError

ROOT = Path(__file__).parents[2]
FAKE = """#!/bin/sh
# Counts how often it is called, and makes what it is asked for.
if [ "$1" = --version ]; then exit 0; fi
echo "$@" >> {calls}
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then sleep {delay}; echo made > "$2"; fi; shift; done
exit {code}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for what is built on first use."""
    place = tmp_path / "cache"
    monkeypatch.setenv("ZERO_FULL_CACHE", str(place))
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    return place


class Compiler:
    """A compiler that does nothing, and says how often."""

    def __init__(self, place: Path, code: int = 0, delay: float = 0.0) -> None:
        self.calls, self.path = place / f"calls{code}", place / f"compiler{code}"
        self.path.write_text(FAKE.format(calls=self.calls, code=code, delay=delay))
        self.path.chmod(0o755)

    def count(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    fake = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(fake.path))
    yield fake


def test_what_has_been_built_is_not_built_again(cache: Path, compiler: Compiler) -> None:
    first = build.build("cpu", cache)
    once = compiler.count()
    assert first.exists() and once > len(build.LEVELS)
    assert build.build("cpu", cache) == first == build.find("cpu") and compiler.count() == once


@pytest.mark.parametrize("change", ["a source", "torch", "the architectures"])
def test_another_library_is_built_when_something_changes(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build.key("cuda")
    if change == "a source":
        copy = tmp_path / "csrc"
        shutil.copytree(ROOT / "csrc", copy)
        monkeypatch.setattr(build, "sources", lambda: copy)
        assert build.key("cuda") == before
        (copy / "core/adam.h").write_text("// another")
    elif change == "torch":
        copy = tmp_path / "torch"
        copy.mkdir()
        shutil.copy(build.torch_home() / "version.py", copy)
        monkeypatch.setattr(build, "torch_home", lambda: copy)
        assert build.key("cuda") == before
        (copy / "version.py").write_text("__version__ = '9.9'")
    else:
        monkeypatch.setenv("ZERO_FULL_CUDA_ARCHS", "90")
    assert build.key("cuda") != before


def test_only_one_of_many_ranks_compiles(cache: Path, tmp_path: Path) -> None:
    compiler = Compiler(tmp_path, delay=0.05)
    code = "from zero_full.kernels import build; print(build.build('cpu', build.cache()))"
    env = {**os.environ, "CXX": str(compiler.path)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = {rank.communicate(timeout=120)[0].strip() for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0, 0] and len(said) == 1
    calls = compiler.calls.read_text().splitlines()
    assert len(calls) == len(set(calls)) and sum("-shared" in call for call in calls) == 1
    assert [path.suffix for path in sorted(cache.iterdir())] == [".lock", ".so"]  # nothing half-made stays


def test_a_failure_is_remembered_until_it_is_asked_for_or_the_compiler_is_another(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = Compiler(tmp_path, code=3), Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(bad.path))
    for again, tried in ((False, True), (False, False), (True, True)):
        before = bad.count()
        with pytest.raises(BuildError, match="failed with code 3"):
            build.build("cpu", cache, again)
        assert (bad.count() > before) == tried
    monkeypatch.setenv("CXX", str(good.path))
    assert build.build("cpu", cache).exists()


@pytest.mark.parametrize(
    ("part", "variable", "value", "complaint"),
    [
        ("cpu", "CXX", "/bin/false", "CXX=/bin/false does not work"),
        ("cpu", "CXX", "/no/such/compiler", "does not work"),
        ("cpu", "PATH", "/nowhere", "no C.. compiler: install g.., or set CXX"),
        ("cuda", "PATH", "/nowhere", "no nvcc: install the CUDA toolkit, or set CUDA_HOME"),
    ],
)
def test_what_is_missing_is_named(
    part: str, variable: str, value: str, complaint: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    if part == "cuda":
        monkeypatch.setenv("CXX", shutil.which("g++") or "")
    monkeypatch.setenv(variable, value)
    with pytest.raises(BuildError, match=complaint):
        build.build(part, cache)


def test_a_cache_that_cannot_be_written_to_is_named(tmp_path: Path, compiler: Compiler) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match=r"cannot be written to .* set ZERO_FULL_CACHE"):
        build.build("cpu", tmp_path / "file/below")


def test_what_the_installation_has_built_comes_first(cache: Path, compiler: Compiler) -> None:
    mine = build.build("cpu", cache)
    assert cache.stat().st_mode & 0o777 == 0o700 and build.find("cpu") == mine
    installed = build.build("cpu", build.BUILT)
    assert build.find("cpu") == installed != mine


Spoil = Callable[[Path], object]  # what somebody may do to a library in a cache
SPOILED: dict[str, tuple[Spoil, str]] = {
    "others write the file": (lambda p: p.chmod(0o775), "has mode 0775, so others may write it"),
    "others write the folder": (lambda p: p.parent.chmod(0o777), "cache is not trusted: it has mode 0777"),
    "a sticky folder": (lambda p: p.parent.chmod(0o1777), "cache is not trusted: it has mode 1777"),
    "others write above": (
        lambda p: p.parent.parent.chmod(0o777),
        "others may write to .*Set ZERO_FULL_CACHE",
    ),
    "another's file": (lambda p: os.chown(p, 12345, -1), "belongs to user 12345, and this is user 0"),
    "another's folder": (
        lambda p: os.chown(p.parent, 12345, -1),
        "cache is not trusted: it belongs to user 12",
    ),
    "a link": (
        lambda p: p.symlink_to(p.rename(p.with_name("x"))),
        "is a link or something else that is no file",
    ),
    "a link to nothing": (lambda p: (p.unlink(), p.symlink_to("/nowhere")), "is a link or something else"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "is a link or something else that is no file"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_what_another_may_have_written_is_never_loaded(
    how: str,
    cache: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoil, reason = SPOILED[how]
    if "another" in how and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    spoil(build.build("cpu", cache))
    loaded: list[Path] = []
    monkeypatch.setattr(load.torch.ops, "load_library", loaded.append)
    for attempt in (lambda: build.find("cpu"), lambda: build.build("cpu", cache, again=True)):
        with pytest.raises(BuildError, match=reason):
            attempt()
    for each in (load.look(), load.load.__wrapped__()):
        assert each["cpu"].path is None and re.search(reason, each["cpu"].reason)
    assert not loaded and {record.levelname for record in caplog.records} == {"WARNING"}


def test_sticky_folders_above_and_links_of_ones_own_are_fine(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir(mode=0o700)
    monkeypatch.setattr(build, "BUILT", tmp_path / "built")
    monkeypatch.setenv("ZERO_FULL_CACHE", str(tmp_path / "link"))
    umask = os.umask(0o002)
    try:
        assert build.build("cpu", build.cache()) == build.find("cpu")
    finally:
        os.umask(umask)


def test_sources_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "HERE", tmp_path / "zero_full/kernels")
    with pytest.raises(BuildError, match=r"the C\+\+ sources are missing: there is no .*csrc"):
        build.sources()


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("90", ["arch=compute_90,code=sm_90"]),
        ("9.0+PTX", ["arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"]),
        ("80;90a", ["arch=compute_80,code=sm_80", "arch=compute_90a,code=sm_90a"]),
        ("8.0, 12.0", ["arch=compute_80,code=sm_80", "arch=compute_120,code=sm_120"]),
    ],
)
def test_architectures_are_read_as_people_write_them(
    text: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO_FULL_CUDA_ARCHS", text)
    assert build.architectures()[1::2] == flags


def test_an_architecture_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_FULL_CUDA_ARCHS", "80;hopper")
    with pytest.raises(BuildError, match="'hopper' is not like 90"):
        build.architectures()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have one level")
def test_each_level_is_compiled_for_its_instruction_set(compiler: Compiler, tmp_path: Path) -> None:
    commands = build.commands("cpu", build.toolchain("cpu"), tmp_path)
    for level in build.LEVELS:
        mine = [command for path, command in commands.items() if path.name == f"adam.cpp.{level}.o"]
        assert len(mine) == 1 and {f"-march=x86-64-{level}", f"-DZF_ISA={level}"} <= set(mine[0])


def test_the_builder_needs_nothing_but_the_standard_library() -> None:
    code = (
        "import importlib.util, sys; "
        f"spec = importlib.util.spec_from_file_location('b', {str(ROOT / 'zero_full/kernels/build.py')!r}); "
        "module = importlib.util.module_from_spec(spec); "
        "spec.loader.exec_module(module); "
        "print(bool(module.key('cpu')) and 'torch' not in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_without_kernels_the_doctor_says_why_and_operators_still_work(cache: Path) -> None:
    shutil.rmtree(cache, ignore_errors=True)
    env = {**os.environ, "CXX": "/bin/false", "ZERO_FULL_CACHE": str(cache)}
    code = (
        "import sys; from pathlib import Path; from zero_full.kernels import build; "
        "build.BUILT = Path('/nowhere'); from zero_full.kernels import load; "
        "print(load.rows()[0]); import torch; g = [torch.tensor([3.0, 4.0])]; "
        "print(load.operators().unscale_norm_check(g, 1.0)[0].item(), load.load()['cpu'].reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines() == [
        "('cpu', 'not used: CXX=/bin/false does not work')",
        "25.0 CXX=/bin/false does not work",
    ]


def test_kernels_can_be_switched_off_and_a_wrong_word_is_refused() -> None:
    code = "from zero_full.kernels.load import load; print(load()['cpu'])"
    for word, expected in (("off", "switched off by ZERO_FULL_KERNELS=off"), ("no", "can be auto, all, off")):
        env = {**os.environ, "ZERO_FULL_KERNELS": word}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert expected in done.stdout + done.stderr


def test_the_kernels_of_this_environment_are_built() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zero_full", "build"], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0 and "cpu: not built" not in done.stdout, done.stdout


def test_a_wheel_has_the_sources_and_nothing_compiled(tmp_path: Path) -> None:
    copy = tmp_path / "project"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "built", "work", "tests", "site")
    )
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    done = subprocess.run([*command, str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    sources = [path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.*")]
    assert {f"zero_full/{name}" for name in sources} <= set(names)
    assert not [name for name in names if name.endswith((".so", ".o"))]
