"""The reference of each operator in plain torch: its definition, the tests' oracle and the fallback.

[Note: blocks of integers] A payload holds `numel` numbers as bytes: integers of 8 or 4 bits, then an fp32
scale for each block of them. A byte has two 4-bit integers, the first in the low half. A block with a number
that is not finite has the scale NaN, so all of it is decoded as NaN. With several dimensions the last one is
a row, which has its own payload, and rows need not be contiguous. If payloads have one more dimension than
numbers, the first one, they are terms of a sum.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

FINITE = torch.finfo(torch.float32)
PIECE = {"cpu": 2**17}  # numbers processed at a time: few enough for the cache...
PIECE_ON_DEVICE = 2**24  # ...or many enough that starting kernels costs little


# Optimizers --------------------------------------------------------------------------------------


def adam_step(
    masters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor],
    *options: Any,
    changed: Sequence[Tensor] | None = None,
    **named_options: Any,
) -> None:
    """Take a step of Adam, with the options of `Adam`; masters are copied to `copies`, if given.

    An element of a copy that is not its rounded master was written by the user: the master adopts it first.
    `steps` are the numbers of this step, from 1. Computation is in fp32, and in fp64 for fp64 masters, which
    no compiled operator takes.

    `changed`: for each copy uint8, with a bit for each element, the lowest bit first. The bits of elements
    that this step or the user has changed are set; the others stay. A compiled operator does it on a CPU.
    """
    adam = Adam(*options, **named_options)
    for i, master in enumerate(masters):
        p = master if not copies else with_user_writes(master, copies[i])
        if changed is not None:
            old, rounded = copies[i].clone().view(torch.int16), master.to(copies[i].dtype).view(torch.int16)
        moved = adam.step(p, grads[i], exp_avgs[i], exp_avg_sqs[i], steps[i])
        for target, value in zip((master, exp_avgs[i], exp_avg_sqs[i]), moved, strict=True):
            target.copy_(value)
        if copies:
            copies[i].copy_(moved[0])
        if changed is not None:
            flags = (old != rounded) | (old != copies[i].view(torch.int16))
            padded = torch.nn.functional.pad(flags.view(-1), (0, -flags.numel() % 8)).view(-1, 8)
            places = torch.arange(8, device=flags.device, dtype=torch.uint8)
            changed[i].bitwise_or_((padded.to(torch.uint8) << places).sum(1, dtype=torch.uint8))


class Adam(NamedTuple):
    """The options of Adam, and its update of one tensor."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW's decay
    factor: float  # of the gradients
    bias_correction: bool = True

    def step(
        self, master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the new master and moments before rounding, by the operations of the compiled kernels."""
        wide = _wide(master)
        # Tensors, so that the host does not wait for the device. beta**inf is 0: no correction.
        number = step.double() if self.bias_correction else torch.full_like(step.double(), torch.inf)
        first, second = (1 - beta**number for beta in (self.beta1, self.beta2))
        step_size, root_scale = (self.lr / first).to(wide), (1 / second.sqrt()).to(wide)
        p, m, v, g = (each.to(wide) for each in (master, exp_avg, exp_avg_sq, grad))
        g = g * self.factor
        if not self.decoupled:
            g = g + p * self.weight_decay
        m = m + (1 - self.beta1) * (g - m)
        v = v * self.beta2 + (1 - self.beta2) * g * g
        if self.decoupled:
            p = p * (1 - self.lr * self.weight_decay)
        return p - step_size * m / (v.sqrt() * root_scale + self.eps), m, v


def adam_step_stochastic(
    masters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    keys: Sequence[int],
    places: Sequence[int],
    *options: Any,
    **named_options: Any,
) -> None:
    """Take a step of Adam with stochastic rounding of bf16 masters, and of bf16 moments.

    Random bits are a function of the parameter's key, the step and the element's index in the parameter.
    `places` are the indices of the tensors' first elements.
    """
    adam = Adam(*options, **named_options)
    for i, kept in enumerate(zip(masters, exp_avgs, exp_avg_sqs, strict=True)):
        moved = adam.step(kept[0], grads[i], kept[1], kept[2], steps[i])
        bits = random_bits(keys[i], steps[i], places[i], kept[0].numel())
        for target, value, drawn in zip(kept, moved, bits, strict=True):
            low = target.dtype == torch.bfloat16
            target.copy_(round_stochastically(value, drawn.view(value.shape)) if low else value)


WORD = 2**32 - 1
GOLDEN = 0x9E3779B9


def round_stochastically(values: Tensor, drawn: Tensor) -> Tensor:
    """Round fp32 numbers to bf16: away from zero if the low 16 bits plus 16 random bits carry."""
    rounded = (values.view(torch.int32).long() + (drawn & 0xFFFF)) & 0xFFFF0000
    low = (rounded >> 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isnan(), values.bfloat16(), low)


def random_bits(key: int, step: Tensor, place: int, numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each element's random bits, at least 16, for its master and its first and second moment."""
    number = step.long() & WORD
    first = _hash((key & WORD) ^ _hash(number))
    second = _hash(((key >> 32 & WORD) + _hash(number ^ GOLDEN)) & WORD)
    places = torch.arange(place, place + numel, device=step.device)
    low, high = places & WORD, places >> 32
    drawn = _hash((_hash(low ^ first) + second + high * GOLDEN) & WORD)
    return drawn, drawn >> 16, _hash(drawn ^ first)


def _hash(x: Tensor) -> Tensor:
    """Run MurmurHash3's finalizer on 32-bit numbers in int64. Factors minus 2**32 avoid overflow."""
    for shift, factor in ((16, 0x85EBCA6B - 2**32), (13, 0xC2B2AE35 - 2**32)):
        x = (x ^ x >> shift) * factor & WORD
    return x ^ x >> 16


def with_user_writes(master: Tensor, copy: Tensor) -> Tensor:
    """Return the master with the values that user code wrote to its rounded copy."""
    rounded = master.to(copy.dtype)
    same = rounded.view(torch.int16) == copy.view(torch.int16)
    return torch.where(same, master, copy.to(master.dtype))


def lamb_norms(
    masters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    eps_inside_sqrt: bool,
    factor: float,
) -> Tensor:
    """Run LAMB's first half: update moments; return the squared norms of each tensor and of its update.

    If tensors are shards, the caller sums these over all shards of a tensor before `lamb_step`.
    """
    norms = []
    for p, g, m, v in zip(masters, grads, exp_avgs, exp_avg_sqs, strict=True):
        wide = _wide(p)
        scaled = g.to(wide) * factor
        m.copy_(m.to(wide) + (1 - beta1) * (scaled - m.to(wide)))
        v.copy_(v.to(wide) * beta2 + (1 - beta2) * scaled * scaled)
        update = _lamb_update(p, m, v, eps, weight_decay, eps_inside_sqrt)
        norms.append(torch.stack([p.double().square().sum(), update.double().square().sum()]))
    return torch.stack(norms) if norms else torch.zeros(0, 2, dtype=torch.float64)


def lamb_step(
    masters: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor],
    norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    eps_inside_sqrt: bool,
    min_trust: float,
    max_trust: float,
) -> None:
    """Run LAMB's second half: step by `lr` times the trust ratio, each tensor's norm over its update's.

    The ratio is clamped to the bounds, and is 1 if either norm is zero.
    """
    for i, p in enumerate(masters):
        update = _lamb_update(p, exp_avgs[i], exp_avg_sqs[i], eps, weight_decay, eps_inside_sqrt)
        weight, change = norms[i].sqrt().unbind()
        trust = torch.where((weight > 0) & (change > 0), (weight / change).clamp(min_trust, max_trust), 1.0)
        size = lr * trust
        if bias_correction:
            first, second = (1 - beta ** steps[i].double() for beta in (beta1, beta2))
            size = size * second.sqrt() / first
        p.copy_(p.to(_wide(p)) - size.to(_wide(p)) * update)
        if copies:
            copies[i].copy_(p)


