"""GPT-2 and Llama from transformers' configs: tokens/s, peak memory and MFU beside DDP, FSDP2 and DeepSpeed.

    python -m tests.bench.real_models --models GPT2-124M --ranks 2 --dtypes fp32 --rounds 2
    python -m tests.bench.real_models --rounds 0

Every model is trained by the unmodified Trainer and by a plain loop, on gloo ranks with one thread each. The
weights are random, a rank's batch is one sequence. Weights, data, AdamW and clipping (1.0) are the same in
all rows, and losses are compared with DDP's. One row is alive at a time. Each round visits every row, in an
order that rotates; a visit forks new ranks, which build the model, warm up and time a few steps. A step is
over when its slowest rank is.

Measurements are added to a file (`--results`), and visits that it has are not repeated, so that a long run
can be several calls (`--minutes`); `--rounds 0` prints what the file has. Peak memory is a rank's peak
resident memory from before the model is built until the last step, above what was resident after the imports.
MFU is operations of the model's matrix products per second over those that all ranks reach at once with large
products of the same dtype. `--deepspeed`: the interpreter of an environment with DeepSpeed and the same
libraries (`peers.py` says how to make one); in this environment zero_full takes its name. Rows that cannot
run print why. The last line is JSON.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tests.bench import interleave
from tests.bench.interleave import Ratio, Series
from tests.bench.real_models_rank import SIZE, Job, flops_per_step

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "bench" / "real_models.json"
TOKENS = 128
LIMIT = 120.0  # seconds for a visit
PRODUCTS = 8
MODEL_NAMES = ("GPT2-124M", "Llama-100M", "GPT2-tiny", "Llama-tiny")
TRAINER, LOOP = "Trainer", "loop"
ROWS = ("zero_full 2", "zero_full 3", "DDP", "FSDP2", "DeepSpeed 2", "DeepSpeed 3")
HEAD = ["row", "tokens/s", "step / DDP's", "its range", "peak memory, MiB", "MFU", "losses differ by"]
Visit = dict[str, Any]
START = "import sys; from tests.bench.real_models_rank import serve; serve(sys.argv[1], float(sys.argv[2]))"


class Server:
    """A process that has imported the libraries and forks ranks. There is one for each set of libraries."""

    def __init__(self, name: str, deepspeed: str) -> None:
        python = deepspeed if name == "DeepSpeed" else sys.executable
        about = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
        about |= {"DS_ACCELERATOR": "cpu"} if name == "DeepSpeed" else {}
        self.process = subprocess.Popen(
            [python, "-W", "ignore", "-c", START, name, str(LIMIT)],
            cwd=ROOT,
            env={**os.environ, **about},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.name = name
        self.versions: dict[str, str] = {}

    def wait_until_ready(self) -> None:
        """Wait for the imports."""
        self.versions = self._answer()

    def visit(self, job: Job) -> Visit:
        """Run a job; what its ranks have found, as one."""
        if "missing" in self.versions:
            return {"missing": self.versions["missing"]}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(job)) + "\n")
        self.process.stdin.flush()
        ranks = self._answer()
        missing = [rank["missing"] for rank in ranks if "missing" in rank]
        if missing:
            return {"missing": missing[0].splitlines()[0]}
        found: Visit = {
            "seconds": [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)]
        }
        if "peak" in ranks[0]:
            found["peak"] = max(rank["peak"] for rank in ranks)
            said = [rank["losses"] for rank in ranks if rank["losses"]]  # the Trainer's: rank 0 has the mean
            found |= {"note": ranks[0]["note"]} if "note" in ranks[0] else {}
            found["losses"] = [fmean(step) for step in zip(*said, strict=True)]
        return found

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process for {self.name} ended with code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def server_of(way: str, row: str) -> str:
    """The libraries that a row needs."""
    if row.startswith("DeepSpeed"):
        return "DeepSpeed"
    return "zero_full by name" if row.startswith("zero_full") and way == TRAINER else "plain"


# Measuring ---------------------------------------------------------------------------------------


def measure(asked: argparse.Namespace, results: dict[str, Any]) -> None:
    """Add the visits that the results lack, and write them after each."""
    end = time.monotonic() + 60 * asked.minutes
    file = Path(asked.results)
    file.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        servers = {}
        for name in {server_of(job.way, job.row) for job in pending(asked, results)}:
            servers[name] = Server(name, asked.deepspeed)
            stack.callback(servers[name].close)
        for server in servers.values():
            server.wait_until_ready()
            results["versions"] |= {} if "missing" in server.versions else server.versions
        for job in pending(asked, results):
            if time.monotonic() > end:
                return
            found = servers[server_of(job.way, job.row)].visit(job)
            print(
                f"{job.model}, {job.ranks} ranks, {job.dtype}, {job.way} {job.row}: {said(found)}",
                file=sys.stderr,
            )
            results["visits"].append({**asdict(job), **found})
            results["flops"][f"{job.model}, {job.tokens}"] = flops_per_step(job.model, job.tokens)
            file.write_text(json.dumps(results))


def pending(asked: argparse.Namespace, results: dict[str, Any]) -> Iterator[Job]:
    """The visits that the results lack, round by round. A row that could not run is not tried again."""
    every = product(range(asked.rounds), asked.ranks, asked.models, asked.dtypes)
    for number, ranks, model, dtype in every:
        for job in jobs(asked, number, model, ranks, dtype):
            mine = [visit for visit in results["visits"] if same(visit, job)]
            if len(mine) <= number and not any("missing" in visit for visit in mine):
                yield job


def jobs(asked: argparse.Namespace, number: int, model: str, ranks: int, dtype: str) -> Iterator[Job]:
    """The visits of one round: large matrix products, and each row, of which another one is the first."""
    yield Job(model, dtype, "products", "", ranks, asked.tokens, 0, PRODUCTS)
    names = [*product(asked.ways, asked.rows)]
    start = 5 * number % len(names)
    for way, row in names[start:] + names[:start]:
        yield Job(model, dtype, way, row, ranks, asked.tokens, asked.warmup, asked.steps)


def same(visit: Visit, job: Job) -> bool:
    """Whether a visit was this job's."""
    return all(visit[name] == value for name, value in asdict(job).items())


