"""Building: once for all ranks, again when something changes, and a reason wherever it cannot be."""

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kernels.compilers import MISTAKE, NVCC_12_0, NVCC_13_0, Compiler, says
from zero_full.__main__ import main
from zero_full.kernels import builder, library_cache, toolchain
from zero_full.kernels.toolchain import BuildError

ROOT = Path(__file__).parents[2]


def test_what_has_been_built_is_not_built_again(cache: Path, compiler: Compiler) -> None:
    first = builder.build("cpu", cache)
    once = compiler.count()
    assert first.exists() and once > len(builder.LEVELS)
    assert (
        builder.build("cpu", cache) == first and builder.find("cpu") == [first] and compiler.count() == once
    )


def copied(source: Path, place: Path) -> Path:
    shutil.copytree(source, place) if source.is_dir() else shutil.copy(source, place)
    return place


Change = Callable[[Path, pytest.MonkeyPatch, Compiler, Compiler], object]
CUDA = "libtorch_cuda.so"  # of a torch that is built for GPUs


def other_source(place: Path, patch: pytest.MonkeyPatch, *_: Compiler) -> None:
    copy = copied(ROOT / "csrc", place / "csrc")
    (copy / "core/adam.h").write_text("// another")
    patch.setattr(builder, "sources", lambda: copy)


def other_torch(version: bytes = b"", library: str = "") -> Change:
    """Move torch, to another version if given; add this library, or remove it where torch has it."""

    def change(place: Path, patch: pytest.MonkeyPatch, *_: Compiler) -> None:
        mine, installed = place / "torch", toolchain.torch_home()
        (mine / "lib").mkdir(parents=True)
        (mine / "version.py").write_bytes(version or (installed / "version.py").read_bytes())
        if (installed / "lib" / CUDA).exists() != (library == CUDA):
            (mine / "lib" / CUDA).touch()
        patch.setattr(builder, "torch_home", lambda: mine)

    return change


def other_flags(name: str) -> Change:
    return lambda place, patch, *_: patch.setattr(builder, name, [*getattr(builder, name), "-fanother"])


WHAT: dict[str, Change] = {  # found by everybody
    "a source": other_source,
    "torch": other_torch(b"__version__ = '9.9'"),
    "a linked library": other_torch(library=CUDA),
    "nvcc's flags": other_flags("CUDA"),
    "the binding's flags": other_flags("BINDING"),
    "the machine": lambda place, patch, *_: patch.setattr(platform, "machine", lambda: "another"),
}
HOW: dict[str, Change] = {  # of importance for who compiles
    "g++": lambda place, patch, compiler, nvcc: compiler.become("2"),
    "nvcc": lambda place, patch, compiler, nvcc: nvcc.become("2"),
    "nvcc's variables": lambda place, patch, *_: patch.setenv("NVCC_APPEND_FLAGS", "-G"),
    "the C library": lambda place, patch, *_: patch.setattr(os, "confstr", lambda name: "glibc 9.9"),
}