def _lamb_update(
    p: Tensor, m: Tensor, v: Tensor, eps: float, weight_decay: float, eps_inside_sqrt: bool
) -> Tensor:
    m, v, p = m.to(_wide(p)), v.to(_wide(p)), p.to(_wide(p))
    root = (v + eps).sqrt() if eps_inside_sqrt else v.sqrt() + eps
    return m / root + weight_decay * p


def _wide(p: Tensor) -> torch.dtype:
    """Return the dtype in which a master is updated: fp32, or fp64 for fp64."""
    return torch.promote_types(p.dtype, torch.float32)


def unscale_norm_check(gradients: Sequence[Tensor], factor: float) -> tuple[Tensor, Tensor]:
    """Multiply gradients in place; return their sum of squares in fp64, the first non-finite index or -1.

    The index counts the elements of all tensors.
    """
    device = gradients[0].device if gradients else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    first = torch.full((), -1, dtype=torch.int64, device=device)
    before = 0
    for gradient in gradients:
        if factor != 1:
            gradient.copy_(gradient.float() * factor)
        total += gradient.double().square().sum()
        bad = ~gradient.reshape(-1).isfinite()
        if bad.numel():
            here = torch.where(bad.any(), before + bad.to(torch.uint8).argmax(), -1)
            first = torch.where(first < 0, here, first)
        before += gradient.numel()
    return total, first


