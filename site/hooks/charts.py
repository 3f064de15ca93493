"""Which charts of ratios there are: what each says, and what is compared with what."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import peer_chart
from places import SiteError
from ratio_charts import Chart, Group, Row, Series, drawn

from lessons.colours import BROWN, OLIVE, SLATE, VIOLET

STAGES = {"DDP": range(3), "ZeroRedundancyOptimizer": range(3), "FSDP2": [3], "DeepSpeed": range(4)}
COLOURS = {"DDP": SLATE, "ZeroRedundancyOptimizer": OLIVE, "FSDP2": BROWN, "DeepSpeed": VIOLET}


def _groups(rows: Callable[[str], Sequence[Row]], colours: Mapping[str, str]) -> list[Group]:
    """The same rows of several things."""
    return [Group(name, colour, rows(name)) for name, colour in colours.items()]


def _stages(ratio: Callable[[int], str], stages: Iterable[int] = (1, 2, 3)) -> list[Row]:
    return [Row(f"stage {n}", ratio(n)) for n in stages]


def _beside(peer: str, ratio: str) -> Group:
    """A peer at every stage at which it was measured; DeepSpeed has the same stages."""
    rows = _stages(lambda n: f"{ratio} {n} / {peer}" + f" {n}" * (peer == "DeepSpeed"), STAGES[peer])
    return Group(f"beside {peer}", COLOURS[peer], rows)


STEP = Chart(
    "On CPUs, in fp32, a training step takes {beside DDP} of the time of DDP's, "
    "{beside ZeroRedundancyOptimizer} of ZeroRedundancyOptimizer's, {beside FSDP2} of FSDP2's and "
    "{beside DeepSpeed} of DeepSpeed's.",
    [Series("10.5M parameters", "step_time", "10M"), Series("50M parameters", "step_time_50M", "50M")],
    [_beside(peer, "* fp32: zero_full") for peer in STAGES],
    "as long as the peer's step",
)
ADDED = Chart(
    "In bf16 an engine adds to forward and backward {beside DDP} of the time that DDP adds, "
    "{beside FSDP2} of FSDP2's and {beside DeepSpeed} of DeepSpeed's; rounds differ far more than in fp32.",
    [Series("10.5M parameters", "step_time")],
    [_beside(peer, "10M bf16: added time, zero_full") for peer in ("DDP", "FSDP2", "DeepSpeed")],
    "as much as the peer adds",
)
CHECKPOINT = Chart(
    "At 50M parameters a save takes {save; 50M parameters} of its peers' time, and a load "
    "{load; 50M parameters}; at 125M, where this machine's disk is the limit, {save; 125M parameters} "
    "and {load; 125M parameters}.",
    [Series("50M parameters", "checkpoint"), Series("125M parameters", "checkpoint_125M")],
    _groups(
        lambda what: [
            Row(peer, f"{what}: zero_full / {peer}") for peer in ("torch.save and load", "DCP", "DeepSpeed")
        ],
        {"save": VIOLET, "load": OLIVE},
    ),
    "as long as the peer takes",
)
KEPT = "FSDP2 on host, parameters kept"
OFFLOAD = Chart(
    "With the optimizer's state on the host a step takes {beside DeepSpeed} of DeepSpeed's time, "
    "{beside FSDP2} of FSDP2's, and {beside FSDP2, which keeps parameters} of FSDP2's where it keeps "
    "parameters.",
    [Series("10.5M parameters", "offload_peers")],
    [
        Group(
            "beside DeepSpeed", VIOLET, _stages(lambda n: f"zero_full {n} on host / DeepSpeed {n} on host")
        ),
        Group(
            "beside FSDP2, which keeps parameters",
            BROWN,
            _stages(lambda n: f"zero_full {n} on host / {KEPT}", (1, 2)),
        ),
        Group("beside FSDP2", BROWN, [Row("stage 3", "zero_full 3 on host / FSDP2 on host")]),
        Group(
            "beside zero_full without offload",
            SLATE,
            _stages(lambda n: f"zero_full {n} on host / zero_full {n}"),
        ),
    ],
    "as long as the other's step",
)
COLLECTIVES = Chart(
    "Between ranks of one host a reduce-scatter of 10M elements, through shared memory, takes "
    "{reduce-scatter} of the time of torch's own over gloo, an all-gather {all-gather} and an all-reduce "
    "{all-reduce}.",
    [Series("2 ranks", "collectives", "2 ranks"), Series("4 ranks", "collectives", "4 ranks")],
    _groups(
        lambda what: [
            Row(dtype, f"*, 10M {dtype}: {what} by zero_full shared memory / torch")
            for dtype in ("fp32", "bf16")
        ],
        {"reduce-scatter": VIOLET, "all-gather": OLIVE, "all-reduce": BROWN},
    ),
    "as long as torch's own takes",
)
OPERATORS = Chart(
    "In bf16 stages 1 and 2 add to forward and backward {bf16, added time; with the operators} of "
    "what DDP adds, and without the operators {bf16, added time; without them}; rounds differ by as much.",
    [Series("with the operators", "step_time_with"), Series("without them", "step_time_without")],
    [
        Group("fp32, the whole step", SLATE, _stages(lambda n: f"10M fp32: zero_full {n} / DDP", (1, 2))),
        Group(
            "bf16, added time", OLIVE, _stages(lambda n: f"10M bf16: added time, zero_full {n} / DDP", (1, 2))
        ),
    ],
    "as long as DDP's",
)
RATES = {"100 Mbit/s": "100 Mbit", "1 Gbit/s": "1 Gbit", "no limit": "no limit"}
LINKS = Chart(
    "On a link of 100 Mbit/s a step of 1-bit Adam takes {1-bit Adam; 100 Mbit/s} of the time of DDP with "
    "Adam, and one of 0/1 Adam with a round in 16 steps {0/1 Adam, a round in 16 steps; 100 Mbit/s}; without "
    "a limit 1-bit Adam takes {1-bit Adam; no limit} of it.",
    [Series("2 ranks", "compression_link", "2 ranks"), Series("4 ranks", "compression_link", "4 ranks")],
    _groups(
        lambda name: [Row(shown, f"*, {rate}: {name} / DDP") for shown, rate in RATES.items()],
        {
            "1-bit Adam": OLIVE,
            "0/1 Adam, a round in every step": BROWN,
            "0/1 Adam, a round in 16 steps": VIOLET,
        },
    ),
    "as long as a step of DDP with Adam",
)
AGAIN = "kernels_adam"  # measured again since the operator also reads the 16-bit copy
KERNELS = Chart(
    "On a CPU the compiled Adam step of a low-precision training takes {Adam, 16-bit gradients} of torch's "
    "time, LAMB's {LAMB}, and packing signs {signs and scales, packed}; in plain fp32 torch's fused Adam is "
    "as fast ({Adam, fp32}).",
    [Series("1 thread", "kernels", "1 thread"), Series("2 threads", "kernels", "2 threads")],
    [
        Group(
            "beside torch",
            SLATE,
            [
                Row("Adam, 16-bit gradients", "adam, *: zero_full / torch", AGAIN),
                Row("Adam, fp32", "adam32, *: zero_full / torch", AGAIN),
                Row("Adam, fp32, clipped", "adam32, *: zero_full, factor / torch, factor", AGAIN),
                Row("LAMB", "lamb, *: zero_full / torch"),
                Row("unscale and look for overflow", "unscale, *: zero_full / torch"),
                Row("signs and scales, packed", "sign, *: zero_full, l2 / torch, l2"),
                Row("mean of 4 packed", "sign, *: zero_full, mean of 4 / torch, mean of 4"),
            ],
        ),
        Group(
            "beside torch, the plain reference",
            OLIVE,
            [
                Row(f"blocks {way}", f"blocks, *: zero_full, {way} / reference, {way}")
                for way in ("to int8", "from int8", "to int4", "from int4")
            ],
        ),
        Group(
            "beside DeepSpeed's CPU Adam",
            VIOLET,
            [
                Row("Adam beside its bf16 path", "adam, *: zero_full / DeepSpeed bf16"),
                Row("Adam beside its fp32 path", "adam, *: zero_full / DeepSpeed fp32"),
            ],
        ),
    ],
    "as long as the peer takes",
)
OTHER_WAYS = (
    "torch.save and load",
    "compiled, page cache",
    "Python threads, direct",
    "Python threads, page cache",
)
FILES = Chart(
    "Blocks that go past the page cache are written in {write; torch.save and load} of `torch.save`'s time, "
    "and read in {read; torch.save and load} of `torch.load`'s.",
    [Series("256 MiB", "files")],
    _groups(
        lambda what: [Row(way, f"{what}: compiled, direct / {way}") for way in OTHER_WAYS],
        {"write": VIOLET, "read": OLIVE},
    ),
    "as long as the other takes",
)

PEERS = "peers"  # no ratios


MODELS = {"GPT-2": "GPT2-124M", "Llama": "Llama-100M"}


def _real(peer: str, stages: Iterable[int], ways: Iterable[str]) -> Group:
    """Real models at two ranks beside a peer, in each way of training that the peer has on CPUs."""
    same = peer == "DeepSpeed"
    rows = [
        Row(
            f"{label}, {way}, stage {n}",
            f"{model}, *, 2 ranks, {way}: zero_full {n} / {peer}" + f" {n}" * same,
        )
        for label, model in MODELS.items()
        for way in ways
        for n in stages
    ]
    return Group(f"beside {peer}", COLOURS[peer], rows)


REAL = Chart(
    "On two cores, a step of GPT-2 (124M parameters) and of a Llama (100M) takes {beside DDP} of the time of "
    "DDP's, {beside FSDP2} of FSDP2's and {beside DeepSpeed} of DeepSpeed's.",
    [Series(dtype, "real_models", dtype) for dtype in ("fp32", "bf16")],
    [
        _real("DDP", (2, 3), ("Trainer", "loop")),
        _real("FSDP2", (3,), ("loop",)),
        _real("DeepSpeed", (2, 3), ("loop",)),
    ],
    "as long as the peer's step",
)
CHARTS = {
    "real": REAL,
    "step": STEP,
    "added": ADDED,
    "checkpoint": CHECKPOINT,
    "offload": OFFLOAD,
    "collectives": COLLECTIVES,
    "operators": OPERATORS,
    "links": LINKS,
    "kernels": KERNELS,
    "files": FILES,
}


def render(name: str, page: str) -> str:
    """A chart and its sentence, as a part of a page."""
    if name == PEERS:
        return peer_chart.drawn()
    if name not in CHARTS:
        raise SiteError(f"{page} asks for a chart of {name}; there are {', '.join((PEERS, *CHARTS))}")
    return drawn(CHARTS[name])
