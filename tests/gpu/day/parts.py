"""The parts of a day, in the order in which they are run: first what decides whether the rest makes sense."""

from collections.abc import Mapping
from dataclasses import dataclass, field

LIMIT = 8.0  # minutes, of every part


@dataclass(frozen=True)
class Part:
    """One command. On a CPU, `small` comes behind its arguments, and wins where both say something."""

    name: str
    title: str
    expected: str  # for the page
    minutes: float  # a guess of how long it takes: within a budget it is started only if so much is left
    module: str
    arguments: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, rehearse: bool) -> list[str]:
        """What Python is called with."""
        device = ["--device", "cpu" if rehearse else "cuda"]
        return ["-m", self.module, *device, *self.arguments, *(self.small if rehearse else ())]


def checks(ranks: int, *names: str) -> tuple[str, ...]:
    """Arguments of `tests.gpu.day.ranks`."""
    return ("--ranks", str(ranks), *names)


RANKS = "tests.gpu.day.ranks"
KERNELS = "tests/gpu/test_kernels_gpu.py"
ONE_CARD = "tests/gpu/test_conformance_gpu.py"
RULES = "tests/gpu/test_rules_gpu.py"
TESTS, SANITIZER, LARGEST = "tests.gpu.day.tests_of", "tests.gpu.day.sanitizer", "tests.gpu.day.largest"
HOST_STEPS = {"OMP_NUM_THREADS": "4"}  # of each rank
STEPS = "tests.bench.step_time"
STEPS_THERE = (
    *("--dtypes", "bf16", "--recompute", "--one-at-a-time"),
    *("--rows", "loop", "zero_full 2 alone", "zero_full 3", "FSDP2"),
    *("--rounds", "3", "--steps", "8", "--warmup", "3", "--bucket", "50000000"),
)
STEPS_HERE = (
    *("--sizes", "50k", "--rounds", "1", "--steps", "1", "--warmup", "1"),
    *("--rows", "loop", "zero_full 2 alone"),
)
ALL = (
    Part(
        "there",
        "What is there",
        "The ceilings that other parts are compared with.",
        0.5,
        "tests.gpu.day.there",
        small=("--numel", "100000", "--width", "64"),
    ),
    Part(
        "build",
        "Build of the operators",
        "A library that was brought along is found; otherwise it is compiled. Each operator runs "
        "once and gives what the CPU gives.",
        1.5,
        "tests.gpu.day.build",
    ),
    Part(
        "operators",
        "Operators against the CPU and fp64",
        "No failure. Skipped are tests that need two devices.",
        2,
        TESTS,
        (KERNELS,),
        ("tests/gpu/test_samples.py", "-k", "not_written"),
    ),
    Part(
        "one-rank",
        "One rank",
        "Every run ends where plain AdamW on a CPU ends; one host synchronisation a step; the peak is the "
        "plan's, within 2 %.",
        1,
        RANKS,
        checks(1, "conformance", "synchronisations", "peak"),
        ("--tiny",),
    ),
    Part(
        "two-ranks",
        "Two ranks",
        "The same with a real exchange; with one card both ranks share it. Overlap on and off give the same "
        "bits, however late side streams are.",
        2,
        RANKS,
        checks(2, "conformance", "streams", "watched", "synchronisations", "peak"),
        ("--tiny",),
    ),
    Part("four-ranks", "Four ranks", "As two ranks.", 1.5, RANKS, checks(4, "conformance"), ("--tiny",)),
    Part(
        "kernels",
        "Streaming operators beside a copy",
        "At least 0.90 of a copy's speed: a ratio of at most 1.11.",
        1.5,
        "tests.bench.kernels_gpu",
        ("--rounds", "9"),
        ("--numel", "50000", "--rounds", "1", "--topics", "adam", "unscale"),
    ),
    Part(
        "small-kernels",
        "The same on few elements",
        "No aim: below some 16 MB starts of kernels count.",
        0.5,
        "tests.bench.kernels_gpu",
        ("--numel", "4194304", "--rounds", "5"),
        ("--numel", "2000", "--rounds", "1", "--topics", "blocks"),
    ),
    Part(
        "steps",
        "Step time",
        "At most 1.02 of a hand-written loop with fused AdamW; no slower than FSDP2. On one card nothing is "
        "gathered.",
        2,
        STEPS,
        ("--sizes", "125M", *STEPS_THERE),
        STEPS_HERE,
    ),
    Part(
        "traces",
        "How much of the communication is hidden",
        "At stage 3 a larger prefetch bucket hides more; nothing is hidden without overlap, or between ranks "
        "that share a card.",
        1.5,
        RANKS,
        checks(2, "traces"),
        ("--tiny",),
    ),
    Part(
        "failures",
        "When a rank dies, raises or skips a call",
        "Every process ends by itself, and says why.",
        1,
        RANKS,
        checks(2, "killed", "raising", "skipping"),
        ("--tiny",),
    ),
    Part(
        "examples",
        "The scripts of zero_full.examples",
        "They run as the guide says.",
        1.5,
        "tests.gpu.day.examples",
        small=("--tiny",),
    ),
    Part(
        "large-steps",
        "Step time of a larger model",
        "As with the smaller one.",
        3,
        STEPS,
        ("--sizes", "1.3B", *STEPS_THERE),
        STEPS_HERE,
    ),
    Part(
        "one-card",
        "Conformance of ranks that share a card",
        "No failure. Skipped is what needs another number of devices.",
        3,
        TESTS,
        (ONE_CARD,),
        ("-m", "not gpu", "-k", "staged-2-0"),
    ),
    Part(
        "rules",
        "LAMB, Muon, Lion and the rules at one bit",
        "Every step is the oracle's: on one rank, on two that share a card, and over NCCL. No failure. "
        "Skipped is what needs two devices.",
        3,
        TESTS,
        (RULES, "-m", "gpu"),
        ("-m", "not gpu", "-k", "staged-OneBitAdam"),
    ),
    Part(
        "tests",
        "The other tests on a GPU",
        "Operators on large tensors, on streams and in graphs, and the engine: no failure. Skipped are tests "
        "that need two devices or more memory.",
        3,
        TESTS,
        (
            "tests/gpu",
            *(f"--ignore={file}" for file in (KERNELS, ONE_CARD, RULES)),
            *("-m", "gpu", "-k", "not sanitizer"),
        ),
        ("-m", "not gpu", "-k", "written_beside"),
    ),
    Part(
        "sanitizer",
        "Operators under compute-sanitizer: memory and races",
        "No error.",
        3,
        SANITIZER,
        ("--tools", "memcheck", "racecheck"),
    ),
    Part(
        "sanitizer-more",
        "Operators under compute-sanitizer: memory that nobody has written, barriers",
        "No error.",
        3,
        SANITIZER,
        ("--tools", "synccheck", "initcheck"),
    ),
    Part(
        "offload",
        "State on the host and on a disk",
        "At most 0.75 of the better peer's step, and on a disk 1.25 of the longer of computing and moving; "
        "copies are hidden beside other work, and early steps make a step shorter.",
        5,
        "tests.bench.offload",
        (
            *("--topics", "peers", "overlap", "disk"),
            *("--size", "125M", "--dtype", "bf16", "--rounds", "3", "--bucket", "10000000"),
        ),
        (
            *("--topics", "overlap", "disk", "--size", "50k", "--disk-size", "50k", "--dtype", "fp32"),
            *("--rounds", "1", "--steps", "1", "--warmup", "1", "--mib", "1"),
        ),
    ),
    Part(
        "largest",
        "The largest model that trains",
        "What is cut is not there: stage 3 trains a larger model than stage 0, and with state on the host a "
        "larger one yet.",
        4,
        LARGEST,
        ("--ranks", "4", "--gib", "2", "--stages", "0", "3"),
        ("--ranks", "1", "--stages", "3", "--tiny"),
        HOST_STEPS,
    ),
    Part(
        "largest-between",
        "The largest model at the stages between",
        "Stage 2 trains a larger one than stage 1.",
        4,
        LARGEST,
        ("--ranks", "4", "--gib", "2", "--stages", "1", "2"),
        ("--ranks", "1", "--stages", "2", "--tiny"),
        HOST_STEPS,
    ),
)