def sum_and_divide(terms: Sequence[Tensor], out: Tensor, divisor: float) -> None:
    """Sum `terms`, first to last, into `out`, and divide: in fp32 or the widest of the types given.

    `out` may be one of the terms.
    """
    numel, piece = out.numel(), PIECE["cpu"]  # in pieces, so that they are still in the cache when divided
    for low in range(0, numel, piece):
        _sum_piece([term[low : low + piece] for term in terms], out[low : low + piece], divisor)


def nontemporal_copy(source: Tensor, out: Tensor) -> None:
    """Copy `source` to `out`, of the same type; compiled, without bringing `out` into the caches."""
    out.copy_(source)


def _sum_piece(terms: Sequence[Tensor], out: Tensor, divisor: float) -> None:
    wide = torch.promote_types(torch.promote_types(terms[0].dtype, out.dtype), torch.float32)
    first, second, *others = terms
    if out.dtype != wide:  # add up in a copy, so that only the sum is rounded
        total = first.to(wide, copy=True).add_(second)
    elif first.dtype != out.dtype:
        total = out.copy_(first).add_(second)
    else:  # with more than two terms beside `out`, which may be one that is still to be added
        total = torch.add(first, second, out=None if others else out)
    for term in others:
        total.add_(term)
    if divisor != 1:
        total.div_(divisor)
    if total is not out:
        out.copy_(total)


# One bit a number --------------------------------------------------------------------------------


def sign_pack(values: Tensor | None, error: Tensor, ends: Tensor, l1: bool) -> tuple[Tensor, Tensor]:
    """Pack the signs of `values + error`, eight per byte, and return them with a scale for each piece.

    Pieces end at `ends`; elements behind the last end are padding with the scale 0. A scale is the root mean
    square, or with `l1` the mean magnitude. `error` becomes the difference to scale times sign. Zero counts
    as positive; the last byte is padded with zeros. `values` None: `error` has the values already.

    A number that is not finite makes its piece's scale and errors NaN, and errors stay NaN: check for
    overflow before. `ends` must ascend within bounds, which a GPU checks only with ZERO_FULL_CHECK_ENDS=1.
    """
    wanted = error if values is None else values.float() + error
    starts = [0, *ends.tolist()]
    scales = torch.stack([_scale(wanted[a:b], l1) for a, b in pairwise(starts)])
    positive = wanted >= 0
    signs = positive.float() * 2 - 1
    bits = torch.nn.functional.pad(positive.to(torch.uint8), (0, -len(wanted) % 8)).view(-1, 8)
    places = torch.arange(8, device=bits.device, dtype=torch.uint8)
    packed = (bits << places).sum(1, dtype=torch.uint8)
    error.copy_(wanted - _spread(scales, ends, len(wanted)) * signs)
    return packed, scales


def sign_unpack_mean(packed: Tensor, scales: Tensor, ends: Tensor, out: Tensor, add: bool) -> None:
    """Write the mean of the rows, each of signs times scales, to `out`, or add it to `out`."""
    places = torch.arange(8, device=packed.device, dtype=torch.uint8)
    total = torch.zeros(len(out), dtype=torch.float32, device=out.device)
    for row, scale in zip(packed, scales, strict=True):
        bits = (row[:, None] >> places & 1).flatten()[: len(out)]
        total += (bits.float() * 2 - 1) * _spread(scale, ends, len(out))
    total /= len(packed)
    out.copy_(out.float() + total if add else total)


def _scale(piece: Tensor, l1: bool) -> Tensor:
    size = max(piece.numel(), 1)
    total = piece.double().abs().sum() / size if l1 else (piece.double().square().sum() / size).sqrt()
    return total.float()


def _spread(scales: Tensor, ends: Tensor, numel: int) -> Tensor:
    """Expand scales to one number per element; 0 behind the last end."""
    sizes = ends.diff(prepend=ends.new_zeros(1))
    return torch.nn.functional.pad(scales.repeat_interleave(sizes), (0, numel - int(ends[-1])))


# Blocks of integers ------------------------------------------------------------------------------


class Part(NamedTuple):
    """The position in tensor and payload of a run of numbers, which starts at a block and at a byte."""

    numbers: slice
    integers: slice
    scales: slice


