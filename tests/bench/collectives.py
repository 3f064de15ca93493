"""Which primitive should each collective use on gloo? Every candidate, side by side, on 2 and 4 ranks.

    python -m tests.bench.collectives --ranks 2 4 --elements 400000 10000000 --dtypes fp32 bf16

Each candidate must first give the right numbers. `zero_full.comm` picks a transport per process group; the
row it picks is marked, and beside the time stands why: the bytes that a primitive puts on the wire over
those that an exchange without waste needs. The last line is JSON.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.bench import interleave
from tests.bench.interleave import Ratio, Series
from tests.bench.step_time import DTYPES, leave_with_parent
from tests.worlds import Pool
from zero_full._compat import all_gather_single, reduce_scatter_single
from zero_full.comm.communicator import choose_transport
from zero_full.comm.shared_memory import share_memory
from zero_full.comm.transport import BackendTransport, Exchange, own_slice

COLLECTIVES = ("reduce-scatter", "all-gather", "all-reduce")
NATIVE = "torch"
IDEAL = {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 2}  # times bytes x (N - 1) / N
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One table's worth of work."""

    ranks: int
    elements: int
    dtype: str
    rounds: int
    calls: int = 3

    @property
    def title(self) -> str:
        return f"{self.ranks} ranks, {self.elements / 1e6:g}M {self.dtype}"

    @property
    def numel(self) -> int:
        """Every rank's slice gets the same size."""
        return -(-self.elements // self.ranks) * self.ranks


@dataclass
class Found:
    """What one rank saw of one primitive."""

    used: bool
    seconds: Series = field(default_factory=list)
    loopback: list[int] = field(default_factory=list)  # a call and rank, by round


Primitive = Callable[[Tensor, Tensor], Tensor]  # the whole buffer and room for a slice; the result


def native_reduce_scatter(whole: Tensor, out: Tensor) -> Tensor:
    """gloo's own."""
    reduce_scatter_single(out, whole)
    return out


def native_all_gather(whole: Tensor, out: Tensor) -> Tensor:
    """gloo's own, in place."""
    all_gather_single(whole, own_slice(whole, dist.get_rank(), dist.get_world_size()))
    return whole


def native_all_reduce(whole: Tensor, out: Tensor) -> Tensor:
    """gloo's own."""
    dist.all_reduce(whole)
    return whole


def all_to_all_and_sum(whole: Tensor, out: Tensor) -> Tensor:
    """A reduce-scatter made of an exchange; the sum is in fp32."""
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole)
    total = received.view(dist.get_world_size(), -1).sum(0, dtype=torch.float32)
    return out.copy_(total)


def batched_sends(whole: Tensor, out: Tensor) -> Tensor:
    """An all-gather made of one send to, and one receive from, every other rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(world) if other != rank]
    ops = [dist.P2POp(dist.irecv, own_slice(whole, other, world), other) for other in others]
    ops += [dist.P2POp(dist.isend, own_slice(whole, rank, world), other) for other in others]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return whole


def ours(transport: BackendTransport, collective: str) -> Primitive:
    """One of zero_full's transports."""

    def reduce_scatter(whole: Tensor, out: Tensor) -> Tensor:
        transport.reduce_scatter(whole, out, 1)
        return out

    def all_gather(whole: Tensor, out: Tensor) -> Tensor:
        transport.all_gather(whole)
        return whole

    def all_reduce(whole: Tensor, out: Tensor) -> Tensor:
        transport.all_reduce(whole, 1)
        return whole

    return dict(zip(COLLECTIVES, (reduce_scatter, all_gather, all_reduce), strict=True))[collective]


def candidates() -> dict[tuple[str, str], tuple[Primitive, bool]]:
    """By collective and name: the primitive, and whether zero_full uses it on this group."""
    group = dist.group.WORLD
    assert group is not None
    native = (native_reduce_scatter, native_all_gather, native_all_reduce)
    found: dict[tuple[str, str], tuple[Primitive, bool]] = {
        (collective, NATIVE): (primitive, False)
        for collective, primitive in zip(COLLECTIVES, native, strict=True)
    }
    found["reduce-scatter", "all_to_all + sum"] = (all_to_all_and_sum, False)
    found["all-gather", "batched sends"] = (batched_sends, False)
    used = choose_transport(group, CPU).name
    shared_memory = share_memory(group)
    transports: list[BackendTransport] = [Exchange(group)]
    if shared_memory is not None:
        transports.append(shared_memory)
    for transport in transports:
        for collective in COLLECTIVES:
            name = f"zero_full {transport.name}"
            found[collective, name] = (ours(transport, collective), transport.name == used)
    return {key: found[key] for key in sorted(found, key=lambda key: COLLECTIVES.index(key[0]))}


