"""The emulator notices mistakes: each is planted in a copy of a source, which then fails its checks."""

from typing import NamedTuple

import pytest
import torch

from tests import rotation
from tests.kernels import emulation
from tests.kernels.cases import BF16, NAN, normal
from tests.kernels.emulated_checks import (
    MANY,
    check_adam,
    check_blocks,
    check_lamb,
    check_rows,
    check_sign_mean,
    check_sign_pack,
    check_unscale,
    ends_of,
)
from tests.kernels.emulation import CHUNK, Change, Emulated
from tests.kernels.optimizing import TOGETHER, lists


def try_adam(cuda: Emulated) -> None:
    check_adam(cuda, lists([1000, 7], TOGETHER, grad=BF16))


def try_lamb(cuda: Emulated) -> None:
    check_lamb(cuda, lists([CHUNK + 5, *MANY], grad=BF16))


def try_unscale(cuda: Emulated) -> None:
    for factor, offset in ((1.0, 1), (0.5, 0)):
        gradients = [normal(n, seed=n, offset=offset) for n in (1000, CHUNK + 7)]
        check_unscale(cuda, gradients, factor)
        gradients[1][CHUNK + 3] = NAN
        check_unscale(cuda, gradients, factor)


def try_sign(cuda: Emulated) -> None:
    numel = CHUNK + 33
    check_sign_pack(cuda, normal(numel, seed=1), normal(numel), ends_of(numel), True)
    check_sign_mean(cuda, 3, ends_of(numel), normal(numel), True)
    check_sign_mean(cuda, 3, torch.tensor([96]), normal(96), True)


def try_quantize(cuda: Emulated) -> None:
    for block in (64, 301):
        check_blocks(cuda, normal(969), 4, block)
        check_rows(cuda, normal(6 * 300).view(3, 2, 300), 8, block, 2)


TRY = {f.__name__[4:] + ".cu": f for f in (try_adam, try_lamb, try_unscale, try_sign, try_quantize)}


class Mistake(NamedTuple):
    change: Change
    said: str


PACKS = """  for (int64_t begin = low; begin < high; begin += N * THREADS) {
    const int64_t i = begin + N * threadIdx.x;"""
TEAM = "  if (unit.low >= layout.rows.numel) return;  // the whole team"
SECOND = "scales.second = scale_of<bits, team>(numbers, unit.middle, unit.high)"
RACE, DIFFERS = "depends on the order", "differs|not close"


def mistake(said: str, compiled: str, file: str, old: str, new: str) -> Mistake:
    return Mistake(Change(file, old, new, compiled), said)


