"""Choose the lowest stage that fits, or the fastest one, with the reasons why others do not fit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from zero_full.errors import FitError
from zero_full.fit.activation_estimate import Batch, with_loss
from zero_full.fit.hf_config import Shape, key_of
from zero_full.fit.mesh import as_pipeline, cut_for_tensor, with_activations
from zero_full.fit.model_operations import operations_of
from zero_full.plan import MachineRates, ModelWork, Plan, human, plan, read_rates

HOST, FILE = "cpu", "nvme"
STATE = "offload_optimizer"
LADDER = (  # (stage, offload device of the optimizer state), by increasing time per step
    (0, ""),
    (1, ""),
    (2, ""),
    (3, ""),
    (2, HOST),
    (3, HOST),
    (3, FILE),
)
PIPELINE_LADDER = ((0, ""), (1, ""), (1, HOST), (1, FILE))  # a pipeline runs at stages 0 and 1
TIGHT = 10  # less than 1/10 left is tight, as fragmentation and libraries are not counted
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
PRECISIONS: dict[str, tuple[str, int, dict[str, Any]]] = {  # description, bytes per parameter, keys
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
    """A cluster of equal hosts. Sizes are in bytes; None: unknown, so nothing is offloaded to it."""

    hosts: int
    gpus: int  # per host; of ranks, if they are on CPUs
    memory: int  # per GPU
    host_memory: int | None = None  # per host
    disk: int | None = None  # per host
    tensor: int = 1  # ranks that hold parts of the same matrices
    pipe: int = 1  # ranks that hold different layers
    device: str = "cuda"  # "cpu": each rank is a process without a GPU

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are on CPUs, in the host's memory."""
        return self.device == "cpu"

    @property
    def unit(self) -> str:
        """The place of a rank's memory, as text."""
        return "CPU rank" if self.is_cpu else "GPU"

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.hosts * self.gpus

    @property
    def data(self) -> int:
        """The number of data-parallel ranks."""
        return self.world // (self.tensor * self.pipe)


@dataclass(frozen=True)
class Run:
    """The training options besides the model and the machine."""

    batch: Batch
    micro_batches: int = 1  # per step
    precision: str = "mixed"
    path: str = "/local_nvme"  # directory of spill files

    def config(self, stage: int, place: str) -> dict[str, Any]:
        """Return the complete configuration. `place`: offload device of the optimizer state; "": the GPU."""
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
    """A configuration with its memory plan, and whether it fits."""

    config: dict[str, Any]
    plan: Plan
    verdict: str  # "yes", "perhaps" if activations are unknown, "tight" or "no"
    reason: str

    @property
    def name(self) -> str:
        """The stage and offload device as text."""
        return name_of(self.config)


def name_of(config: Mapping[str, Any]) -> str:
    """Return the stage and offload device of a configuration as text."""
    zero = config["zero_optimization"]
    places = {"": "", HOST: ", state on the host", FILE: ", state in a file"}
    return f"stage {zero['stage']}{places[zero.get(STATE, {}).get('device', '')]}"


@dataclass(frozen=True)
class Fit:
    """The candidates that were tried, in order, and the chosen one."""

    candidates: tuple[Candidate, ...]
    chosen: Candidate | None


