"""`python -m tests.structure.ways`: the functions of zero_full that one plain training step enters, in order.

A step: every function that a steady step of a small model enters, at stages 0 to 3.

A gradient's way, and a parameter's: the functions that handle one of them. The model is one Linear layer. All
elements of its weight have the same value, and so have those of its gradient; the learning rate is 0. So the
tensors of either can be told by their values. A function handles the gradient if one of its variables, when
it is called or when it returns, is such a tensor, or a list, an object or a parameter group that has one.

    python -m tests.structure.ways --before COMMIT     also counts in the sources of another commit

Two ranks over gloo, on this host. Each count runs in processes of its own, with the sources that it is about.
A comprehension is a function, as Python 3.11 calls it.
"""

import argparse
import gc
import itertools
import json
import logging
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
PACKAGE = "/zero_full/"
RANKS, STEADY = 2, 4  # steps before the one that is looked at
WIDTH, BATCH = 8, 2
SLICE = WIDTH * WIDTH // RANKS  # elements: activations are smaller
WEIGHT = 3.25
LOOKED_AT = 3.0  # the inputs of the step that is looked at; 1 before, as memory may keep old gradients
GRADIENT = LOOKED_AT / WIDTH  # of the mean of the outputs
GRADIENTS = (GRADIENT, GRADIENT / RANKS, GRADIENT * RANKS)  # divided before the sum, or behind it
WAYS = {"gradient": (2, GRADIENTS), "parameter": (3, (WEIGHT,))}  # stage, values
GROUPS = ("ParameterGroup", "TrainedGroup")  # which are made of objects
Entered = Sequence[tuple[str, str]]  # file and function, in the order of the first call
Step = Callable[[float], None]  # of inputs that are all this number


class Holds:
    """Whether a variable is a tensor of these values, or has one."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values

    def tensor(self, value: object) -> bool:
        """Whether it is at least one rank's slice of these values. Placeholders are of other classes."""
        if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
            return False
        if value.numel() < SLICE or not value.is_floating_point() or not value.untyped_storage().nbytes():
            return False  # without memory it is released
        return float(value.detach().reshape(-1)[0]) in self.values

    def __call__(self, value: object, deep: bool = True) -> bool:
        """Look into lists, into objects of zero_full, and into the parts of a parameter group."""
        if isinstance(value, Tensor):
            return self.tensor(value) or (value.is_leaf and self.tensor(value.grad))
        if isinstance(value, partial):
            return any(self(each, deep) for each in value.args)
        if isinstance(value, (list, tuple)):
            return any(self(each, deep) for each in value)
        if isinstance(value, nn.Module):
            return any(
                self.tensor(each) or self.tensor(each.grad) for each in value.parameters(recurse=False)
            )
        if not type(value).__module__.startswith("zero_full."):
            return False
        inside = getattr(value, "__dict__", {}).values()
        parts = inside if type(value).__name__ in GROUPS and deep else ()
        return any(map(self.tensor, inside)) or any(self(each, deep=False) for each in parts)


class Recorder:
    """Notes the functions of zero_full that threads of this process enter."""

    def __init__(self, holds: Holds | None) -> None:
        """`holds`: which functions count; None: all of them."""
        self.holds, self.order, self.chosen = holds, dict[tuple[str, str], None](), set[tuple[str, str]]()

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """A profile function: see `sys.setprofile`."""
        code = frame.f_code
        if event not in ("call", "return") or PACKAGE not in code.co_filename:
            return
        name = (code.co_filename.rpartition(PACKAGE)[2], getattr(code, "co_qualname", code.co_name))
        if event == "call":
            self.order.setdefault(name)
        if name not in self.chosen and self._counts(frame, arg):
            self.chosen.add(name)

    def _counts(self, frame: FrameType, result: object) -> bool:
        if self.holds is None:
            return True
        with torch.no_grad():
            return any(map(self.holds, (*list(frame.f_locals.values()), result)))

    def entered(self) -> Entered:
        """What counts, in the order of the first call."""
        return [name for name in self.order if name in self.chosen]