def said(found: Visit) -> str:
    """A visit as a line for who waits."""
    if "missing" in found:
        return str(found["missing"])
    more = f", {found['peak'] / 2**20:.0f} MiB, losses {found['losses']}" if "peak" in found else ""
    return f"{1e3 * median(found['seconds']):.0f} ms{more}"


# The report --------------------------------------------------------------------------------------


class Case:
    """All visits of one model at one number of ranks in one precision."""

    def __init__(self, results: dict[str, Any], model: str, ranks: int, dtype: str) -> None:
        self.name = f"{model}, {dtype}, {ranks} ranks"
        self.visits = [
            visit
            for visit in results["visits"]
            if (visit["model"], visit["ranks"], visit["dtype"]) == (model, ranks, dtype)
        ]
        self.ranks, self.tokens = ranks, self.visits[0]["tokens"]
        self.flops = results["flops"][f"{model}, {self.tokens}"]
        alike = [visit for visit in results["visits"] if visit["way"] == "products"]
        alike = [visit for visit in alike if (visit["ranks"], visit["dtype"]) == (ranks, dtype)]
        self.peak = 2 * SIZE**3 / min(median(visit["seconds"]) for visit in alike)

    def of(self, way: str, row: str) -> list[Visit]:
        """The visits of a row, by round."""
        return [visit for visit in self.visits if (visit["way"], visit["row"]) == (way, row)]

    def series(self, way: str, row: str) -> Series:
        """Seconds a step, by round; empty if the row could not run."""
        return [visit["seconds"] for visit in self.of(way, row) if "missing" not in visit]

    def ratio(self, way: str, row: str, other: str = "DDP") -> Ratio | None:
        """Step over step, in the rounds that have both."""
        ours, theirs = self.series(way, row), self.series(way, other)
        rounds = min(len(ours), len(theirs))
        if not rounds:
            return None
        name = f"{self.name}, {way}: {row} / {other}"
        return interleave.ratio(name, ours[:rounds], theirs[:rounds])

    def difference(self, way: str, row: str) -> str:
        """How far losses are from DDP's at most."""
        pairs = [
            abs(mine - theirs)
            for one, other in zip(self.of(way, row), self.of(way, "DDP"), strict=False)
            for mine, theirs in zip(one.get("losses", []), other.get("losses", []), strict=False)
        ]
        return f"{max(pairs):.1g}" if pairs else ""

    def numbers(self, way: str, row: str) -> tuple[float, float, float] | None:
        """Tokens a second of all ranks, peak bytes of a rank, and MFU."""
        visits = [visit for visit in self.of(way, row) if "missing" not in visit]
        if not visits:
            return None
        second = interleave.middle(self.series(way, row))
        peak = median(visit["peak"] for visit in visits)
        return self.ranks * self.tokens / second, peak, self.flops / second / self.peak

    def notes(self, way: str, rows: list[str]) -> list[str]:
        """What must be known of some rows, and why others could not run."""
        said = [
            f"{row}: {visit.get('missing') or visit.get('note')}"
            for row in rows
            for visit in self.of(way, row)
            if {"missing", "note"} & {*visit}
        ]
        return [*dict.fromkeys(said)]

    def cells(self, way: str, row: str) -> list[str]:
        """A line of the table; `notes` say why a row has no numbers."""
        numbers, found = self.numbers(way, row), self.ratio(way, row)
        if numbers is None:
            return [row, *["-"] * (len(HEAD) - 1)]
        rate, peak, mfu = numbers
        beside = [f"{found.value:.2f}", f"{found.low:.2f}-{found.high:.2f}"] if found else ["", ""]
        return [row, f"{rate:.0f}", *beside, f"{peak / 2**20:.0f}", f"{mfu:.2f}", self.difference(way, row)]