def fit(
    shape: Shape,
    machine: Machine,
    run: Run,
    report: Callable[[str], None] = lambda text: None,
    *,
    rates: str | Path | MachineRates | None = None,
    fastest: bool = False,
    work: ModelWork | None = None,
) -> Fit:
    """Try all stages without offloading, then offloading until a candidate fits that is not tight.

    report   called with a text before each plan, which takes seconds for a large model
    rates    the file of `doctor --measure --out` or its rates, to forecast the time of each candidate's step
    fastest  try all candidates, order them by the forecast time, and choose the fastest that fits
    work     the operations of a micro-batch; None: those of transformers' model, if it is installed
    """
    rates = read_rates(rates) if isinstance(rates, str | Path) else rates
    if fastest and rates is None:
        raise FitError("--fastest compares forecast times: pass a machine file, --machine")
    positions = shape.sizes.get("positions", run.batch.context)
    if run.batch.context > positions:
        key = key_of(shape.family, "positions")
        raise FitError(f"--context: {run.batch.context:,} tokens exceed {key}, {positions:,}")
    _check_mesh(machine, run)
    model = as_pipeline(shape, machine.pipe) if machine.pipe > 1 else shape.model()
    if machine.tensor > 1:
        cut_for_tensor(shape, model, machine.tensor)
    tried: list[Candidate] = []
    parameter_bytes = PRECISIONS[run.precision][1]
    left = with_loss(shape, run.batch, parameter_bytes) if machine.tensor == 1 else None  # measured uncut
    not_forecast = "" if rates is None else _not_forecast(machine, rates)
    if rates is not None and not not_forecast:
        report("recording the operations of the model ...")
        work = work or operations_of(shape, run.batch, run.config(0, ""), machine.data)
    given: dict[str, Any] = {
        "device": machine.device,
        "tensor": machine.tensor if machine.tensor > 1 else None,
    }
    if not not_forecast:
        given |= {"machine": rates, "work": work}
    for stage, place in attempts(machine):
        if place and _best(tried) is not None and not fastest:
            break
        config = run.config(stage, place)
        report(f"planning {name_of(config)} ...")
        made = plan(model, config, machine.data, **given)
        if machine.pipe > 1:
            made = with_activations(shape, run.batch, run.micro_batches, parameter_bytes, made)
        else:
            made = replace(made, activations=left)
        made = replace(made, not_forecast=made.not_forecast or not_forecast)
        tried.append(Candidate(config, made, *_verdict_of(made, machine)))
    if fastest:
        tried = _by_time(tried)
    best = _best(tried)
    tight = next((each for each in tried if each.verdict == "tight"), None)
    return Fit(tuple(tried), best or tight)


def _not_forecast(machine: Machine, rates: MachineRates) -> str:
    """Return the reason why no candidate's time is forecast on this machine; empty: it may be."""
    if rates.device != machine.device:
        return (
            f"the rates were measured on device {rates.device}, and the run is on {machine.device}, for "
            "which there are none"
        )
    if machine.hosts > 1:
        return "messages between hosts are not measured"
    if machine.pipe > 1:
        return "the layers of a pipeline are written by hand, so their operations are unknown"
    return ""


def _by_time(tried: Sequence[Candidate]) -> list[Candidate]:
    """Order candidates by their forecast time, those without one last.

    Raises FitError if candidates fit and none of them has a forecast.
    """
    fits = [each for each in tried if each.verdict != "no"]
    if fits and all(each.plan.step_time is None for each in fits):
        raise FitError(
            f"--fastest: {fits[0].name} fits, and its time is not forecast: {fits[0].plan.not_forecast}"
        )
    return sorted(tried, key=lambda each: inf if each.plan.step_time is None else each.plan.step_time.total)


def _check_mesh(machine: Machine, run: Run) -> None:
    """Raise FitError if the GPUs cannot be arranged in this mesh."""
    if machine.tensor > 1 and machine.pipe > 1:
        raise FitError("--tensor and --pipe: layers that are split are not supported inside a pipeline stage")
    for option, ranks in (("--tensor", machine.tensor), ("--pipe", machine.pipe)):
        if machine.world % ranks:
            raise FitError(
                f"{option}: {machine.world} {machine.unit}s cannot be divided into groups of {ranks}"
            )
    if run.micro_batches < machine.pipe:
        raise FitError(
            f"--micro-batches: 1F1B needs at least as many micro-batches as --pipe, {machine.pipe}, not "
            f"{run.micro_batches}"
        )


def attempts(machine: Machine) -> Iterator[tuple[int, str]]:
    """Yield the entries of the ladder that this machine has memory or disk for."""
    for stage, place in PIPELINE_LADDER if machine.pipe > 1 else LADDER:
        has_host = machine.host_memory is not None or not place
        if has_host and (machine.disk is not None or place != FILE):
            yield stage, place


def _best(tried: Sequence[Candidate]) -> Candidate | None:
    return next((each for each in tried if each.verdict in ("yes", "perhaps")), None)


def _verdict_of(made: Plan, machine: Machine) -> tuple[str, str]:
    """Return the verdict and the reason."""
    places = [(f"on the {machine.unit}", made.peak, machine.memory)]
    on_host = made.host + (made.peak if machine.is_cpu else 0)
    if made.host or (machine.is_cpu and machine.host_memory is not None):
        places.append(("on the host", machine.gpus * on_host, machine.host_memory or 0))
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
    left = f"{human(machine.memory - made.peak)} left on the {machine.unit}"
    if made.activations is None:
        return "perhaps", f"{left} for activations, which are not known"
    return "yes", left
