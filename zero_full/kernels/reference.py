"""Each operator in plain torch: its meaning, the tests' oracle, and what runs where nothing is compiled.

[Note: blocks of integers] A payload holds `numel` numbers as bytes: first integers of 8 or 4 bits, then an
fp32 scale for each block of them. Four-bit integers are two to a byte, the first in the low half. A block
with a number that is not finite has the scale NaN: all of it comes out as NaN. Of more than one dimension the
last is a row, with a payload of its own, and rows may lie anywhere. One more dimension of payloads than of
numbers, the first, are terms that are added up.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

FINITE = torch.finfo(torch.float32)
PIECE = {"cpu": 2**17}  # numbers in work at a time: few enough for the cache...
PIECE_ELSEWHERE = 2**24  # ...or many enough that starting kernels costs little


# Optimizers --------------------------------------------------------------------------------------


def adam_step(
    masters: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    factor: float,
) -> None:
    """Adam on gradients times `factor`; masters are copied to `copies`, if there are any.

    A copy that is not what its master rounds to was written by somebody: the master takes its value first.
    `decoupled` is AdamW's decay. `steps` are this step's numbers, from 1. All is computed in fp32; of fp64
    masters, which no compiled operator takes, in fp64.
    """
    adam = Adam(lr, beta1, beta2, eps, weight_decay, decoupled, factor)
    for i, master in enumerate(masters):
        p = master if not copies else unless_written(master, copies[i])
        moved = adam.step(p, grads[i], exp_avgs[i], exp_avg_sqs[i], steps[i])
        for target, value in zip((master, exp_avgs[i], exp_avg_sqs[i]), moved, strict=True):
            target.copy_(value)
        if copies:
            copies[i].copy_(moved[0])


class Adam(NamedTuple):
    """Its options, and what it makes of a tensor."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    factor: float

    def step(
        self, master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The new master and moments, not yet rounded to their types; each operation as the compiled ones."""
        wide = _wide(master)
        first, second = (1 - beta ** step.double() for beta in (self.beta1, self.beta2))  # nobody waits
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
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    factor: float,
) -> None:
    """Adam whose bf16 masters, and moments if they are bf16, are rounded stochastically.

    Chance is a function of the parameter's key, the step and the element's place in the parameter, of which
    `places` has that of each tensor's first element.
    """
    adam = Adam(lr, beta1, beta2, eps, weight_decay, decoupled, factor)
    for i, kept in enumerate(zip(masters, exp_avgs, exp_avg_sqs, strict=True)):
        moved = adam.step(kept[0], grads[i], kept[1], kept[2], steps[i])
        drawn_for = draws(keys[i], steps[i], places[i], kept[0].numel())
        for target, value, drawn in zip(kept, moved, drawn_for, strict=True):
            low = target.dtype == torch.bfloat16
            target.copy_(rounded_by(value, drawn.view(value.shape)) if low else value)


WORD = 2**32 - 1
GOLDEN = 0x9E3779B9


def rounded_by(values: Tensor, drawn: Tensor) -> Tensor:
    """bf16 neighbours of fp32 numbers: the farther from zero if what is cut off and 16 drawn bits carry."""
    rounded = (values.view(torch.int32).long() + (drawn & 0xFFFF)) & 0xFFFF0000
    low = (rounded >> 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isnan(), values.bfloat16(), low)


def draws(key: int, step: Tensor, place: int, numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each element 16 bits or more for its master, its first and its second moment."""
    number = step.long() & WORD
    first = _scrambled((key & WORD) ^ _scrambled(number))
    second = _scrambled(((key >> 32 & WORD) + _scrambled(number ^ GOLDEN)) & WORD)
    places = torch.arange(place, place + numel, device=step.device)
    low, high = places & WORD, places >> 32
    drawn = _scrambled((_scrambled(low ^ first) + second + high * GOLDEN) & WORD)
    return drawn, drawn >> 16, _scrambled(drawn ^ first)


def _scrambled(x: Tensor) -> Tensor:
    """The last part of MurmurHash3, on 32-bit numbers in int64. Factors are less 2**32: nothing overflows."""
    for shift, factor in ((16, 0x85EBCA6B - 2**32), (13, 0xC2B2AE35 - 2**32)):
        x = (x ^ x >> shift) * factor & WORD
    return x ^ x >> 16


def unless_written(master: Tensor, copy: Tensor) -> Tensor:
    """The master, with the copy's value wherever the copy is not what the master rounds to."""
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
    """LAMB's first half: new moments, and for each tensor the sums of squares of it and of its update.

    Who has a part of a tensor only adds up what all parts say before `lamb_step`.
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
    """LAMB's second half: each tensor moves by `lr` times its trust ratio, the norm of it over its update's.

    The ratio is kept between the bounds, and is 1 if either norm is zero.
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
    """In what type numbers of such masters are computed."""
    return torch.promote_types(p.dtype, torch.float32)


def unscale_norm_check(gradients: Sequence[Tensor], factor: float) -> tuple[Tensor, Tensor]:
    """Multiply in place; return the sum of squares in fp64, and the first non-finite place or -1.

    Elements are counted through all tensors.
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


# One bit a number --------------------------------------------------------------------------------


def sign_pack(values: Tensor | None, error: Tensor, ends: Tensor, l1: bool) -> tuple[Tensor, Tensor]:
    """Pack the signs of `values + error`, eight to a byte, and return them with a scale for each piece.

    Pieces end at `ends`; what lies behind is padding and has the scale 0. A scale is the root mean square, or
    with `l1` the mean size. `error` becomes what scale times sign gets wrong now. Zero counts as plus; the
    last byte is filled up with zeros. `values` None: all that is wanted is in `error` already.

    A number that is not finite makes its piece's scale and errors NaN, and errors stay NaN: look for overflow
    before. `ends` must ascend and stay inside, which on a GPU is looked at only with ZERO_FULL_CHECK_ENDS=1.
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
    """Write the mean of the rows, each its signs times its scales, to `out`, or add it to what is there."""
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
    """A tensor with the scale of every element; 0 behind the last end."""
    sizes = ends.diff(prepend=ends.new_zeros(1))
    return torch.nn.functional.pad(scales.repeat_interleave(sizes), (0, numel - int(ends[-1])))


# Blocks of integers ------------------------------------------------------------------------------


class Part(NamedTuple):
    """Where a run of numbers, which begins with a block and with a byte, lies in tensor and payload."""

    numbers: slice
    integers: slice
    scales: slice


def payload_bytes(numel: int, bits: int, block: int) -> int:
    """How many bytes so many numbers become. See [Note: blocks of integers]."""
    return value_bytes(numel, bits) + 4 * -(-numel // block)


def value_bytes(numel: int, bits: int) -> int:
    """How many of these bytes are integers."""
    return -(-numel * bits // 8)


def quantize_blocks(numbers: Tensor, payload: Tensor, bits: int, block: int) -> None:
    """Round to the nearest of the 2**bits - 1 multiples of a scale that reach as far as the block does.

    No number is off by more than half a scale.
    """
    for row in _places(numbers):
        _quantize_row(numbers[row], payload[row], bits, block)


def _places(rows: Tensor) -> Iterator[tuple[int, ...]]:
    return product(*map(range, rows.shape[:-1]))


def _quantize_row(numbers: Tensor, payload: Tensor, bits: int, block: int) -> None:
    values = payload[: value_bytes(numbers.numel(), bits)].view(torch.int8)
    scales = torch.empty(-(-numbers.numel() // block), dtype=torch.float32, device=numbers.device)
    for part in _parts(numbers, bits, block):
        rows = _in_rows(numbers[part.numbers], block)
        scales[part.scales] = fitting = _fitting(rows, 2 ** (bits - 1) - 1)
        rows.div_(fitting[:, None]).round_().nan_to_num_(0)  # 0 / 0 is NaN, too
        integers = rows.to(torch.int8).flatten()[: numbers[part.numbers].numel()]
        values[part.integers] = integers if bits == 8 else _pack(integers)
    payload[values.numel() :] = scales.view(torch.uint8)


def dequantize_blocks(payload: Tensor, out: Tensor, bits: int, block: int, add: bool) -> None:
    """Write the payload's numbers to `out`, or add them to what is there.

    The terms of a row, which must be fp32 then, are added up one after the other.
    """
    terms = payload if payload.dim() > out.dim() else payload[None]
    for row in _places(out):
        for number, term in enumerate(terms):
            _dequantize_row(term[row], out[row], bits, block, add or number > 0)


def _dequantize_row(payload: Tensor, out: Tensor, bits: int, block: int, add: bool) -> None:
    size = value_bytes(out.numel(), bits)
    values, scales = payload[:size].view(torch.int8), payload[size:].clone().view(torch.float32)
    for part in _parts(out, bits, block):
        target = out[part.numbers]
        integers = values[part.integers]
        integers = integers if bits == 8 else _unpack(integers)[: target.numel()]
        rows = _in_rows(integers, block).mul_(scales[part.scales, None])
        numbers = rows.flatten()[: target.numel()]
        if add:
            target.add_(numbers)
        else:
            target.copy_(numbers)


def _parts(numbers: Tensor, bits: int, block: int) -> Iterator[Part]:
    at_once = PIECE.get(numbers.device.type, PIECE_ELSEWHERE)
    step = max(1, at_once // (2 * block)) * 2 * block  # even, so that no byte is cut
    for low in range(0, numbers.numel(), step):
        high = min(low + step, numbers.numel())
        integers = slice(low * bits // 8, value_bytes(high, bits))
        yield Part(slice(low, high), integers, slice(low // block, -(-high // block)))


def _in_rows(flat: Tensor, block: int) -> Tensor:
    """An fp32 copy with a row for each block, the last one filled up with zeros."""
    blocks = -(-flat.numel() // block)
    rows = torch.empty(blocks * block, dtype=torch.float32, device=flat.device)
    rows[: flat.numel()] = flat
    rows[flat.numel() :] = 0
    return rows.view(blocks, block)


def _fitting(rows: Tensor, largest: int) -> Tensor:
    """The scales that make each row's largest number `largest`; 0 for zeros, NaN if one is not finite."""
    reach = rows.abs().amax(dim=1)
    # Far from where numbers lose bits, and not so far that the largest integer comes back as inf.
    scales = reach.div(largest).clamp_(FINITE.tiny, FINITE.max / largest * (1 - FINITE.eps))
    return scales.masked_fill_(reach == 0, 0).masked_fill_(~reach.isfinite(), float("nan"))


def _pack(integers: Tensor) -> Tensor:
    packed, high = integers[0::2] & 15, integers[1::2]
    packed[: high.numel()] |= high << 4
    return packed


def _unpack(packed: Tensor) -> Tensor:
    """Two integers of each byte. The right shift brings the sign."""
    return torch.stack((packed << 4 >> 4, packed >> 4), dim=1).flatten()