@pytest.mark.parametrize("change", [*WHAT, *HOW, "nothing"])
def test_another_library_is_built_when_something_changes(
    change: str, tmp_path: Path, compiler: Compiler, nvcc: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name() -> builder.Name:
        toolchain._output_of.cache_clear()  # it may be another compiler now
        return builder.name_for("cuda", toolchain.toolchain("cuda"))

    before = name()
    {**WHAT, **HOW, "nothing": lambda *_: None}[change](tmp_path, monkeypatch, compiler, nvcc)
    after = name()
    assert (after.content != before.content) == (change in WHAT)
    assert (after.compilers != before.compilers) == (change in HOW)
    toolchain._output_of.cache_clear()


def test_torch_elsewhere_and_sources_elsewhere_make_the_same_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {part: builder.content_hash(part) for part in builder.PARTS}
    copy = copied(ROOT / "csrc", tmp_path / "csrc")
    monkeypatch.setattr(builder, "sources", lambda: copy)
    other_torch()(tmp_path, monkeypatch)  # type: ignore[call-arg]
    assert {part: builder.content_hash(part) for part in builder.PARTS} == before


def test_a_library_is_found_by_the_gpus_that_it_serves_and_not_by_a_variable(
    cache: Path, compiler: Compiler, nvcc: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO_FULL_CUDA_ARCHS", "80;90+PTX")
    installed = builder.build("cuda", library_cache.BUILT)
    monkeypatch.delenv("ZERO_FULL_CUDA_ARCHS")
    native = builder.build("cuda", cache, [(12, 0)])
    for path in (compiler.path, nvcc.path):
        path.unlink()  # where it is used there need be no compiler
    both = {installed, native}
    for devices, expected in (
        ([(9, 0)], [installed]),
        ([(8, 6), (9, 0)], [installed]),
        ([(12, 0)], [native, installed]),
        ([(7, 5)], []),
        ([(7, 5), (9, 0)], []),
    ):
        assert builder.find("cuda", devices) == expected
    assert set(builder.find("cuda")) == both


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (NVCC_12_0, {"80,code=sm_80", "90,code=sm_90", "90,code=compute_90"}),
        (NVCC_13_0, {"80,code=sm_80", "90,code=sm_90", "100,code=sm_100", "100,code=compute_100"}),
    ],
    ids=["12.0", "13.0"],
)
def test_nvcc_is_given_no_architecture_that_it_does_not_know(
    known: tuple[int, ...], expected: set[str], cache: Path, nvcc: Compiler
) -> None:
    nvcc.options["gpus"] = " ".join(map(str, known))
    nvcc.become("for this test")
    builder.build("cuda", cache)
    words = {word for line in nvcc.lines() for word in line.split() if word.startswith("arch=")}
    assert words == {f"arch=compute_{each}" for each in expected}