def engine_of(model: nn.Module, stage: int, lr: float) -> Any:
    """A plain run: fp32, AdamW, clipping. Everything is cut at stage 3."""
    import zero_full

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return zero_full.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def whole_step(stage: int) -> Step:
    """A step of four layers."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
    engine = engine_of(nn.Sequential(*layers), stage, 1e-3)

    def step(inputs: float) -> None:
        engine.backward(engine(torch.full((BATCH, 64), inputs)).square().mean())
        engine.step()

    return step


def step_of_one(stage: int) -> Step:
    """A step of the one layer."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.constant_(model.weight, WEIGHT)
    engine = engine_of(model, stage, 0.0)

    def step(inputs: float) -> None:
        engine.backward(engine(torch.full((BATCH, WIDTH), inputs)).mean())
        engine.step()

    return step


def watched(step: Step, recorder: Recorder) -> Entered:
    """What a steady step enters, on all threads."""
    gc.disable()  # what ends at some time or other is not the step's
    running = True

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if running:
            recorder(frame, event, arg)

    threading.setprofile(profile)  # lanes start their threads in the first steps
    running = False
    for _ in range(STEADY):
        step(1.0)
    running = True
    sys.setprofile(profile)
    step(LOOKED_AT)
    sys.setprofile(None)
    running = False
    return recorder.entered()


def rank(what: str) -> None:
    """The life of one rank: a count, of which the first rank prints the result."""
    import zero_full

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    zero_full.init_distributed("gloo")
    if what in WAYS:
        stage, values = WAYS[what]
        entered = watched(step_of_one(stage), Recorder(Holds(values)))
    else:
        entered = watched(whole_step(int(what)), Recorder(None))
    if dist.get_rank() == 0:
        print(json.dumps(entered), flush=True)
    dist.barrier()
    os._exit(0)


def count(what: str, sources: Path = ROOT) -> Entered:
    """Let two ranks count with the zero_full of a folder. `what`: a stage, or the name of a way."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", __file__, "--rank", what]
    environment = {**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"the count of {what} has failed: {done.stdout}{done.stderr}")
    return [(file, name) for file, name in json.loads(done.stdout.splitlines()[-1])]


def counts(sources: Path) -> dict[str, Entered]:
    """Every count, by the name of its row."""
    rows = {f"one step, stage {stage}": count(str(stage), sources) for stage in range(4)}
    return rows | {f"one {what}, stage {stage}": count(what, sources) for what, (stage, _) in WAYS.items()}


def sources_of(commit: str, folder: Path) -> Path:
    """A commit's files, in a folder."""
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True)
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def total(entered: Entered) -> str:
    """Files and functions."""
    return f"{len({file for file, _ in entered})} / {len(entered)}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield from (f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def report(now: Mapping[str, Entered], before: Mapping[str, Entered], commit: str) -> Iterator[str]:
    """The lines of the record."""
    head = ["files / functions", *([f"at {commit}"] if before else []), "now"]
    rows = [[row, *([total(before[row])] if before else []), total(now[row])] for row in now]
    yield from table(head, rows)
    for row, entered in now.items():
        if row.startswith(("one gradient", "one parameter")):
            yield f"\n## {row.capitalize()}\n"
            in_turn = itertools.groupby(entered, key=lambda each: each[0])
            listed = [[f"`{file}`", ", ".join(f"`{name}`" for _, name in names)] for file, names in in_turn]
            yield from table(["file", "functions, in the order of their first call"], listed)


def main() -> None:
    """Print the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", metavar="COMMIT", default="", help="count in this commit, too")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        return rank(asked.rank)
    from tests.bench import interleave

    print(interleave.heading(), flush=True)
    before: dict[str, Entered] = {}
    if asked.before:
        with tempfile.TemporaryDirectory() as folder:
            before = counts(sources_of(asked.before, Path(folder)))
    print("\n".join(report(counts(ROOT), before, asked.before)))
    return None


if __name__ == "__main__":
    main()
