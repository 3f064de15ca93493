"""The parts of a day, in the order in which they are run: first what decides whether the rest makes sense.

[Note: expected minutes] The minutes below are those of a first day, on an H100. A day has to fit into `DAY`
minutes, in calls of at most `CALL`. A part is started if its minutes are left in the call, and it
is stopped after `OVERRUN` times as long. A rehearsal on a CPU has one estimate for all parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

DAY, CALL = 30.0, 9.5  # minutes
OVERRUN = 2.5
REHEARSED = 2.0  # minutes of a part in a rehearsal: tiny sizes, on a CPU that may have other work


@dataclass(frozen=True)
class Part:
    """One command. In a rehearsal `small` comes after its arguments, and wins where both set an option."""

    name: str
    title: str
    expected_result: str  # for the page
    minutes: float  # see [Note: expected minutes]
    module: str
    arguments: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, rehearse: bool) -> list[str]:
        """The arguments of Python."""
        device = ["--device", "cpu" if rehearse else "cuda"]
        return ["-m", self.module, *device, *self.arguments, *(self.small if rehearse else ())]

    def seconds(self, rehearse: bool) -> float:
        """How long it is expected to take."""
        return 60 * (REHEARSED if rehearse else self.minutes)


def checks(ranks: int, *names: str) -> tuple[str, ...]:
    """Arguments of `tests.gpu.day.ranks`."""
    return ("--ranks", str(ranks), *names)


RANKS, TESTS = "tests.gpu.day.ranks", "tests.gpu.day.tests_of"
SANITIZER, LARGEST = "tests.gpu.day.sanitizer", "tests.gpu.day.largest"
STEPS, OFFLOAD = "tests.bench.step_time", "tests.bench.offload"
KERNELS = "tests/gpu/test_kernels_gpu.py"
RULES = "tests/gpu/test_rules_gpu.py"
DEFAULTS = {"ZERO_FULL_KERNELS": "auto"}
OPERATORS = {"ZERO_FULL_KERNELS": "all"}
HOST_STEPS = {**DEFAULTS, "OMP_NUM_THREADS": "4"}  # of each rank
STEPS_THERE = (
    *("--dtypes", "bf16", "--one-at-a-time", "--throughput"),
    *("--steps", "8", "--warmup", "3", "--bucket", "50000000"),
)
SMALL_STEPS = (*STEPS_THERE, "--sizes", "125M", "--recompute", "--rounds", "3", "--rows")
LARGE_STEPS = (*STEPS_THERE, "--sizes", "1.3B", "--rounds", "2", "--rows")
STEPS_HERE = ("--sizes", "50k", "--rounds", "1", "--steps", "1", "--warmup", "1")
OFFLOAD_HERE = (
    *("--size", "50k", "--disk-size", "50k", "--dtype", "fp32"),
    *("--rounds", "1", "--steps", "1", "--warmup", "1", "--mib", "1"),
)
ALL = (
    Part(
        "machine",
        "The machine",
        "The ceilings that other parts are compared with.",
        0.3,
        "tests.gpu.day.machine",
        small=("--numel", "100000", "--width", "64"),
    ),
    Part(
        "one-rank",
        "One rank under the defaults",
        "Every run ends where plain AdamW on a CPU ends; one host synchronisation a step; the peak is the "
        "plan's, within 2 %, also with the default sizes of buckets.",
        0.8,
        RANKS,
        checks(1, "conformance", "synchronisations", "peak", "default-peak"),
        ("--tiny",),
        DEFAULTS,
    ),
    Part(
        "two-ranks",
        "Two ranks, with streams watched",
        "The same with a real exchange; with one card both ranks share it. Overlap on and off give the same "
        "bits, however late side streams are, and torch's sanitizer finds no unordered access.",
        1.1,
        RANKS,
        checks(2, "conformance", "streams", "watched", "synchronisations", "peak"),
        ("--tiny",),
        DEFAULTS,
    ),
    Part(
        "steps",
        "Step time under the defaults",
        "At most 1.02 of a hand-written loop with fused AdamW; no slower than FSDP2. On one card nothing is "
        "gathered.",
        0.5,
        STEPS,
        (*SMALL_STEPS, "loop", "zero_full 2 alone", "zero_full 3", "FSDP2"),
        STEPS_HERE,
        DEFAULTS,
    ),
    Part(
        "build",
        "Build of the operators",
        "A library that was carried along is found; otherwise it is compiled. Each operator runs "
        "once and gives what the CPU gives.",
        0.2,
        "tests.gpu.day.build",
        environment=OPERATORS,
    ),
    Part(
        "steps-operators",
        "Step time with all operators",
        "No slower than under the defaults.",
        0.5,
        STEPS,
        (*SMALL_STEPS, "loop", "zero_full 2 alone", "zero_full 3"),
        STEPS_HERE,
        OPERATORS,
    ),
    Part(
        "large-steps",
        "A model of 1.3 billion parameters beside DDP and FSDP2",
        "Tokens per second and MFU on the same card: no slower than FSDP2.",
        0.7,
        STEPS,
        (*LARGE_STEPS, "loop", "DDP", "FSDP2", "zero_full 2", "zero_full 3"),
        STEPS_HERE,
        DEFAULTS,
    ),
    Part(
        "large-operators",
        "The same model with all operators",
        "No slower than under the defaults.",
        0.5,
        STEPS,
        (*LARGE_STEPS, "loop", "zero_full 2", "zero_full 3"),
        STEPS_HERE,
        OPERATORS,
    ),
    Part(
        "tiers",
        "Offload on every tier",
        "State and parameters on the host and on a disk, delayed steps: every run ends where plain "
        "AdamW on a CPU ends, and a step reads one value from the device, also with LAMB.",
        0.3,
        RANKS,
        checks(1, "tiers", "reads"),
        ("--tiny",),
        DEFAULTS,
    ),
    Part(
        "offload",
        "Step time with offload",
        "Copies are hidden beside other work; delayed steps make a step shorter; on a disk at most "
        "1.25 of the longer of computing and moving.",
        1.7,
        OFFLOAD,
        (
            *("--topics", "tiers", "disk", "--size", "125M", "--dtype", "bf16"),
            *("--rounds", "2", "--bucket", "10000000"),
        ),
        OFFLOAD_HERE,
        HOST_STEPS,
    ),
    Part(
        "offload-peers",
        "Step time with offload, beside FSDP2",
        "At most 0.75 of the better peer's step.",
        0.7,
        OFFLOAD,
        (
            *("--topics", "peers", "--size", "125M", "--dtype", "bf16"),
            *("--rounds", "2", "--bucket", "10000000"),
        ),
        OFFLOAD_HERE,
        HOST_STEPS,
    ),
    Part(
        "largest",
        "The largest model that trains",
        "What is sharded takes no memory: stage 3 trains a larger model than stage 0, and with state on the "
        "host a larger one yet.",
        1,
        LARGEST,
        ("--ranks", "4", "--gib", "0.5", "--stages", "0", "3"),
        ("--ranks", "1", "--stages", "3", "--tiny"),
        HOST_STEPS,
    ),
    Part(
        "operators",
        "Operators against the CPU and fp64",
        "No failure. Skipped are tests that need two devices.",
        0.4,
        TESTS,
        (KERNELS,),
        ("tests/gpu/test_samples.py", "-k", "not_written"),
        OPERATORS,
    ),
    Part(
        "kernels",
        "Streaming operators beside a copy",
        "At least 0.90 of a copy's speed: a ratio of at most 1.11.",
        0.5,
        "tests.bench.kernels_gpu",
        ("--rounds", "7"),
        ("--numel", "50000", "--rounds", "1", "--topics", "adam", "unscale"),
        OPERATORS,
    ),
    Part(
        "ncu",
        "Four kernels under ncu",
        "Adam, the norm of the gradients, quantization and packed signs: near the memory's bandwidth.",
        0.3,
        "tests.gpu.day.ncu",
        small=("--tiny",),
        environment=OPERATORS,
    ),
    Part(
        "sanitizer",
        "Operators under compute-sanitizer: memory and races",
        "No error.",
        0.3,
        SANITIZER,
        ("--tools", "memcheck", "racecheck"),
        environment=OPERATORS,
    ),
    Part(
        "sanitizer-more",
        "Operators under compute-sanitizer: barriers, uninitialized memory",
        "No error.",
        0.3,
        SANITIZER,
        ("--tools", "synccheck", "initcheck"),
        environment=OPERATORS,
    ),
    Part(
        "alone",
        "NCCL's collectives and stage 3's hooks on one rank",
        "A group of size one: in place, in every type, on three streams and with empty splits. With units "
        "forced, a unit of nine parameters costs the host at most 0.3 ms a micro-batch at stage 3.",
        0.3,
        RANKS,
        checks(1, "native", "hooks"),
        ("--tiny",),
        DEFAULTS,
    ),
    Part(
        "ranks-operators",
        "Two ranks with all operators",
        "Every run ends where plain AdamW on a CPU ends, with the same bits whether or not streams overlap.",
        0.6,
        RANKS,
        checks(2, "conformance", "streams"),
        ("--tiny",),
        OPERATORS,
    ),
    Part(
        "four-ranks",
        "Four ranks",
        "As two ranks.",
        0.3,
        RANKS,
        checks(4, "conformance"),
        ("--tiny",),
        DEFAULTS,
    ),
    Part(
        "traces",
        "How much of the communication is hidden",
        "At stage 3 a larger prefetch bucket hides more; nothing is hidden without overlap, or between ranks "
        "that share a card.",
        0.9,
        RANKS,
        checks(2, "traces"),
        ("--tiny",),
        DEFAULTS,
    ),
    Part(
        "failures",
        "When a rank dies, raises or skips a call",
        "Every process ends by itself, and says why.",
        0.7,
        RANKS,
        checks(2, "killed", "raising", "skipping"),
        ("--tiny",),
        DEFAULTS,
    ),
    Part(
        "rules",
        "LAMB, Muon, Lion and the rules at one bit",
        "Every step is the oracle's: on one rank, on two that share a card, and over NCCL. No failure. "
        "Skipped is what needs two devices.",
        0.6,
        TESTS,
        (RULES, "-m", "gpu"),
        ("-m", "not gpu", "-k", "staged-OneBitAdam"),
        OPERATORS,
    ),
    Part(
        "tests",
        "The other tests on a GPU",
        "Operators on large tensors, on streams and in graphs, and the engine: no failure. Skipped are tests "
        "that need two devices or more memory.",
        1.9,
        TESTS,
        (
            "tests/gpu",
            *(f"--ignore={file}" for file in (KERNELS, RULES)),
            # Runs of ranks that share a card are those of the parts two-ranks and four-ranks.
            *("-m", "gpu", "-k", "not sanitizer and not ranks_of_one_device"),
        ),
        ("-m", "not gpu", "-k", "written_beside"),
        OPERATORS,
    ),
    Part(
        "examples",
        "The scripts of zero_full.examples",
        "They run as the guide says.",
        0.9,
        "tests.gpu.day.examples",
        small=("--tiny",),
        environment=DEFAULTS,
    ),
    Part(
        "largest-between",
        "The largest model at the stages between",
        "Stage 2 trains a larger one than stage 1.",
        1,
        LARGEST,
        ("--ranks", "4", "--gib", "0.5", "--stages", "1", "2"),
        ("--ranks", "1", "--stages", "2", "--tiny"),
        HOST_STEPS,
    ),
)
