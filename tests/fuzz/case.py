"""A case: everything that a run is made of, as one value that is drawn from a seed and written as JSON."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tests.fuzz.loops import LOOPS, OF_TORCH
from tests.fuzz.model import Part, Use, cuttable, is_frozen
from zero_full.pipeline.partition import partition

FOLDER = "FOLDER"  # stands for the folder of a case's files
WIDTHS = (5, 5, 8, 16, 33)
KINDS = ("linear", "linear", "linear", "narrow", "norm", "embedding", "own", "transposed", "empty")
CAN_TIE = ("linear", "transposed", "empty")
ONE_BIT = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
ADAMS: dict[str, Any] = {"betas": [0.9, 0.99], "eps": 1e-6}
OPTIMIZERS: dict[str, dict[str, Any]] = {  # by a configuration's name of it; weight_decay stands in groups
    "Adam": {"lr": 0.01, **ADAMS, "adam_w_mode": False},
    "AdamW": {"lr": 0.01, **ADAMS},
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adagrad": {"lr": 0.02},
    "RMSprop": {"lr": 0.01, "eps": 1e-6},
    "Lion": {"lr": 0.005, "betas": [0.9, 0.99]},
    "Lamb": {"lr": 0.01, **ADAMS},
    "Muon": {"lr": 0.01, "momentum": 0.9},
    "OneBitAdam": {"lr": 0.01, **ADAMS, "freeze_step": 3},
    "OneBitLamb": {"lr": 0.01, **ADAMS, "freeze_step": 3},
    "ZeroOneAdam": {
        **{"lr": 0.01, **ADAMS, "var_freeze_step": 5, "var_update_scaler": 2},
        **{"local_step_scaler": 2, "local_step_clipper": 4},
    },
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64.0}},
    "fp16, dynamic": {
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    },
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
}
TIERS: dict[str, dict[str, Any]] = {  # of masters and the optimizer's state
    "device": {},
    "host": {"device": "cpu"},
    "host, by copies": {"device": "cpu"},  # see tests/slow_copies.py
    "host, half": {"device": "cpu", "ratio": 0.5},
    "host, by copies and half": {"device": "cpu", "ratio": 0.5},
    "host, delayed": {"device": "cpu", "delay_update_after": 1},
    "host, by copies and delayed": {"device": "cpu", "delay_update_after": 1},
    "disk": {
        "device": "nvme",
        "nvme_path": FOLDER,
        "max_in_cpu": 240,
    },  # eight parts, as small as in `run.py`
}
PARAM_TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"device": "cpu"},
    "disk": {"device": "nvme", "nvme_path": FOLDER, "max_in_cpu": 0},
}
LOW = {"bf16": "bf16", "fp16": "fp16", "fp16, dynamic": "fp16"}  # 16-bit parameters, by precision
ANYWHERE = ("eval", "cache", "record on one rank")  # between steps, and between forward and backward
BETWEEN = (
    *ANYWHERE,
    "state dict",
    "gathered",
    "forward only",
    "save",
    "look",
    "failed forward",
    "failed backward",
)
WITHIN = (*ANYWHERE, "gathered", "look")
WHOLE_MODEL = ("forward only", "failed forward", "failed backward")  # which a pipeline does not call
SCHEDULES = {  # of pipelines, with the stages of a rank
    **{"1f1b": 1, "gpipe": 1},
    **{"interleaved_1f1b": 2, "interleaved_zero_bubble": 2, "zbv": 2},
}


@dataclass(frozen=True)
class Layout:
    """What may change where a run goes on from a checkpoint."""

    world: int = 1
    stage: int = 0
    precision: str = "fp32"
    tier: str = "device"
    param_tier: str = "device"
    whole: bool = False  # stage 3 gathers the model as a whole
    zero: Mapping[str, Any] = field(default_factory=dict, hash=False)  # more keys of zero_optimization
    keys: Mapping[str, Any] = field(default_factory=dict, hash=False)  # more keys
    tensor: int = 1  # ranks that split layers; the run has `world` times as many
    pipe: int = 0  # ranks of a pipeline; the run has `world` times as many. 0: no pipeline
    schedule: str = "1f1b"
    joins: bool = False  # stage 3 joins units of any size, from two on

    @property
    def ranks(self) -> int:
        """All ranks of the run; `world` is the number of those that have different data."""
        return self.world * self.tensor * max(1, self.pipe)

    @property
    def pipeline_stages(self) -> int:
        """The stages of all ranks of a pipeline."""
        return self.pipe * SCHEDULES[self.schedule]


@dataclass(frozen=True)
class Case:
    """A run of some steps, perhaps in two legs."""

    seed: int = 0
    width: int = 5
    parts: tuple[Part, ...] = (Part(),)
    uses: tuple[Use, ...] = (Use(0),)
    optimizer: str = "SGD"
    instance: bool = False  # the optimizer is an object that is passed in, and not of the configuration
    corrects: bool = True  # False: Adam or AdamW without bias correction
    groups: bool = False  # two parameter groups
    decay: bool = False  # of the learning rate, by a schedule
    loop: str = "engine"
    micro_batches: int = 1
    clip: float = 0.0
    steps: int = 2
    poison: tuple[int, int] | None = None  # in this step this rank's data have an inf
    between: str = ""  # what is done after every step
    within: str = ""  # what is done between forward and backward
    watched: bool = True  # the reference gets its gradients where zero_full's forward has been
    differ: bool = False  # ranks begin with different values, of which rank 0's count
    first: Layout = Layout()
    then: Layout | None = None
    resume_at: int = 1
    how: str = "checkpoint"  # or "asynchronous", or "state dict" of each rank's own

    def legs(self) -> list[tuple[Layout, range]]:
        """Where each step is taken."""
        if self.then is None:
            return [(self.first, range(self.steps))]
        return [(self.first, range(self.resume_at)), (self.then, range(self.resume_at, self.steps))]

    @property
    def is_pipeline(self) -> bool:
        """Whether the model is a list of layers, with their names, in all legs."""
        return any(layout.pipe for layout, _ in self.legs())

    def to_json(self) -> str:
        """For `from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Case":
        """The case of this text."""
        found = json.loads(text)
        for name, value in found.items():
            if name == "parts":
                found[name] = tuple(Part(p["kind"], p["tied"], tuple(p["frozen"])) for p in value)
            elif name == "uses":
                found[name] = tuple(Use(**use) for use in value)
            elif name in ("first", "then") and value is not None:
                found[name] = Layout(**value)
            elif isinstance(value, list):
                found[name] = tuple(value)
        return Case(**found)


def options_of(case: Case) -> dict[str, Any]:
    """The optimizer's options in a configuration, and of its class in `class_of`."""
    options = OPTIMIZERS[case.optimizer]
    return options if case.corrects else {**options, "bias_correction": False}


def class_of(case: Case) -> tuple[str, dict[str, Any]]:
    """The class that a script makes an optimizer of, and its options."""
    if not case.corrects:
        return "FusedAdam", options_of(case)
    return case.optimizer, {k: v for k, v in options_of(case).items() if k != "adam_w_mode"}


def group_options(case: Case, dims: int) -> dict[str, Any]:
    """What a parameter of so many dimensions is stepped by, beside the optimizer's own options."""
    lr = OPTIMIZERS[case.optimizer]["lr"]
    if not case.groups:
        return {"weight_decay": 0.1}
    return {"weight_decay": 0.1, "lr": 2 * lr} if dims > 1 else {"weight_decay": 0.0}


def config_of(case: Case, layout: Layout, folder: str) -> dict[str, Any]:
    """The configuration of a leg; `folder` is for its files."""
    zero: dict[str, Any] = {"stage": layout.stage, **layout.zero}
    if layout.tier != "device":
        zero["offload_optimizer"] = TIERS[layout.tier]
    if layout.param_tier != "device":
        zero["offload_param"] = PARAM_TIERS[layout.param_tier]
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1 if case.loop == "own accumulation" else case.micro_batches,
        "gradient_clipping": case.clip,
        **PRECISIONS[layout.precision],
        **layout.keys,
        "zero_optimization": zero,
    }
    if not case.instance:
        params = {**options_of(case), "weight_decay": 0.1}
        made["optimizer"] = {"type": case.optimizer, "params": params}
    if case.loop == "unmanaged":
        made["managed_gradient_accumulation"] = False
    if case.loop in OF_TORCH:
        made["plain_backward_divides"] = False
    if layout.pipe:
        made["pipeline"] = {"schedule": layout.schedule}
    text = json.dumps(made).replace(json.dumps(FOLDER), json.dumps(folder))
    return dict(json.loads(text))


def is_valid(case: Case) -> bool:
    """Whether a case must run or be refused: what zero_full's pages ask of a script is kept."""
    layouts = [layout for layout, _ in case.legs()]
    if not (case.corrects or case.optimizer in ("Adam", "AdamW")):
        return False
    if case.is_pipeline and not _fits_a_pipeline(case):
        return False
    if any(use.rank is not None for use in case.uses) and any(
        each.stage == 3 and not each.whole for each in layouts
    ):
        return False  # stage 3 wants every rank to call the same modules in the same order
    if case.poison is not None and not case.clip and any(each.precision not in LOW for each in layouts):
        return False  # nobody looks for gradients that are not finite
    if case.optimizer in ONE_BIT:
        return all(each == layouts[0] and each.tier == "device" and each.stage < 2 for each in layouts)
    return True


def _fits_a_pipeline(case: Case) -> bool:
    """Whether the model can be a list of layers of which each stage trains some, in each micro-batch."""
    if case.optimizer in ONE_BIT or case.loop != "engine" or case.between in WHOLE_MODEL or case.within:
        return False
    if any(use.rank is not None or use.checkpoint == "reentrant" for use in case.uses):
        return False  # torch's own: inputs without gradients would end the backward pass there
    if any(part.tied is not None for part in case.parts) or any(each.tensor > 1 for each, _ in case.legs()):
        return False
    return all(_trains_everywhere(case, layout) for layout, _ in case.legs())


def _trains_everywhere(case: Case, layout: Layout) -> bool:
    if not layout.pipe:
        return True
    names = ["Layer"] * (len(case.uses) + 1)
    if layout.stage > 1 or layout.whole or layout.param_tier != "device":
        return False
    if layout.pipeline_stages > len(names):
        return False

    def trains(layer: int) -> bool:
        if layer == len(case.uses):  # the head
            return True
        use = case.uses[layer]
        frozen = any(is_frozen(case.parts[use.part], step) for step in range(case.steps))
        return use.micro is None and not frozen

    cut = partition("uniform", names, lambda: (), layout.pipeline_stages)
    return all(any(map(trains, part)) for part in cut)


def rounds_sums(case: Case) -> bool:
    """Whether sums of 16-bit gradients are rounded to 16 bits, or not where torch rounds them.

    Stage 0 and all-reduce send 16-bit sums back. A parameter that is used more than once gets its gradient in
    several helpings at stage 3, where parts are recomputed, and where several pipeline stages use it.
    """
    several = len({use.part for use in case.uses}) < len(case.uses)
    reused = several or any(part.tied is not None for part in case.parts)
    recomputed = any(use.checkpoint for use in case.uses)
    return any(
        (
            layout.precision in LOW
            and (
                layout.stage == 0
                or layout.zero.get("reduce_scatter") is False
                or layout.zero.get("mics_shard_size", 0) > 0
                or (reused and (layout.stage == 3 or recomputed))
            )
        )
        # autocast casts a parameter once for all its uses, or once in each pipeline stage
        or (reused and layout.pipe > 0 and layout.precision != "fp32")
        for layout, _ in case.legs()
    )


def _decided_by_noise(case: Case) -> bool:
    """Whether rounded sums decide about signs, of which each moves an element as far as the gradient does."""
    return (case.optimizer == "Lion" or case.optimizer in ONE_BIT) and rounds_sums(case)


# By chance ---------------------------------------------------------------------------------------


def draw(seed: int) -> Case:
    """Always the same one."""
    rng = random.Random(seed)
    optimizer = rng.choice([*OPTIMIZERS, "AdamW", "AdamW", "Adam", "SGD"])
    one_bit = optimizer in ONE_BIT
    steps = rng.choice([9, 12]) if one_bit else rng.choice([2, 3, 4, 5])
    first = _layout(rng, optimizer)
    then = _layout(rng, optimizer) if rng.random() < 0.3 else None
    how = rng.choice(["checkpoint", "checkpoint", "asynchronous", "state dict"])
    if then is not None and how == "state dict":
        then = first
    if then is not None and one_bit:
        then = first
    if then is not None and not _goes_on(first.precision, then.precision):
        then = replace(then, precision=first.precision)
    ranks = max(first.world, then.world if then else 1)
    micro_batches = rng.choice([1, 1, 1, 2, 3])
    parts = _parts(rng, steps, one_bit)
    uses = _uses(rng, parts, ranks, micro_batches)
    if any(use.rank is not None for use in uses):
        first, then = _together(first), then and _together(then)
    poison = None
    clip = rng.choice([0.0, 0.0, 0.5, 0.05, 100.0])
    layouts = [first] if then is None else [first, then]
    checked = clip > 0 or all(each.precision in LOW for each in layouts)
    if checked and not one_bit and rng.random() < 0.25:
        poison = (rng.randrange(steps), rng.randrange(min(each.world for each in layouts)))
    case = Case(
        seed=seed % 1000,
        width=rng.choice(WIDTHS),
        parts=parts,
        uses=uses,
        optimizer=optimizer,
        instance=rng.random() < 0.4,
        groups=rng.random() < 0.3,
        decay=rng.random() < 0.2,
        loop=rng.choice(list(LOOPS)),
        micro_batches=micro_batches,
        clip=clip,
        steps=steps,
        poison=poison,
        between=rng.choice(_allowed(BETWEEN, optimizer, layouts)) if rng.random() < 0.35 else "",
        watched=rng.random() < 0.7 or (one_bit and first.precision in LOW),  # rounding decides about signs
        differ=rng.random() < 0.15,
        first=first,
        then=then,
        resume_at=rng.randrange(1, steps),
        how=how,
    )
    if _decided_by_noise(case):
        case = replace(
            case,
            first=replace(first, precision="fp32"),
            then=then and replace(then, precision="fp32"),
            poison=poison if clip else None,
        )
    if optimizer in ("Adam", "AdamW") and rng.random() < 0.25:
        case = replace(case, corrects=False)
    if rng.random() < 0.2:
        case = replace(case, within=rng.choice(_allowed(WITHIN, optimizer, layouts)))
    return _as_pipeline(rng, _with_tensor_ranks(rng, case))


def _with_tensor_ranks(rng: random.Random, case: Case) -> Case:
    """Perhaps the case with tensor-parallel ranks, in fp32: products of parts round 16 bits otherwise."""
    wanted = rng.random() < 0.5
    if case.optimizer in (*ONE_BIT, "Muon") or case.differ or not (wanted and cuttable(case.parts)):
        return case
    layouts = []
    for layout, _ in case.legs():
        if layout.world > 2 or "delayed" in layout.tier:
            return case
        zero = {k: v for k, v in layout.zero.items() if k != "zero_hpz_partition_size"}
        tensor = rng.choice([1, 2, 2, 4 if layout.world == 1 else 2])
        layouts.append(replace(layout, precision="fp32", zero=zero, tensor=tensor))
    if case.how == "state dict":
        layouts = layouts[:1] * len(layouts)
    then = layouts[1] if case.then is not None else None
    return replace(case, first=layouts[0], then=then, poison=case.poison if case.clip else None)


def _as_pipeline(rng: random.Random, case: Case) -> Case:
    """Perhaps the case as a pipeline, with a leg without one now and then."""
    layouts = [layout for layout, _ in case.legs()]
    if case.optimizer in ONE_BIT or any(each.tensor > 1 for each in layouts) or rng.random() < 0.7:
        return case
    legs: list[Layout] = []
    for layout in layouts:
        if legs and rng.random() < 0.25:
            legs.append(replace(layout, world=min(2, layout.world)))  # without a pipeline
            continue
        schedule = rng.choice([*SCHEDULES, "1f1b"])
        pipe = rng.choice([1, 2, 2, 3, 4] if SCHEDULES[schedule] == 1 else [2, 2, 3, 4])
        zero = {k: v for k, v in layout.zero.items() if not k.startswith(("stage3", "zero_hpz", "leaf"))}
        zero.pop("sub_group_size", None)
        world = rng.choice([each for each in (1, 2, 4) if each * pipe <= 4])
        if world == 1:
            zero.pop("mics_shard_size", None)
        stage = rng.choice([0, 1, 1]) if layout.tier == "device" else 1
        keys = {k: v for k, v in layout.keys.items() if k != "prescale_gradients"}
        made = replace(layout, world=world, stage=stage, param_tier="device", whole=False, zero=zero)
        legs.append(replace(made, keys=keys, pipe=pipe, schedule=schedule))
    if case.how == "state dict":
        legs = legs[:1] * len(legs)
    least = min(each.world for each in legs)
    poison = case.poison and (case.poison[0], case.poison[1] % least)
    parts = tuple(replace(part, tied=None) for part in case.parts)
    wanted, again = max(each.pipeline_stages for each in legs), rng.random() < 0.4
    uses = [replace(use, rank=None, checkpoint=use.checkpoint and "plain") for use in case.uses]
    while len(uses) + 1 < wanted + rng.choice([0, 1, 2]):
        if again:
            uses.append(Use(rng.randrange(len(parts))))  # tied
        else:
            uses.append(Use(len(parts)))
            parts = (*parts, Part(rng.choice(KINDS)))
    made_case = replace(
        case,
        parts=parts,
        uses=tuple(uses),
        loop="engine",
        micro_batches=rng.choice([max(each.pipe for each in legs), 4, 5, 6, case.micro_batches]),
        between="" if case.between in WHOLE_MODEL else case.between,
        within="",
        poison=poison,
        first=legs[0],
        then=legs[1] if case.then is not None else None,
    )
    if not _fits_a_pipeline(made_case):  # train all of the model, in each micro-batch
        parts = tuple(replace(part, frozen=(0, 0)) for part in parts)
        uses = [replace(use, micro=None) for use in uses]
        made_case = replace(made_case, parts=parts, uses=tuple(uses))
    if _decided_by_noise(made_case):
        return case
    made_case = replace(made_case, watched=case.watched or rounds_sums(made_case))
    return made_case if _fits_a_pipeline(made_case) else case


def _together(layout: Layout) -> Layout:
    """Stage 3 wants every rank to call the same modules: where ranks do not, the model is one unit."""
    return replace(layout, whole=layout.stage == 3)


def _allowed(kinds: Sequence[str], optimizer: str, layouts: Sequence[Layout]) -> Sequence[str]:
    """Those of these kinds that may be done: none that needs equal ranks, or completes a delayed update."""
    apart = optimizer == "ZeroOneAdam" or any("delayed" in each.tier for each in layouts)
    return [kind for kind in kinds if kind in (*ANYWHERE, "forward only")] if apart else kinds


def _goes_on(one: str, other: str) -> bool:
    """Whether a run of one precision can go on in another: a loss scale must have come from one."""
    return one == other or not {one, other} & {"fp16", "fp16, dynamic"}


def _layout(rng: random.Random, optimizer: str) -> Layout:
    one_bit = optimizer in ONE_BIT
    stages = {"ZeroOneAdam": [0, 1]}.get(optimizer, [0]) if one_bit else [0, 1, 2, 3, 3]
    stage = rng.choice(stages)
    world = rng.choice([1, 2, 2, 3, 4])
    wild = rng.random() < 0.03  # what is refused
    precision = rng.choice(["fp32", "bf16"]) if one_bit else rng.choice(list(PRECISIONS))
    tier = param_tier = "device"
    if (stage or wild) and not one_bit and rng.random() < 0.4:
        tier = rng.choice(list(TIERS))
        if "delayed" in tier and optimizer not in ("Adam", "AdamW") and not wild:
            tier = "host"
    if (stage == 3 or wild) and "delayed" not in tier and rng.random() < 0.25:
        param_tier = rng.choice(list(PARAM_TIERS))
    zero, keys = _zero(rng, world, stage), _keys(rng, world)
    whole, joins = rng.random() < 0.05, stage == 3 and rng.random() < 0.4
    return Layout(world, stage, precision, tier, param_tier, whole, zero, keys, joins=joins)


def _zero(rng: random.Random, world: int, stage: int) -> dict[str, Any]:
    found: dict[str, Any] = {"reduce_bucket_size": rng.choice([1, 40, 100, 300, 10**6])}
    if rng.random() < 0.7:
        found["overlap_comm"] = rng.random() < 0.5
    for key, share in (
        ("round_robin_gradients", 0.15),
        ("contiguous_gradients", 0.15),
        ("reduce_scatter", 0.1),
    ):
        if rng.random() < share:
            found[key] = key == "round_robin_gradients"
    if stage and world in (2, 4) and rng.random() < 0.15:
        found["mics_shard_size"] = rng.choice([1, 2])
    if stage == 3:
        found["stage3_param_persistence_threshold"] = rng.choice([0, 0, 6, 30, 10**5])
        found["stage3_max_reuse_distance"] = rng.choice([0, 0, 50, 10**9])
        found["stage3_prefetch_bucket_size"] = rng.choice([0, 50, 10**6])
        found["stage3_max_live_parameters"] = rng.choice([1, 100, 10**9])
        if rng.random() < 0.3:
            found["sub_group_size"] = rng.choice([1, 40])
        if world in (2, 4) and "mics_shard_size" not in found and rng.random() < 0.2:
            found["zero_hpz_partition_size"] = 2
        if rng.random() < 0.2:
            found["leaf_module"] = {"classes": ["Block"]}
    return found


def _keys(rng: random.Random, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rng.random() < 0.3:
        found["shared_memory"] = False
    if world in (2, 4) and rng.random() < 0.1:
        found["prescale_gradients"] = True
    if rng.random() < 0.1:
        found["gradient_predivide_factor"] = 2.0
    if rng.random() < 0.1:
        found["debug"] = {"check_collectives": True}
    if rng.random() < 0.05:
        found["communication_data_type"] = "fp32"
    return found


def _parts(rng: random.Random, steps: int, one_bit: bool) -> tuple[Part, ...]:
    parts: list[Part] = []
    for _ in range(rng.choice([1, 2, 3, 4, 5])):
        kind = rng.choice(KINDS)
        others = [i for i, part in enumerate(parts) if part.kind in CAN_TIE and part.tied is None]
        tied = rng.choice(others) if kind in CAN_TIE and others and rng.random() < 0.3 else None
        frozen = (0, 0)
        if rng.random() < 0.2:
            begin = rng.choice([0, 0, rng.randrange(steps)])
            frozen = (begin, rng.choice([steps, steps, rng.randrange(begin, steps) + 1]))
            frozen = (0, steps) if one_bit else frozen
        parts.append(Part(kind, tied, frozen))
    return tuple(parts)


def _uses(rng: random.Random, parts: Sequence[Part], ranks: int, micro_batches: int) -> tuple[Use, ...]:
    order = list(range(len(parts)))
    if rng.random() < 0.2:
        rng.shuffle(order)
    if rng.random() < 0.25:  # something is not used at all
        order.remove(rng.choice(order))
    if rng.random() < 0.3:  # and something more than once
        order += rng.choices(range(len(parts)), k=rng.choice([1, 2, 3]))
    kind = rng.choice(["", "", "", "reentrant", "plain"])
    branches, by_micro = rng.random() < 0.25, rng.random() < 0.15
    return tuple(
        Use(
            part,
            rng.randrange(ranks) if branches and rng.random() < 0.5 else None,
            rng.randrange(micro_batches) if by_micro and rng.random() < 0.5 else None,
            kind if rng.random() < 0.6 else "",
        )
        for part in order
    )