def test_only_one_of_many_ranks_compiles(cache: Path, tmp_path: Path) -> None:
    compiler = Compiler(tmp_path / "c++", delay=0.05)
    code = (
        "from zero_full.kernels import builder; from zero_full.kernels.library_cache import caches; "
        "print(builder.build('cpu', caches()[0]))"
    )
    env = {**os.environ, "CXX": str(compiler.path)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = {rank.communicate(timeout=120)[0].strip() for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0, 0] and len(said) == 1
    calls = compiler.lines()
    assert len(calls) == len(set(calls)) and sum("-shared" in call for call in calls) == 1
    assert [path.suffix for path in sorted(cache.iterdir())] == [".lock", ".so"]  # nothing half-made stays


# Failures ------------------------------------------------------------------------------------------


def test_a_mistake_is_remembered_until_it_is_asked_for_or_the_compiler_is_another(
    cache: Path, compiler: Compiler
) -> None:
    compiler.become("1", MISTAKE)
    for again, tried in ((False, True), (False, False), (True, True)):
        before = compiler.count()
        with pytest.raises(BuildError, match="failed with code 3"):
            builder.build("cpu", cache, again=again)
        assert (compiler.count() > before) == tried
    assert "this is no C++" in (builder.last_failure("cpu", cache) or "")
    compiler.become("2")
    toolchain._output_of.cache_clear()
    assert builder.build("cpu", cache).exists()


PASSING = {
    "a killed driver": "kill -9 $$",
    "a killed compiler": says("c++: fatal error: Killed signal terminated program cc1plus"),
    "a killed nvcc": says("nvcc error   : cicc died due to signal 9 (Kill signal)", 9),
    "a full disk": says("adam.cpp:9:1: fatal error: error writing to /tmp/x.s: No space left on device"),
    "no memory": says("cc1plus: out of memory allocating 65536 bytes after a total of 99 bytes"),
    "something unheard of": says("no idea", 77),
}
LASTING = {
    "g++": MISTAKE,
    "a header": says("csrc/bind.h:6:10: fatal error: torch/csrc/stable/library.h: No such file or directory"),
    "nvcc": says('csrc/cuda/adam.cu(12): error: identifier "x" is undefined', 2),
    "ptxas": says("ptxas fatal   : Unresolved extern function", 255),
    "an option": says("g++: error: unrecognized command-line option -march=x"),
    "the linker": says("/usr/bin/ld: cannot find -ltorch_cpu: No such file or directory"),
}


@pytest.mark.parametrize("end", [*PASSING, *LASTING])
def test_only_a_mistake_is_not_tried_again(end: str, cache: Path, compiler: Compiler) -> None:
    compiler.become("1", {**PASSING, **LASTING}[end])
    for _ in range(2):
        tried = compiler.count()
        with pytest.raises(BuildError, match="this command failed with code"):
            builder.build("cpu", cache)
    assert (compiler.count() > tried) == (end in PASSING)
    compiler.become("1")  # the same compiler, which nobody kills now
    if end in PASSING:
        assert builder.last_failure("cpu", cache) is None
        assert builder.build("cpu", cache).exists()


def test_who_has_waited_for_a_failure_does_not_try_it_once_more(cache: Path, tmp_path: Path) -> None:
    slow = Compiler(tmp_path / "c++", end="kill -9 $$", delay=0.2)
    alone = len(builder.commands("cpu", toolchain.Toolchain("c++", None, Path("torch")), (), Path()))

    def rank(_: int) -> str:
        with pytest.raises(BuildError) as failed:
            builder.build("cpu", cache)
        return str(failed.value)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as ranks:
        patch.setenv("CXX", str(slow.path))
        said = set(ranks.map(rank, range(3)))
    assert len(said) == 1 and "failed with code -9" in said.pop() and slow.count() <= alone


def test_a_record_that_is_none_is_no_reason(cache: Path, compiler: Compiler) -> None:
    compiler.become("1", MISTAKE)
    with pytest.raises(BuildError):
        builder.build("cpu", cache)
    (record,) = cache.glob("*.failed")
    for content in ("", "half of it", "[]", "{}"):
        record.write_text(content)
        assert builder.last_failure("cpu", cache) is None


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
        builder.build(part, cache)


def test_sources_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(builder, "PACKAGE", tmp_path / "zero_full")
    with pytest.raises(BuildError, match=r"the C\+\+ sources are missing: .*csrc"):
        builder.sources()


# Here ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have one level")
def test_each_level_is_compiled_for_its_instruction_set(compiler: Compiler, tmp_path: Path) -> None:
    commands = builder.commands("cpu", toolchain.toolchain("cpu"), (), tmp_path)
    for level in builder.LEVELS:
        mine = [command for path, command in commands.items() if path.name == f"adam.cpp.{level}.o"]
        assert len(mine) == 1 and {f"-march=x86-64-{level}", f"-DZF_ISA={level}"} <= set(mine[0])


def test_the_builder_needs_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; from zero_full.kernels import builder, library_cache; "
        "found = builder.find('cpu') or builder.content_hash('cpu'); "
        "print(bool(found) and not {'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


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


def test_the_command_says_how_far_it_is_and_leaves_out_what_torch_cannot_use(
    cache: Path, nvcc: Compiler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    assert main(["build"]) == 0 and nvcc.count() == 0
    printed = capsys.readouterr().out
    total = int(re.search(r"^cpu: (\d+) files to compile", printed)[1])  # type: ignore[index]
    assert all(f"\ncpu: {number} of {total}: " in printed for number in range(1, total + 1))
    assert "cuda: not built, because this torch has no CUDA" in printed
    assert main(["build", "cuda"]) == 0 and nvcc.count() > 1
    assert "cuda: 1 of " in capsys.readouterr().out
    assert main(["build", "cpu"]) == 0 and "files to compile" not in capsys.readouterr().out
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setenv("ZERO_FULL_CACHE", str(cache / "another"))
    nvcc.become("1", MISTAKE)
    assert main(["build"]) == 0 and "cuda: not built: this command failed" in capsys.readouterr().out
    assert main(["build", "cuda"]) == 1