def source_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums are exact in every precision."""
    return (torch.arange(numel) % 7 + rank + 1).to(dtype)


def expected(collective: str, case: Case, rank: int) -> Tensor:
    """What a collective over `source_of` every rank must give."""
    dtype = DTYPES[case.dtype]
    sources = [source_of(other, case.numel, dtype) for other in range(case.ranks)]
    if collective == "all-gather":
        return torch.cat([own_slice(s, i, case.ranks) for i, s in enumerate(sources)])
    total = sum(source.float() for source in sources).to(dtype)  # type: ignore[union-attr]
    return own_slice(total, rank, case.ranks) if collective == "reduce-scatter" else total


class Rank:
    """One rank of one case."""

    def __init__(self, case: Case) -> None:
        self.case, self.rank = case, dist.get_rank()
        self.source = source_of(self.rank, case.numel, DTYPES[case.dtype])
        self.whole = self.source.clone()
        self.out = own_slice(self.source, self.rank, case.ranks).clone()
        self.primitives = candidates()
        self.found = {key: Found(used) for key, (_, used) in self.primitives.items()}

    def run(self) -> dict[tuple[str, str], Found]:
        """Check everything, then measure everything."""
        for (collective, name), (primitive, _) in self.primitives.items():
            self.whole.copy_(self.source)
            right = expected(collective, self.case, self.rank)
            if not torch.equal(primitive(self.whole, self.out), right):
                raise ArithmeticError(f"{self.case.title}: {collective} by {name} gives wrong numbers")
        keys = {" by ".join(key): key for key in self.primitives}
        interleave.run(list(keys), self.case.rounds, lambda name, _: self.visit(keys[name]))
        return self.found

    def visit(self, key: tuple[str, str]) -> list[float]:
        """One call to warm up, then a few timed ones."""
        primitive, found = self.primitives[key][0], self.found[key]
        self.once(primitive)
        sent = self.quiet()
        found.seconds.append([self.once(primitive) for _ in range(self.case.calls)])
        after = self.quiet()
        if sent is not None and after is not None:
            found.loopback.append((after - sent) // self.case.calls // self.case.ranks)
        return found.seconds[-1]

    def once(self, primitive: Primitive) -> float:
        """Seconds of one call."""
        self.whole.copy_(self.source)
        dist.barrier()
        start = time.perf_counter()
        primitive(self.whole, self.out)
        return time.perf_counter() - start

    def quiet(self) -> int | None:
        """The loopback's count while nobody sends."""
        dist.barrier()
        sent = interleave.loopback_bytes()
        dist.barrier()
        return sent


def rank_main(_: Any, case: Case) -> dict[tuple[str, str], Found]:
    """The life of a rank."""
    leave_with_parent()
    return Rank(case).run()


def measure(pool: Pool, case: Case, limit: float) -> dict[tuple[str, str], Found]:
    """All ranks' findings as one: a collective is over when its slowest rank is."""
    ranks = pool.run(rank_main, case.ranks, case, limit=limit, collective=min(limit, 60))
    return {
        key: Found(one.used, interleave.slowest([rank[key].seconds for rank in ranks]), one.loopback)
        for key, one in ranks[0].items()
    }


HEAD = ["collective", "ms", "range", "/ torch's", "wire / ideal", ""]


def report(case: Case, found: dict[tuple[str, str], Found]) -> str:
    """The table of one case."""
    lines = []
    for (collective, name), row in found.items():
        low, high = interleave.spread(row.seconds)
        against = interleave.ratio("", row.seconds, found[collective, NATIVE].seconds)
        size = case.numel * DTYPES[case.dtype].itemsize
        ideal = IDEAL[collective] * size * (case.ranks - 1) / case.ranks
        wire = f"{min(row.loopback) / ideal:.2f}" if row.loopback else ""
        times = [f"{1e3 * interleave.middle(row.seconds):.2f}", f"{1e3 * low:.2f}-{1e3 * high:.2f}"]
        mark = "used by zero_full" if row.used else ""
        lines.append([f"{collective} by {name}", *times, f"{against.value:.2f}", wire, mark])
    return interleave.table(HEAD, lines)


def ratios(case: Case, found: dict[tuple[str, str], Found]) -> list[Ratio]:
    """What zero_full uses, over torch's own (never slower) and over the fastest of the other candidates."""
    result = []
    for (collective, name), row in found.items():
        if not row.used:
            continue
        others = {by: other for (kind, by), other in found.items() if kind == collective and by != name}
        best = min(others, key=lambda by: interleave.middle(others[by].seconds))
        title = f"{case.title}: {collective} by {name} / "
        result.append(interleave.ratio(title + NATIVE, row.seconds, others[NATIVE].seconds, 1.0))
        result.append(interleave.ratio(f"{title}best other ({best})", row.seconds, others[best].seconds))
    return result


def main() -> None:
    """Measure every case, print a table each, end with one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", nargs="+", type=int, choices=[2, 3, 4], default=[2, 4])
    parser.add_argument("--elements", nargs="+", type=int, default=[400_000, 10_000_000])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one case")
    asked = parser.parse_args()
    print(interleave.heading())
    every: list[Ratio] = []
    pool = Pool()
    try:
        for ranks in asked.ranks:
            for elements in asked.elements:
                for dtype in asked.dtypes:
                    case = Case(ranks, elements, dtype, asked.rounds)
                    print(case.title, file=sys.stderr)
                    found = measure(pool, case, asked.limit)
                    print(f"\n## {case.title}\n\n{report(case, found)}")
                    every += ratios(case, found)
    finally:
        pool.stop()
    print("\n" + interleave.table(interleave.RATIO_HEAD, [r.cells() for r in every]))
    print(
        "\n"
        + interleave.json_line(
            every, versions=interleave.versions(), cpus=os.cpu_count(), rounds=asked.rounds
        )
    )


if __name__ == "__main__":
    main()