def payload_bytes(numel: int, bits: int, block: int) -> int:
    """Return the bytes of the payload of `numel` numbers. See [Note: blocks of integers]."""
    return value_bytes(numel, bits) + 4 * -(-numel // block)


def value_bytes(numel: int, bits: int) -> int:
    """Return the bytes of the integers in a payload."""
    return -(-numel * bits // 8)


def quantize_blocks(numbers: Tensor, payload: Tensor, bits: int, block: int) -> None:
    """Round to the nearest of the 2**bits - 1 multiples of a scale that cover the range of the block.

    The error of a number is at most half a scale.
    """
    for row in _rows_of(numbers):
        _quantize_row(numbers[row], payload[row], bits, block)


def _rows_of(rows: Tensor) -> Iterator[tuple[int, ...]]:
    return product(*map(range, rows.shape[:-1]))


def _quantize_row(numbers: Tensor, payload: Tensor, bits: int, block: int) -> None:
    values = payload[: value_bytes(numbers.numel(), bits)].view(torch.int8)
    scales = torch.empty(-(-numbers.numel() // block), dtype=torch.float32, device=numbers.device)
    for part in _pieces(numbers, bits, block):
        rows = _blocks_of(numbers[part.numbers], block)
        scales[part.scales] = of_rows = _scales_of(rows, 2 ** (bits - 1) - 1)
        rows.div_(of_rows[:, None]).round_().nan_to_num_(0)  # of 0 / 0 as well
        integers = rows.to(torch.int8).flatten()[: numbers[part.numbers].numel()]
        values[part.integers] = integers if bits == 8 else _pack(integers)
    payload[values.numel() :] = scales.view(torch.uint8)


def dequantize_blocks(payload: Tensor, out: Tensor, bits: int, block: int, add: bool) -> None:
    """Write the payload's numbers to `out`, or add them to `out`.

    The terms of a row, for which `out` must be fp32, are added in order.
    """
    terms = payload if payload.dim() > out.dim() else payload[None]
    for row in _rows_of(out):
        for number, term in enumerate(terms):
            _dequantize_row(term[row], out[row], bits, block, add or number > 0)


def _dequantize_row(payload: Tensor, out: Tensor, bits: int, block: int, add: bool) -> None:
    size = value_bytes(out.numel(), bits)
    values, scales = payload[:size].view(torch.int8), payload[size:].clone().view(torch.float32)
    for part in _pieces(out, bits, block):
        target = out[part.numbers]
        integers = values[part.integers]
        integers = integers if bits == 8 else _unpack(integers)[: target.numel()]
        rows = _blocks_of(integers, block).mul_(scales[part.scales, None])
        numbers = rows.flatten()[: target.numel()]
        if add:
            target.add_(numbers)
        else:
            target.copy_(numbers)


def _pieces(numbers: Tensor, bits: int, block: int) -> Iterator[Part]:
    at_once = PIECE.get(numbers.device.type, PIECE_ON_DEVICE)
    step = max(1, at_once // (2 * block)) * 2 * block  # even, so that no byte is cut
    for low in range(0, numbers.numel(), step):
        high = min(low + step, numbers.numel())
        integers = slice(low * bits // 8, value_bytes(high, bits))
        yield Part(slice(low, high), integers, slice(low // block, -(-high // block)))


def _blocks_of(flat: Tensor, block: int) -> Tensor:
    """Return an fp32 copy with a row for each block, the last one padded with zeros."""
    blocks = -(-flat.numel() // block)
    rows = torch.empty(blocks * block, dtype=torch.float32, device=flat.device)
    rows[: flat.numel()] = flat
    rows[flat.numel() :] = 0
    return rows.view(blocks, block)


def _scales_of(rows: Tensor, largest: int) -> Tensor:
    """Return scales that map each row's largest size to `largest`; 0 for zeros, NaN for non-finite rows."""
    reach = rows.abs().amax(dim=1)
    # Above subnormal numbers, and below scales with which the largest integer decodes to inf.
    scales = reach.div(largest).clamp_(FINITE.tiny, FINITE.max / largest * (1 - FINITE.eps))
    return scales.masked_fill_(reach == 0, 0).masked_fill_(~reach.isfinite(), float("nan"))


def _pack(integers: Tensor) -> Tensor:
    packed, high = integers[0::2] & 15, integers[1::2]
    packed[: high.numel()] |= high << 4
    return packed


def _unpack(packed: Tensor) -> Tensor:
    """Unpack the two integers in each byte. The right shift extends the sign."""
    return torch.stack((packed << 4 >> 4, packed >> 4), dim=1).flatten()
