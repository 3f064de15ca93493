"""Runs of a small model as a pipeline, beside the same model whole in an ordinary engine of one rank."""

import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero_full
from tests.slow_copies import slow_copies
from zero_full import LayerSpec, PipelineModule, TiedLayerSpec, Topology
from zero_full.checkpoint.consolidate import export_checkpoint

WIDTH, WORDS, LENGTH, SAMPLES = 8, 11, 5, 2
MICRO_BATCHES, BLOCKS = 4, 6


class Multiply(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, by: float) -> Tensor:
        ctx.by = by
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.by, None


class Embed(nn.Module):
    """Words to vectors, and on to a mask of which words count; tied to the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) * 0.5)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight[words], words != 0


def to_logits(embed: Embed, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """The last layer: the tied weight once more."""
    return inputs[0] @ embed.weight.t()


class Block(nn.Module):
    """A layer with a buffer. It can spoil the gradient of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.spoils = 1.0

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = inputs
        if self.training:
            self.calls += 1
        weight = Multiply.apply(self.weight, self.spoils)  # type: ignore[no-untyped-call]
        return x + torch.tanh(x @ weight + self.bias) * mask.unsqueeze(-1), mask


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the words."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Head(nn.Module):
    """The last layer of a model that ties nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return to_logits(self.embed, inputs)


def specs(tied: bool = True) -> list[Any]:
    """The layers of the model."""
    blocks = [LayerSpec(Block) for _ in range(BLOCKS)]
    if not tied:
        return [LayerSpec(Embed), *blocks, LayerSpec(Head)]
    embed = TiedLayerSpec("embed", Embed, tied_weight_attr="weight")
    return [embed, *blocks, TiedLayerSpec("embed", Embed, forward_fn=to_logits)]


class Whole(nn.Module):
    """The same model on one rank, with the same names."""

    def __init__(self, seed: int, tied: bool = True) -> None:
        super().__init__()
        self.tied, self.layers = nn.ModuleDict(), nn.ModuleDict()
        for number, spec in enumerate(specs(tied)):
            if not isinstance(spec, TiedLayerSpec):
                self.layers[str(number)] = built(spec.typename, seed + number)  # type: ignore[arg-type]
            elif number == 0:
                self.tied[spec.key] = built(Embed, seed)
        self.first = [*self.tied.values(), *self.layers.values()][0]

    def forward(self, words: Tensor) -> Tensor:
        inputs = self.first(words)
        for layer in self.layers.values():
            inputs = layer(inputs) if layer is not self.first else inputs
        return to_logits(self.first, inputs) if self.tied else inputs  # type: ignore[arg-type]


def built(kind: type[nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind()


@dataclass(frozen=True)
class Case:
    """A layout, and what a configuration says."""

    stages: int
    schedule: str = "1f1b"
    zero: int = 1
    precision: str = "fp32"
    optimizer: str = "Adam"
    per_rank: int = 1
    interval: int = 0
    spoilt: int | None = None  # the step in which block 1 of the last stage gets infinite gradients
    more: dict[str, Any] = field(default_factory=dict)  # keys of zero_optimization
    params: dict[str, Any] = field(default_factory=dict)  # of the optimizer
    seed: int = 0
    tied: bool = True
    copies: bool = False  # state is copied between device and host, as on an accelerator

    def module(self) -> PipelineModule:
        return PipelineModule(
            specs(self.tied),
            num_stages=self.stages,
            loss_fn=loss_of,
            partition_method="uniform",
            activation_checkpoint_interval=self.interval,
            stages_per_rank=self.per_rank,
            placement="v" if self.schedule == "zbv" else "loop",
            base_seed=self.seed,
        )

    def config(self, micro_batches: int = MICRO_BATCHES) -> dict[str, Any]:
        made: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": 0.3,
            "optimizer": {"type": self.optimizer, "params": {"lr": 1e-2, **self.params}},
            "zero_optimization": {"stage": self.zero, **self.more},
        }
        if self.precision == "fp16":
            made["fp16"] = {
                "enabled": True,
                "initial_scale_power": 8,
                "hysteresis": 1,
                "loss_scale_window": 2,
            }
        elif self.precision != "fp32":
            made[self.precision] = {"enabled": True}
        return made

    def start(self) -> Any:
        """Make the engine of the pipeline."""
        config = {**self.config(), "pipeline": {"schedule": self.schedule}}
        return zero_full.initialize(model=self.module(), config=config)[0]


def batch(step: int, data_rank: int, count: int = MICRO_BATCHES) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of one data rank in one step."""
    made = torch.Generator().manual_seed(1000 * step + data_rank)
    words = [torch.randint(0, WORDS, (2, SAMPLES, LENGTH), generator=made) for _ in range(count)]
    return [(inputs, labels) for inputs, labels in words]