def cases(results: dict[str, Any]) -> Iterator[Case]:
    """What the file has, in the order in which it was measured."""
    keys = dict.fromkeys((visit["model"], visit["ranks"], visit["dtype"]) for visit in results["visits"])
    for model, ranks, dtype in sorted(
        keys, key=lambda key: (key[1], MODEL_NAMES.index(key[0]), key[2] != "fp32")
    ):
        yield Case(results, model, ranks, dtype)


PAIRS = [
    *((ours, theirs) for ours in ("zero_full 2", "zero_full 3") for theirs in ("DDP", "FSDP2")),
    ("zero_full 2", "DeepSpeed 2"),
    ("zero_full 3", "DeepSpeed 3"),
]


def short(results: dict[str, Any]) -> str:
    """A table for each number of ranks: tokens a second, peak GiB of a rank, MFU."""
    tables: list[str] = []
    found = list(cases(results))
    for ranks in dict.fromkeys(case.ranks for case in found):
        here = [case for case in found if case.ranks == ranks]
        head = [f"{ranks} ranks", *(case.name.removesuffix(f", {ranks} ranks") for case in here)]
        rows = []
        for way, row in product((TRAINER, LOOP), ROWS):
            numbers = [case.numbers(way, row) for case in here]
            if any(numbers):
                cells = [
                    f"{one[0]:.0f}, {one[1] / 2**30:.1f}, {one[2]:.2f}" if one else "-" for one in numbers
                ]
                rows.append([f"{way}, {row}", *cells])
        tables.append(interleave.table(head, rows))
    return "\n\n".join(tables)


def report(results: dict[str, Any]) -> list[Ratio]:
    """Print a table for each case; the ratios."""
    found: list[Ratio] = []
    for case in cases(results):
        for way in (TRAINER, LOOP):
            rows = [row for row in ROWS if case.of(way, row)]
            if rows:
                print(f"\n## {case.name}, {way}: batch 1 x {case.tokens}\n")
                print(interleave.table(HEAD, [case.cells(way, row) for row in rows]))
                print("".join(f"\n* {note}" for note in case.notes(way, rows)))
                found += [one for ours, theirs in PAIRS if (one := case.ratio(way, ours, theirs))]
        print(f"\nMatrix products on {case.ranks} ranks at once: {case.peak / 1e9:.0f} GFLOP/s a rank.")
    return found


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODEL_NAMES, default=list(MODEL_NAMES[:2]))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--ways", nargs="+", choices=[TRAINER, LOOP], default=[TRAINER, LOOP])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--rounds", type=int, default=2, help="that the file has in the end")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a visit")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--minutes", type=float, default=1e9, help="no visit begins later")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a sequence; a batch is one sequence")
    parser.add_argument("--short", action="store_true", help="print the short table only")
    parser.add_argument("--results", default=str(RESULTS), help="file that measurements are added to")
    parser.add_argument("--deepspeed", default=sys.executable, help="interpreter that has DeepSpeed")
    return parser.parse_args()


def main() -> None:
    """Measure what is asked for, print all that the file has, end with one JSON line."""
    asked = arguments()
    missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"nothing measured: {' and '.join(missing)} not installed (pip install -e '.[hf]')\n\n{{}}")
        return
    file = Path(asked.results)
    results: dict[str, Any] = {"versions": {}, "flops": {}, "visits": []}
    if file.exists():
        results = json.loads(file.read_text())
    print(interleave.heading())
    if asked.rounds:
        measure(asked, results)
    about = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    print(f"{about}. CPU only, gloo, one thread a rank, {os.cpu_count()} cores.")
    if asked.short:
        print(f"\nTokens/s of all ranks, peak memory of a rank in GiB, MFU.\n\n{short(results)}\n\n{{}}")
        return
    ratios = report(results)
    print("\n" + interleave.table(interleave.RATIO_HEAD, [ratio.cells() for ratio in ratios]))
    print("\n" + interleave.json_line(ratios, versions=results["versions"], flops=results["flops"]))


if __name__ == "__main__":
    main()