MISTAKES = {
    "no barrier before what thread 0 has computed is read": mistake(
        RACE, "adam.cu", "adam.cu", "  __syncthreads();\n", ""
    ),
    "no barrier between the warps' sums and their sum": mistake(
        RACE, "unscale.cu", "reduce.h", "  __syncthreads();\n  x = warp", "  x = warp"
    ),
    "no barrier before the next reduction": mistake(
        RACE, "lamb.cu", "reduce.h", "  __syncthreads();  // the next call writes there again\n", ""
    ),
    "a barrier that not all threads reach": mistake(
        r"waits at the barrier .*reduce.h:\d+, but thread \d+ waits at the barrier",
        "unscale.cu",
        "reduce.h",
        "  __syncthreads();\n  x = warp",
        "  if (warp == 0) __syncthreads();\n  x = warp",
    ),
    "a barrier after some threads have ended": mistake(
        r"waits at the barrier .*adam.cu:\d+, but thread \d+ has ended",
        "adam.cu",
        "adam.cu",
        "  __syncthreads();\n",
        "  if (threadIdx.x >= chunk.size) return;\n  __syncthreads();\n",
    ),
    "lanes that end before the others exchange their signs": mistake(
        r"is in the warp's exchange .*sign.cu:\d+, but thread \d+ has ended",
        "sign.cu",
        "sign.cu",
        PACKS,
        "  for (int64_t i = low + N * threadIdx.x; i < high; i += N * THREADS) {",
    ),
    "lanes that end before the others look for the largest number": mistake(
        r"is in the warp's exchange .*reduce.h:\d+, but thread \d+ has ended",
        "quantize.cu",
        "quantize.cu",
        TEAM,
        TEAM.replace("unit.low", "unit.low + threadIdx.x % team"),
    ),
    "lanes that are elsewhere": mistake(
        r"is in the warp's exchange .*reduce.h:\d+, but thread \d+ waits at the barrier",
        "unscale.cu",
        "reduce.h",
        "  x = warp_reduce(x, combine);\n  if (lane == 0)",
        "  if (lane > 0) x = warp_reduce(x, combine);\n  if (lane == 0)",
    ),
    "a write beside shared memory": mistake(
        "beside a variable in shared memory",
        "unscale.cu",
        "reduce.h",
        "partial[warp] = x",
        "partial[warp + 1] = x",
    ),
    "a read beside shared memory": mistake(
        DIFFERS, "unscale.cu", "reduce.h", "lane < WARPS ?", "lane <= WARPS ?"
    ),
    "half a warp left out": mistake(
        DIFFERS, "unscale.cu", "reduce.h", "distance = WARP / 2", "distance = WARP / 4"
    ),
    "one element too many": mistake(DIFFERS, "unscale.cu", "stream.h", "k < singles;", "k < singles + 1;"),
    "one element too few": mistake(DIFFERS, "unscale.cu", "stream.h", "k < singles;", "k < singles - 1;"),
    "a pack too many": mistake(
        "written behind array",
        "adam.cu",
        "stream.h",
        "(all - first) / N * N",
        "(all - first + N - 1) / N * N",
    ),
    "a byte too many": mistake(
        "written behind array", "sign.cu", "sign.cu", "8 * k < count", "8 * k < count + 8"
    ),
    "an element before the first": mistake(
        "written before array", "adam.cu", "stream.h", "k < span.first ? k :", "k < span.first ? k - 1 :"
    ),
    "packs at any address": mistake(
        "address is not a multiple", "adam.cu", "stream.h", "int((N - address / sizeof(T) % N) % N)", "0"
    ),
    "what is only to be read is written": mistake(
        "only to be read, but was written",
        "adam.cu",
        "adam.cu",
        "store(copy + i, copies);",
        "store(copy + i, copies);\n    store(const_cast<Grad*>(grad) + i, Pack<Grad, N>{});",
    ),
    "a chunk's tensor is searched wrongly": mistake(
        DIFFERS, "unscale.cu", "batch.h", "ends[middle] > index", "ends[middle] >= index"
    ),
    "launches write over each other's sums": mistake(
        DIFFERS, "lamb.cu", "lamb.cu", "partial[slots.first_chunk + blockIdx.x]", "partial[blockIdx.x]"
    ),
    "a sum goes to another slot": mistake(
        DIFFERS, "lamb.cu", "lamb.cu", "norms[slots.first_item + item]", "norms[item]"
    ),
    "sums counted several times": mistake(
        DIFFERS, "unscale.cu", "unscale.cu", "i += MANY_THREADS", "i += MANY_THREADS / 512"
    ),
    "the place in the chunk instead of that in the piece": mistake(
        DIFFERS, "unscale.cu", "unscale.cu", "piece.before + chunk.low + first", "piece.before + first"
    ),
    "pieces that share a place for their sums": mistake(
        f"{RACE}|{DIFFERS}", "sign.cu", "sign.cu", "sums[blockIdx.x + place.piece]", "sums[blockIdx.x]"
    ),
    "pieces that never end": mistake(
        "does not come to an end",
        "sign.cu",
        "sign.cu",
        "if (i < end) return false;",
        "if (i <= end) return false;",
    ),
    "signs in the wrong bits": mistake(
        DIFFERS, "sign.cu", "sign.cu", "signs <<= N * lane;", "signs <<= lane;"
    ),
    "the signs of the word's first thread": mistake(
        DIFFERS, "sign.cu", "sign.cu", "all >> (i % 32 + u * STEP)", "all >> (u * STEP)"
    ),
    "a mean's last bits are forgotten": mistake(
        DIFFERS, "sign.cu", "../core/sign.h", "return fmaf(fmaf(-rough", "return rough; fmaf(fmaf(-rough"
    ),
    "a row that begins where its neighbour does": mistake(
        f"{RACE}|{DIFFERS}", "quantize.cu", "quantize.cu", "+ blockIdx.y * apart[1]", ""
    ),
    "the first term is added again": mistake(
        DIFFERS, "quantize.cu", "quantize.cu", "payload + term * layout.rows.apart", "payload"
    ),
    "the first block's scale for the second": mistake(
        DIFFERS, "quantize.cu", "quantize.cu", SECOND, "scales.second = scales.first"
    ),
}


@pytest.mark.parametrize("source", TRY)
def test_without_a_mistake_nothing_is_noticed(source: str) -> None:
    TRY[source](Emulated(emulation.library()))


@pytest.mark.parametrize("name", rotation.one_of([*MISTAKES]))  # each costs a compilation
def test_a_mistake_is_noticed(name: str) -> None:
    change, said = MISTAKES[name]
    wrong = Emulated(emulation.library_with(change))
    with pytest.raises(
        AssertionError, match=said
    ):  # of the emulator, or results that are not the reference's
        TRY[change.compiled](wrong)