def place() -> tuple[int, int]:
    """(rank, number of ranks)."""
    return dist.get_rank(), dist.get_world_size()


def data_of(case: Case) -> tuple[int, int]:
    """(data rank, data ranks) of a layout."""
    rank, world = place()
    width = world // case.stages
    return rank % width, width


def spoil(module: nn.Module, by: float) -> None:
    """Multiply the gradient of the last block's weight, on the rank that has it."""
    for name, block in module.named_modules():
        if name == f"layers.{BLOCKS}" and isinstance(block, Block):
            block.spoils = by


@dataclass
class Ended:
    """What a run has come to, on one rank."""

    losses: list[float]
    norms: list[float | None]
    applied: list[bool]
    scales: list[float]
    named: dict[str, Tensor]  # parameters and buffers that this rank has


def run_pipeline(case: Case, engine: Any, steps: Sequence[int]) -> Ended:
    """Train for these steps."""
    data_rank, _ = data_of(case)
    ended = Ended([], [], [], [], {})
    for step in steps:
        spoil(engine.module, float("inf") if step == case.spoilt else 1.0)
        note(ended, engine, float(engine.train_batch(iter(batch(step, data_rank)))))
    ended.named = {name: t.detach().clone() for name, t in engine.module.state_dict().items()}
    return ended


def run_whole(case: Case, steps: Sequence[int], group: Any) -> Ended:
    """Train the whole model on this rank alone, on the micro-batches of all data ranks."""
    _, width = data_of(case)
    config = case.config(MICRO_BATCHES * width)
    engine = zero_full.initialize(model=Whole(case.seed, case.tied), config=config, process_group=group)[0]
    ended = Ended([], [], [], [], {})
    for step in steps:
        spoil(engine.module, float("inf") if step == case.spoilt else 1.0)
        losses = []
        for inputs, labels in (each for data_rank in range(width) for each in batch(step, data_rank)):
            loss = loss_of(engine(inputs), labels)
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        note(ended, engine, sum(losses) / len(losses))
    ended.named = {name: t.detach().clone() for name, t in engine.module.state_dict().items()}
    engine.destroy()
    return ended


def note(ended: Ended, engine: Any, loss: float) -> None:
    ended.losses.append(loss)
    ended.norms.append(engine.get_global_grad_norm())
    ended.applied.append(engine.was_step_applied())
    ended.scales.append(engine.loss_scale())


def difference(one: Ended, other: Ended) -> float:
    """The largest difference of a loss, a norm, or a value of the parameters that the first run has."""
    found = [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]
    norms = zip(one.norms, other.norms, strict=True)
    found += [abs(a - b) for a, b in norms if a is not None and b is not None and a < float("inf")]
    for name, tensor in one.named.items():
        if not name.endswith("calls"):
            found.append(float((tensor.double() - other.named[name].double()).abs().max()))
    return max(found)


def beside_whole(
    comm: Any, case: Case, steps: int
) -> tuple[float, bool, list[bool], list[float], list[float]]:
    """(largest difference from the whole model, same losses on all ranks, steps applied, scales, losses)."""
    alone = alone_group()
    with slow_copies(1e8) if case.copies else nullcontext():
        engine = case.start()
        ended = run_pipeline(case, engine, range(steps))
    whole = run_whole(case, range(steps), alone)
    everyones: list[Any] = [None] * place()[1]
    dist.all_gather_object(everyones, ended.losses)
    engine.destroy()
    same = all(theirs == ended.losses for theirs in everyones) and ended.applied == whole.applied
    copies: list[Any] = [None] * place()[1]
    dist.all_gather_object(copies, {n: t.tolist() for n, t in ended.named.items() if n.startswith("tied")})
    same = same and len({str(each) for each in copies if each}) <= 1
    same = same and ended.scales == whole.scales
    return difference(ended, whole), same, ended.applied, ended.scales, ended.losses


