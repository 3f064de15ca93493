"""The lowest stage that fits, and why those below it do not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zero_full.errors import FitError
from zero_full.fit.read import Shape, key_of
from zero_full.fit.saved import Batch, with_loss
from zero_full.plan import Plan, human, plan

HOST, FILE = "cpu", "nvme"
STATE = "offload_optimizer"
LADDER = (  # stages, and where the optimizer's state waits: each costs more time than the one before
    (0, ""),
    (1, ""),
    (2, ""),
    (3, ""),
    (2, HOST),
    (3, HOST),
    (3, FILE),
)
TIGHT = 10  # less than one part in so many left is too little for all that nobody counts here
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
PRECISIONS: dict[str, tuple[str, int, dict[str, Any]]] = {  # what is said, bytes of a parameter, keys
    "fp32": ("32 bits", 4, {}),
    "mixed": ("16 bits; master and gradients in fp32", 2, BF16),
    "mixed16": (
        "16 bits, also the gradients; master in fp32",
        2,
        {**BF16, "data_types": {"grad_accum_dtype": "bf16"}},
    ),
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-4}}


@dataclass(frozen=True)
class Machine:
    """Hosts that are alike. In bytes; None: nobody said how much, so nothing waits there."""

    hosts: int
    gpus: int  # on each host
    memory: int  # of each
    host_memory: int | None = None  # of a host
    disk: int | None = None

    @property
    def world(self) -> int:
        """All ranks."""
        return self.hosts * self.gpus


@dataclass(frozen=True)
class Run:
    """What is trained with, beside the model."""

    batch: Batch
    micro_batches: int = 1  # in a step
    precision: str = "mixed"
    path: str = "/local_nvme"  # for files

    def config(self, stage: int, place: str) -> dict[str, Any]:
        """The finished configuration; `place` is where the optimizer's state waits, "" the GPU."""
        path = {"nvme_path": self.path} if place == FILE else {}
        away = {STATE: {"device": place, **path}} if place else {}
        return {
            "train_micro_batch_size_per_gpu": self.batch.sequences,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": 1,
            "optimizer": OPTIMIZER,
            **PRECISIONS[self.precision][2],
            "zero_optimization": {"stage": stage, **away},
        }


@dataclass(frozen=True)
class Candidate:
    """One way to run, and whether it fits."""

    config: dict[str, Any]
    plan: Plan
    verdict: str  # "yes", "perhaps" if nobody knows its activations, "tight" or "no"
    reason: str

    @property
    def name(self) -> str:
        """In words."""
        zero = self.config["zero_optimization"]
        places = {"": "", HOST: ", state on the host", FILE: ", state in a file"}
        return f"stage {zero['stage']}{places[zero.get(STATE, {}).get('device', '')]}"


@dataclass(frozen=True)
class Fit:
    """All that was tried, in order, and what was chosen."""

    candidates: tuple[Candidate, ...]
    chosen: Candidate | None


def fit(shape: Shape, machine: Machine, run: Run) -> Fit:
    """Try one after the other; the stages in any case, the others until one fits with room to spare."""
    _check_positions(shape, run.batch.context)
    model = shape.model()
    tried: list[Candidate] = []
    left = with_loss(shape, run.batch, PRECISIONS[run.precision][1])
    for stage, place in rungs(machine):
        if place and _best(tried) is not None:
            break
        config = run.config(stage, place)
        made = replace(plan(model, config, machine.world), activations=left)
        tried.append(Candidate(config, made, *_judged(made, machine)))
    best = _best(tried)
    tight = next((each for each in tried if each.verdict == "tight"), None)
    return Fit(tuple(tried), best or tight)


def _check_positions(shape: Shape, context: int) -> None:
    positions = shape.sizes.get("positions", context)
    if context > positions:
        key = key_of(shape.family, "positions")
        raise FitError(f"--context: {context:,} tokens are more than {key}, {positions:,}")


def rungs(machine: Machine) -> Iterator[tuple[int, str]]:
    """Those for which the machine has a place."""
    for stage, place in LADDER:
        has_host = machine.host_memory is not None or not place
        if has_host and (machine.disk is not None or place != FILE):
            yield stage, place


def _best(tried: Sequence[Candidate]) -> Candidate | None:
    return next((each for each in tried if each.verdict in ("yes", "perhaps")), None)


def _judged(made: Plan, machine: Machine) -> tuple[str, str]:
    """Whether it fits, and what there is to say about it."""
    places = [("on the GPU", made.peak, machine.memory)]
    if made.host:
        places.append(("on the host", machine.gpus * made.host, machine.host_memory or 0))
    if made.disk:
        places.append(("on the disk", machine.gpus * made.disk, machine.disk or 0))
    over = [f"{human(size - room)} too much {place}" for place, size, room in places if size > room]
    if over:
        return "no", " and ".join(over)
    tight = [
        f"only {human(room - size)} left {place}"
        for place, size, room in places
        if TIGHT * (room - size) < room
    ]
    if tight:
        return "tight", " and ".join(tight)
    left = f"{human(machine.memory - made.peak)} left on the GPU"
    if made.activations is None:
        return "perhaps", f"{left} for activations, which are not known"
    return "yes", left
