"""Checks whose size is an argument: large tensors on a GPU; small ones on the CPU, which tests the checks.

A large tensor is a pattern again and again, so what must come out of it can be compared quickly.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.gpu import samples
from tests.gpu.samples import Blocks, Sample, Types, changed, placed
from tests.kernels.cases import BF16, NAN, normal
from tests.kernels.optimizing import ALIGNED
from zero_full.kernels import reference
from zero_full.kernels.files import BlockIO, aligned_empty
from zero_full.kernels.reference import payload_bytes

BLOCK = 2048
PATTERN = 489 * BLOCK  # elements: not a power of two, and whole blocks


def repeated(pattern: Tensor, least: int, device: torch.device) -> Tensor:
    """At least so many elements."""
    return pattern.to(device).repeat(least // pattern.numel() + 1)


def assert_repeats(large: Tensor, pattern: Tensor) -> None:
    rows, like = large.view(-1, len(pattern)), pattern.to(large.device)
    for some in rows.split(64):  # a comparison has a byte for each element
        assert bool((some == like).all())


def check_adam(ops: Any, device: torch.device, least: int, pattern: int = PATTERN) -> None:
    """All in bf16: 10 bytes an element."""
    small = samples.adam_step([pattern], Types(BF16, BF16, BF16, BF16), ALIGNED)
    tensors = placed(small, device)
    large = changed(lambda t: t.to(device) if t.dim() == 0 else repeated(t, least, device), small.tensors)
    for each in (tensors, large):
        ops.adam_step(*each, **small.options)
    for mine, like in zip(large, tensors, strict=True):
        if mine[0].dim():
            assert mine[0].numel() > least
            assert_repeats(mine[0], like[0])


def check_unscale(ops: Any, device: torch.device, least: int) -> None:
    """bf16: 2 bytes an element, and one more for a comparison."""
    gradient = torch.ones(least + samples.CHUNK + 3, dtype=BF16, device=device)
    gradient[-1] = 3
    total, first = ops.unscale_norm_check([gradient], 0.5)
    assert (float(total), int(first)) == ((gradient.numel() - 1 + 9) / 4, -1)
    assert float(gradient[-1]) == 1.5 and bool((gradient[:-1] == 0.5).all())
    gradient[-1] = NAN
    assert int(ops.unscale_norm_check([gradient], 1.0)[1]) == gradient.numel() - 1


def check_signs(ops: Any, device: torch.device, least: int, pattern: int = PATTERN) -> None:
    """Two fp32 arrays at a time: 8 bytes an element."""
    numbers = normal(pattern)
    error = repeated(numbers, least, device)
    ends = torch.arange(pattern, error.numel() + 1, pattern, device=device)
    small = Sample("sign_pack", (None, numbers, torch.tensor([pattern])), {"l1": True})
    want = samples.call(small, device, ops)
    packed, scales = ops.sign_pack(None, error, ends, True)
    assert_repeats(packed, want.results[0])
    torch.testing.assert_close(scales.cpu(), want.results[1].expand(len(scales)), rtol=1.2e-7, atol=0)
    off = error.view(-1, pattern).sub_(want.tensors[0].to(device)).abs_().max()
    assert float(off) <= 1e-6
    ops.sign_unpack_mean(packed[None], torch.ones_like(scales)[None], ends, error, False)
    assert_repeats(error, (numbers >= 0).float() * 2 - 1)


def check_blocks(ops: Any, device: torch.device, width: int, least: int, pattern: int = PATTERN) -> None:
    """bf16 and integers: 3 bytes an element."""
    small = samples.quantize(pattern, BF16, Blocks(width, BLOCK, 0), 0)
    numbers = repeated(small.tensors[0], least, device)
    payload = torch.empty(payload_bytes(numbers.numel(), width, BLOCK), dtype=torch.uint8, device=device)
    ops.quantize_blocks(numbers, payload, width, BLOCK)
    want = samples.call(small, device, ops).tensors[1]
    integers, times = pattern * width // 8, numbers.numel() // pattern
    parts = [integers, len(want) - integers]
    for mine, like in zip(payload.split([times * part for part in parts]), want.split(parts), strict=True):
        assert_repeats(mine, like)
    back = Sample("dequantize_blocks", (want, small.tensors[0]), {**small.options, "add": False})
    ops.dequantize_blocks(payload, numbers, width, BLOCK, False)
    assert_repeats(numbers, samples.call(back, device, ops).tensors[1])


def check_rows(ops: Any, device: torch.device, rows: int, numel: int, width: int) -> None:
    """Rows whose payloads begin at any multiple of 4 bytes, as slices on the wire do that nobody fills up."""
    flat = normal(rows * 2 * numel).to(BF16).view(rows, 2, numel)
    used = payload_bytes(numel, width, 64)
    size = used + (4 - used) % 8  # 4, or 12, and so on

    def run(kind: Any, where: torch.device) -> list[Tensor]:
        there = flat.to(where).transpose(0, 1)  # row (i, j) lies where (j, i) is
        payload = torch.zeros(2, rows, size, dtype=torch.uint8, device=where)
        kind.quantize_blocks(there, payload[..., :used], width, 64)
        back, total = (
            torch.zeros_like(flat, device=where).transpose(0, 1),
            torch.ones(rows, numel, device=where),
        )
        kind.dequantize_blocks(payload[..., :used], back, width, 64, False)
        kind.dequantize_blocks(payload[..., :used], total, width, 64, True)
        return [each.cpu() for each in (payload, back, total)]

    for mine, wanted in zip(run(ops, device), run(reference, torch.device("cpu")), strict=True):
        assert torch.equal(mine, wanted)


def check_pinned(directory: Path, device: torch.device, numel: int, give_event: bool) -> None:
    """What a device is still copying to pinned memory is in the file; what is read arrives on the device."""
    with BlockIO() as io:
        there = torch.arange(numel, dtype=torch.int32, device=device)
        room = aligned_empty(numel, torch.int32, pin=True).zero_()
        event = None
        if device.type == "cuda":
            assert room.is_pinned()
            torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
            room.copy_(there, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            room.copy_(there)
        transfer = io.write(directory / "file", room, after=event if give_event else None)
        transfer.wait()
        back = aligned_empty(numel, torch.int32, pin=True).zero_()
        io.read(directory / "file", back).wait()
        assert torch.equal(back.to(device, non_blocking=True), there)


def check_first_use_inside_a_graph(ops: Any, sample: Sample) -> None:
    """Nothing of the operator has run in this process; its kernels are loaded while they are captured."""
    device = torch.device("cuda")
    eager, captured = placed(sample, device), placed(sample, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = samples.flat(getattr(ops, sample.operator)(*captured, **sample.options))
    graph.replay()
    expected = samples.flat(getattr(ops, sample.operator)(*eager, **sample.options))
    samples.assert_same_bits([*samples.flat(captured), *results], [*samples.flat(eager), *expected])