def alone_group() -> Any:
    """A process group of this rank only."""
    rank, world = place()
    groups = [dist.new_group([each]) for each in range(world)]
    return groups[rank]


def whole_state(engine: Any) -> dict[str, Tensor]:
    """Every parameter's fp32 value and optimizer state, by name, of all stages."""
    mine = {}
    for name, param in engine.module.named_parameters():
        mine[name] = zero_full.safe_get_full_fp32_param(param)
        for entry in ("exp_avg", "exp_avg_sq"):
            mine[f"{name}/{entry}"] = zero_full.safe_get_full_optimizer_state(param, entry)
    mine |= {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    everyones: list[Any] = [None] * place()[1]
    dist.all_gather_object(everyones, {name: t.detach().clone() for name, t in mine.items() if t is not None})
    return {name: t for each in everyones for name, t in each.items()}


def saved(comm: Any, case: Case, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Train two steps and save; (state of all stages, exported file, losses of two more steps)."""
    engine = case.start()
    run_pipeline(case, engine, range(2))
    engine.save_checkpoint(folder)
    state = whole_state(engine)
    losses = run_pipeline(case, engine, range(2, 4)).losses
    engine.destroy()
    if place()[0] == 0:
        export_checkpoint(folder, folder / "whole")
    dist.barrier()
    return state, safetensors.torch.load_file(folder / "whole" / "model.safetensors"), losses


def resumed(comm: Any, case: Case | None, first: Case, folder: Path) -> tuple[dict[str, Tensor], int]:
    """Load at another layout, or for None into an ordinary engine; (the state, the steps)."""
    if case is None:
        whole = {**first.config(), "train_micro_batch_size_per_gpu": SAMPLES}
        engine = zero_full.initialize(model=Whole(3), config=whole)[0]
    else:
        engine = case.start()
    engine.load_checkpoint(folder)
    state = whole_state(engine)
    count = engine.global_steps
    engine.destroy()
    return state, count


def habits(comm: Any, folder: Path) -> dict[str, Any]:
    """Numbers of a few runs that differ in what the loop does besides training."""
    case = Case(2)
    engine = case.start()
    engine.metrics()
    found: dict[str, Any] = {"losses": run_pipeline(case, engine, range(3)).losses}
    found["metrics"] = engine.metrics()["loss"]
    state = engine.state_dict()
    found["on"] = run_pipeline(case, engine, range(3, 5)).losses
    engine.load_state_dict(state)
    found["again"] = run_pipeline(case, engine, range(3, 5)).losses
    engine.destroy()
    for names in (("pipe", "data"), ("data", "pp")):
        topology = Topology.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
        assert topology.data is not None
        module = PipelineModule(specs(), None, topology, loss_of, "uniform", base_seed=0)
        config = {**case.config(), "zero_optimization": {"stage": 1, "mics_shard_size": 1}}
        engine = zero_full.initialize(model=module, config=config)[0]
        batches = [iter(batch(step, topology.data.rank())) for step in range(3)]
        found[names[0]] = [float(engine.train_batch(each)) for each in batches]
        engine.destroy()
    engine = case.start()
    engine.on_signal(folder)
    engine.record(folder / "recording.json")
    try:
        for step in range(9):
            if step == 2 and place()[0] == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            run_pipeline(case, engine, [step])
    except SystemExit:
        found["stopped after"] = engine.global_steps
    engine.destroy()
    return found


def continued(comm: Any, case: Case, folder: Path) -> list[float]:
    """Load, and return the losses of two more steps."""
    engine = case.start()
    engine.load_checkpoint(folder)
    losses = run_pipeline(case, engine, range(2, 4)).losses
    engine.destroy()
    return losses
