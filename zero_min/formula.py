"""What the papers say a rank holds and sends, as exact integers.

N ranks share P parameters. Whatever is cut is padded first to a multiple of N, because slices must be
equal. `sizes` are the element counts of what is cut: stages 1 and 2 cut each parameter group as one
piece, stage 3 cuts every parameter by itself. The ledger measures, these formulas predict, and the tests
ask both for the same integer.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bytes:
    """Bytes per parameter for each kind of thing. `state` is Adam's averages and any fp32 master."""

    parameter: int
    gradient: int
    state: int


FP32 = Bytes(parameter=4, gradient=4, state=8)
MIXED = Bytes(parameter=2, gradient=2, state=12)  # the ZeRO paper's 16: 2 + 2 + (4 + 4 + 4)
BF16 = Bytes(parameter=2, gradient=4, state=12)  # gradients add up in fp32: 18


def padded(sizes: Sequence[int], world_size: int) -> int:
    """The sum of the sizes, each rounded up to a multiple of the world size."""
    return sum(-(-size // world_size) * world_size for size in sizes)


def held(stage: int, sizes: Sequence[int], world_size: int, each: Bytes = FP32) -> dict[str, int]:
    """Bytes one rank holds after a step, before gradients are let go, by kind."""
    numel, flat = sum(sizes), padded(sizes, world_size)
    mine = flat // world_size
    parameters, gradients, states = {
        0: (numel, numel, numel),
        1: (flat, numel, mine),
        2: (flat, mine, mine),
        3: (mine, mine, mine),
    }[stage]
    return {
        "parameters": each.parameter * parameters,
        "gradients": each.gradient * gradients,
        "optimizer": each.state * states,
    }


def sent(
    stage: int, sizes: Sequence[int], world_size: int, micro_batches: int = 1, each: Bytes = FP32
) -> int:
    """Bytes *all ranks together* send in one step; divide by N for the mean of a rank.

    To reduce-scatter or to gather a tensor each rank sends (N-1)/N of it, so N ranks send it N-1 times.
    """
    numel, flat, m = sum(sizes), padded(sizes, world_size), micro_batches
    reduced, gathered = {
        0: (2 * numel, 0),  # all-reduce: both halves on gradients
        1: (flat, flat),  # reduce-scatter at the boundary, then gather the parameters
        2: (m * numel, flat),  # reduce-scatter in every micro-batch
        3: (m * flat, m * 2 * flat),  # and gather for every forward and every backward
    }[stage]
    return (world_size - 1) * (each.gradient * reduced + each.parameter * gathered)


def moved(
    sizes: Sequence[int], world_size: int, micro_batches: int = 1, each: Bytes = MIXED
) -> tuple[int, int]:
    """Bytes all ranks together copy (down to the host, up to the device) in one step of offloading."""
    return micro_batches * each.gradient * sum(sizes), each.parameter * padded(sizes, world_size)


def compressed_round(sizes: Sequence[int], world_size: int) -> int:
    """Bytes all ranks together send to average tensors, a bit a value and a scale each, there and back."""
    chunk = -(-sum(sizes) // (8 * world_size))  # bytes of signs that each rank serves
    return 0 if world_size == 1 else 2 * world_size * (world_size - 1) * (chunk + 4 * len(sizes))


def flag(world_size: int) -> int:
    """Bytes all ranks together send to agree on one fp32 number: did anyone overflow?"""
    return 2 * (world_size - 1) * 4


def zero_one_held(sizes: Sequence[int], world_size: int) -> dict[str, int]:
    """What 0/1 Adam holds: nothing is cut, and there are m, v, u, the anchor and two errors."""
    flat = padded([sum(sizes)], world_size)
    chunk = 8 * -(-sum(sizes) // (8 * world_size))
    return {
        "parameters": 4 * flat,
        "gradients": 4 * sum(sizes),
        "optimizer": 4 * (4 * flat + world_size * chunk + chunk),
    }


def zero_one_rounds(
    steps: int, kappa: int, freeze_step: int, local_kappa: int, local_clip: int
) -> dict[str, int]:
    """How many of the steps average exact gradients, one bit, or nothing."""
    rounds = {"exact": 0, "one bit": 0, "silent": 0}
    for step in range(1, min(steps, freeze_step) + 1):
        gap = 2 ** (rounds["exact"] // kappa)
        rounds["exact" if step % gap == 0 else "one bit"] += 1
    for step in range(freeze_step + 1, steps + 1):
        gap = min(2 ** ((step - freeze_step - 1) // local_kappa), local_clip)
        rounds["one bit" if step % gap == 0 else "silent"] += 1
    return rounds


def zero_one_sent(sizes: Sequence[int], world_size: int, steps: int, **schedule: int) -> int:
    """Bytes all ranks together send in so many steps of 0/1 Adam."""
    rounds = zero_one_rounds(steps, **schedule)
    exact = 2 * (world_size - 1) * 4 * padded([sum(sizes)], world_size)
    return rounds["exact"] * exact + rounds["one bit"] * compressed_round(sizes, world_size)


def muon_held(matrices: int, others: int, world_size: int) -> dict[str, int]:
    """What a rank holds if Muon, which keeps one average, moves that many elements, and AdamW the others."""
    flats = padded([matrices], world_size), padded([others], world_size)
    mine = [flat // world_size for flat in flats]
    return {"parameters": 4 * sum(flats), "gradients": 4 * sum(mine), "optimizer": 4 * mine[0] + 8 * mine[1]}


def _within(position: int, rank: int, slice_size: int) -> int:
    """How many elements of the rank's slice lie before this position of the flat tensor."""
    return sorted((0, position - rank * slice_size, slice_size))[1]


def muon_visits(sizes: Sequence[int], owners: Sequence[int], world_size: int) -> int:
    """Elements that are not where the work on their matrix is done. The matrices lie one behind the other."""
    mine, start, away = padded([sum(sizes)], world_size) // world_size, 0, 0
    for size, owner in zip(sizes, owners, strict=True):
        away += size - (_within(start + size, owner, mine) - _within(start, owner, mine))
        start += size
    return away


def muon_sent(sizes: Sequence[int], owners: Sequence[int], others: int, world_size: int) -> int:
    """Bytes all ranks together send in a step: stage 2's, and two bytes an element to its owner and back."""
    return sent(2, [sum(sizes), others], world_size) + 2 * 2 * muon_visits(sizes, owners, world_size)


def tensor_parallel_held(cut: int, whole: int, world_size: int, each: Bytes = FP32) -> dict[str, int]:
    """What a rank holds of `cut` elements in parts and of `whole` elements that every rank has."""
    mine = cut // world_size + whole
    return {
        "parameters": each.parameter * mine,
        "gradients": each.gradient * mine,
        "optimizer": each.state * mine,
    }


def tensor_parallel_sent(blocks: int, tokens: int, width: int, world_size: int, value: int = 4) -> int:
    """Bytes all ranks together send for a batch: two all-reduces a block in forward, two in backward.

    An all-reduce of n elements makes N ranks send 2(N-1) n together; here n is tokens x width.
    """
    return blocks * (2 + 2) * 2 * (world_size - 1) * value * tokens * width


def pipeline_bubble(ranks: int, micro_batches: int) -> float:
    """The idle share of all ranks' time, with GPipe and with 1F1B, however long a backward takes."""
    return (ranks - 1) / (micro_batches + ranks - 1)


def pipeline_kept(schedule: str, rank: int, ranks: int, micro_batches: int) -> int:
    """How many micro-batches' activations a rank holds at most."""
    return micro_batches if schedule == "gpipe" else min(ranks - rank, micro_batches)


def pipeline_sent(ranks: int, tokens: int, width: int, tied: int, value: int = 4) -> int:
    """Bytes all ranks together send for a batch: activations and their gradients, a tied weight's twice."""
    return (2 * (ranks - 1) * tokens * width + (2 * tied if ranks > 1 else 0)) * value


def kept_by_block(tokens: int, width: int, heads: int, value: int = 4) -> int:
    """Bytes that one block of the GPT keeps between its forward and its backward.

    For each token that is 16 times the width: the stream twice, each norm's output, q, k, v, the output of
    attention, and the inner layer, four times as wide, before and after GELU. And some numbers: two for each
    norm, and one for each head.
    """
    return value * tokens * (16 * width + 2 * 2 + heads)


def kept_for_recomputing(layers: int, interval: int, boundary: int) -> int:
    """Bytes that are kept after forward if `interval` layers are recomputed at a time: their inputs."""
    return -(-layers // interval) * boundary


def kept_while_recomputing(layers: int, interval: int, boundary: int, block: int) -> int:
    """Bytes that are kept at most in backward: inputs, and what the segment that is recomputed keeps.

    Its own input is both. The last segment may be smaller, and then the one before it may need more.
    """
    segments = -(-layers // interval)
    last = layers - (segments - 1) * interval
    most = (segments - 1) * boundary + last * block
    return max(most, (segments - 2) * boundary + interval * block) if segments > 1 else most


def offloaded(tokens: int, width: int, value: int = 4) -> int:
    """Bytes of one block that are copied to the host in forward, and back in backward.

    What two operations keep is copied twice: the output of attention is the input of the next layer.
    """
    return value * tokens * 17 * width
