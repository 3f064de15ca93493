"""The bytes that each implementation must hold and send, from the formulas and its way of cutting."""

from tests.cases import Case, frozen_sizes, sizes
from tests.trainers import Subject
from zero_min import formula

ALIGNED = 8  # elements: zero_full starts every parameter and every slice at a multiple of it


def rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def units(case: Case, trained: bool) -> list[list[int]]:
    """zero_full's units at stage 3: those of their parameters that are trained, or those that are frozen."""
    # Imported here: a learner's `check` waits for no import of it.
    from zero_full.shard.deal.units import choose_units, join_small, size_limit

    model = case.model()
    limit = size_limit(model, 10**9)
    chosen = join_small(choose_units(model, limit), limit)
    found = [[p.numel() for _, p in unit.parameters if p.requires_grad == trained] for unit in chosen]
    return [numels for numels in found if numels]


def buckets(case: Case, stage: int, world_size: int) -> list[list[int]]:
    """zero_full's buckets: trained parameters from the last to the first, up to a size; at stage 3, units."""
    if stage == 3 and world_size > 1:
        return units(case, trained=True)
    trained = [p.numel() for p in case.model().parameters() if p.requires_grad]
    dealt: list[list[int]] = []
    for numel in reversed(trained):
        if not dealt or sum(dealt[-1]) + numel > case.bucket_size:
            dealt.append([])
        dealt[-1].append(numel)
    return dealt


def padded(bucket: list[int], world_size: int) -> int:
    """A bucket's elements with everything at multiples."""
    return rounded(sum(rounded(numel, ALIGNED) for numel in bucket), ALIGNED * world_size)


def fragments(bucket: list[int], world_size: int, rank: int) -> list[int]:
    """The elements of each parameter of a bucket that are this rank's, where there are any."""
    shard = padded(bucket, world_size) // world_size
    found, start = [], 0
    for numel in bucket:
        first, last = (sorted((0, x - rank * shard, shard))[1] for x in (start, start + numel))
        found.append(last - first)
        start += rounded(numel, ALIGNED)
    return [numel for numel in found if numel]


def frozen_bytes(subject: Subject, case: Case, world_size: int) -> int:
    """What a rank holds of parameters that nobody trains: all, or a slice at stage 3."""
    frozen = frozen_sizes(case)
    if subject.stage < 3 or (subject.impl == "full" and world_size == 1):
        return 4 * sum(frozen)
    if subject.impl == "full":
        return 4 * sum(padded(unit, world_size) for unit in units(case, trained=False)) // world_size
    return 4 * formula.padded(frozen, world_size) // world_size


def held(subject: Subject, case: Case, world_size: int, rank: int) -> dict[str, int]:
    """Bytes of one rank between steps, by kind."""
    if subject.impl == "full":
        expected = _held_by_full(subject.stage, case, world_size, rank)
    else:
        expected = formula.held(subject.stage, sizes(case, subject.stage), world_size)
    expected["parameters"] += frozen_bytes(subject, case, world_size)
    return expected


def _held_by_full(stage: int, case: Case, world_size: int, rank: int) -> dict[str, int]:
    """The formula on padded buckets, but padding has no state, and a rank alone no flat gradients."""
    dealt = buckets(case, stage, world_size)
    expected = formula.held(stage, [padded(bucket, world_size) for bucket in dealt], world_size)
    if world_size == 1:
        expected["gradients"] = 4 * sum(map(sum, dealt))
    shards, place = (1, 0) if stage == 0 else (world_size, rank)
    if stage == 0:  # nothing is cut, but all ranks share the work of averaging, so slices are as at stage 1
        mine = [numel for bucket in dealt for numel in bucket if numel]
    else:
        mine = [numel for bucket in dealt for numel in fragments(bucket, shards, place)]
    return {**expected, "optimizer": 8 * sum(mine), "counters": 4 * len(mine)}


def sent(subject: Subject, case: Case, world_size: int) -> int:
    """Bytes that all ranks together send in one step."""
    cut = sizes(case, subject.stage)
    if subject.impl == "full":
        cut = [padded(bucket, world_size) for bucket in buckets(case, subject.stage, world_size)]
    expected = formula.sent(subject.stage, cut, world_size, case.micro_batches)
    if subject.stage == 3:  # frozen parameters are gathered twice, too
        frozen = frozen_bytes(subject, case, world_size)
        expected += 2 * case.micro_batches * (world_size - 1) * world_size * frozen
    return expected


def calls(stage: int, case: Case, world_size: int) -> dict[str, int]:
    """How often each rank of zero_min calls each collective in one step."""
    model = case.model()
    trained = sum(p.requires_grad for p in model.parameters())
    groups, m = len(sizes(case, 1)), case.micro_batches
    if stage == 0:
        return {"all_reduce": trained}
    if stage == 3:  # whole for forward, and again for backward
        used = sum(p.requires_grad and p.numel() > 0 for p in model.parameters())  # what is empty has no use
        return {"all_gather": 2 * m * len(list(model.parameters())), "reduce_scatter": m * used}
    pieces = groups if stage == 1 else m * len(buckets(case, stage, world_size))
    return {"reduce_scatter": pieces, "all_gather": groups}


def at_adam(subject: Subject, case: Case, world_size: int, rank: int) -> int:
    """Bytes that are alive on a rank of zero_min when Adam begins: what it holds, and what Adam needs."""
    slices = formula.padded(sizes(case, 1), world_size) // world_size
    own = 4 * slices if subject.stage == 1 else 0  # else the gradient that is kept is the one Adam needs
    return sum(held(subject, case, world_size, rank).values()) + own
