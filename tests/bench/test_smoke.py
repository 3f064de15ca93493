"""Every benchmark of this folder runs from its command line to its last line, with the smallest sizes.

A benchmark is a file with a `__main__` part. One that is new and has no run here fails the first test.
"""

import ast
import importlib
import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.bench import hang, kernels_gpu, optimizers
from tests.worlds import POOL

HERE = Path(__file__).parent
Patch = Callable[[pytest.MonkeyPatch, ModuleType], None]


def is_main(node: ast.stmt) -> bool:
    """Whether this statement is what a file does as a program."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


BENCHES = {
    path.stem
    for path in HERE.glob("*.py")
    if not path.stem.startswith("test_") and any(map(is_main, ast.parse(path.read_text()).body))
}


def constants(**values: Any) -> Patch:
    """Sizes that no argument sets."""

    def patch(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)

    return patch


def few_steps(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Trainings end when the loss was looked at once; half of their steps are at one bit."""
    for name, row in optimizers.ROWS.items():
        params = {**row.params, **({"freeze_step": 10} if "freeze_step" in row.params else {})}
        row = replace(row, steps=optimizers.LOOK, batch=2, params=params)
        monkeypatch.setitem(optimizers.ROWS, name, row)


def operators_on_the_cpu(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Arrays for a rehearsal."""
    constants(WIDTH=32, CHECKED=kernels_gpu.MULTIPLE)(monkeypatch, module)


@dataclass(frozen=True)
class Smoke:
    """A run of one benchmark."""

    arguments: str = ""  # DIRECTORY stands for an empty one
    patch: Patch | None = None
    slow: bool = False
    needs: str = ""  # a library; the run is skipped where it is missing


ONE_STEP = "--rounds 1 --steps 1 --warmup 1"
TINY = f"--models GPT2-tiny --ranks 2 --dtypes fp32 --tokens 16 {ONE_STEP} --results DIRECTORY/results.json"
SMOKE = {
    "checkpoint": [Smoke("--directory DIRECTORY --size 50k --rounds 1", constants(exported=lambda *_: None))],
    "collectives": [Smoke("--ranks 2 --elements 1000 --dtypes fp32 --rounds 1")],
    "commands": [Smoke("--rounds 1 --rows none.json")],
    "compare": [Smoke("HEAD --rows stage3-small --rounds 1 --steps 1", constants(LIMIT=100.0))],
    "compression": [
        Smoke("bytes --worlds 2 --steps 3"),
        Smoke("link --worlds 2 --size 50k --rounds 1", slow=True),
    ],
    "engines": [Smoke("--small")],
    "facade": [Smoke(patch=constants(LAYERS=1, ROUNDS=1, STEPS=1))],
    "files": [Smoke("--directory DIRECTORY --mib 1 --rounds 1")],
    "forecast": [
        Smoke("--sizes 50k --dtypes fp32 --rounds 1 --warmup 1 --steps 1 --rows stage-2 --quick"),
    ],
    "forecast_parts": [Smoke("--sizes 50k --steps 1 --rows stage-1 --quick")],
    "hooks": [Smoke(patch=constants(LAYERS=4, ROUNDS=1, PASSES=1))],
    "kernel_sizes": [Smoke(slow=True)],  # it compiles all operators
    "kernels": [Smoke("--rows unscale --numel 4096 --threads 1 --rounds 1")],
    "kernels_gpu": [Smoke("--device cpu --topics unscale --numel 4096 --rounds 1", operators_on_the_cpu)],
    "link": [Smoke()],
    "many_tensors": [Smoke("--counts 4 --elements 64 --rounds 1")],
    "offload": [
        Smoke(f"--topics overlap --size 50k {ONE_STEP} --bucket 20000"),
        Smoke(f"--topics disk --disk-size 50k --mib 1 {ONE_STEP} --directory DIRECTORY", slow=True),
        Smoke(f"--topics largest --size 50k {ONE_STEP}", slow=True),
    ],
    "offload_timeline": [Smoke(patch=constants(WIDTH=64, LAYER_S=0.001, LINK=1e9, DISK=1e9))],
    "optimizers": [Smoke("--seeds 0 --rows Adam", few_steps)],
    "real_models": [
        Smoke(f"{TINY} --ways loop --rows zero_full-2 DDP FSDP2", needs="transformers"),
        Smoke(f"{TINY} --ways Trainer --rows zero_full-3 DDP", needs="transformers", slow=True),
    ],
    "real_models_peak": [Smoke("--model GPT2-tiny --tokens 16 --rows zero_full-3", needs="transformers")],
    "recovery": [Smoke("--directory DIRECTORY --size 50k --rounds 1 --topics steps --length 8")],
    "scales": [Smoke("--seeds 0 --rows 1-bit-Adam", few_steps)],
    "step_time": [Smoke(f"--sizes 50k --dtypes fp32 --rows loop DDP zero_full-1 {ONE_STEP} --bucket 20000")],
    "wire": [
        Smoke(
            "--worlds 2 --links loopback --size 50k --sequences 1 --bucket 20000 --rounds 1 --steps 1 "
            "--rows DDP zero_full-1"
        ),
    ],
    "units": [Smoke(patch=constants(UNITS=2, ROUNDS=1, PASSES=1))],
}
BY_RANKS = {"hang"}  # torchrun starts its ranks


def marks(run: Smoke) -> list[pytest.MarkDecorator]:
    """When a run is left out."""
    missing = bool(run.needs) and importlib.util.find_spec(run.needs) is None
    return [pytest.mark.slow] * run.slow + [pytest.mark.skip(f"{run.needs} is not installed")] * missing


RUNS = [
    pytest.param(name, run, id=f"{name} {run.arguments}".strip(), marks=marks(run))
    for name, runs in SMOKE.items()
    for run in runs
]


class SharedPool:
    """The ranks of the tests, which stay up, in the place of a benchmark's own."""

    def __init__(self, size: int = 4) -> None:
        self.run = POOL.run

    def stop(self) -> None:
        """Do nothing."""


def test_every_benchmark_has_a_run_here() -> None:
    assert {*SMOKE} | BY_RANKS == BENCHES and not {*SMOKE} & BY_RANKS
    assert all(any(not run.slow for run in runs) for name, runs in SMOKE.items() if name != "kernel_sizes")


def test_make_bench_names_benchmarks() -> None:
    named = re.findall(r"-m tests\.bench\.(\w+)", (HERE.parents[1] / "Makefile").read_text())
    assert len(named) > 10 and {*named} <= BENCHES


@pytest.mark.rotates
@pytest.mark.parametrize(("name", "run"), RUNS)
def test_a_benchmark_runs_to_its_last_line(
    name: str, run: Smoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"tests.bench.{name}")
    given = [word.replace("DIRECTORY", str(tmp_path)) for word in run.arguments.split()]
    # Names of rows have a blank.
    given = [re.sub(r"^(1-bit|zero_full|stage)-", r"\1 ", word) for word in given]
    monkeypatch.setattr("sys.argv", [f"{name}.py", *given])
    monkeypatch.setenv("ZERO_FULL_SHARED_MEMORY", "on")  # a benchmark may change it: it is put back
    if hasattr(module, "Pool"):
        monkeypatch.setattr(module, "Pool", SharedPool)
    if run.patch is not None:
        run.patch(monkeypatch, module)
    threads = torch.get_num_threads()
    try:
        ended = module.main([]) if name == "link" else module.main()
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert lines and not ended
    if "last line is JSON" in (module.__doc__ or ""):
        assert isinstance(json.loads(lines[-1]), dict)


def hangs(comm: Any, file: Path) -> str:
    """What a rank says of the run that goes wrong."""
    try:
        hang.main(file)
    except RuntimeError as error:
        return str(error)
    return "nothing went wrong"


def test_the_run_that_hangs_is_noticed_and_recorded(tmp_path: Path) -> None:
    said = POOL.run(hangs, 3, tmp_path / "hang.json")
    assert all("rank 2" in text for text in said), said
    assert [*tmp_path.rglob("*.json")]
