"""The CUDA operators in use on a GPU: large tensors, streams, threads, devices, graphs, a sanitizer."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import samples
from tests.gpu.day import sanitizer
from tests.gpu.samples import (
    CHUNK,
    CPU,
    GPU,
    Blocks,
    Outcome,
    Sample,
    Types,
    assert_same_bits,
    changed,
    check,
    flat,
    placed,
    run,
)
from tests.kernels.cases import BF16, NAN, normal
from tests.kernels.optimizing import ALIGNED
from zero_full.kernels import ops
from zero_full.kernels.reference import payload_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CYCLES = 200_000_000  # of a GPU: about 0.1 s, in which nobody else may begin

# Large tensors -----------------------------------------------------------------------------------

PATTERN = 489 * 2048  # elements, whole blocks of 2048: what a large tensor repeats
LARGE = 2**31  # bytes, of which it has more


def repeated(pattern: Tensor) -> Tensor:
    times = LARGE // (PATTERN * pattern.element_size()) + 1
    return pattern.to(GPU).repeat(times)


def room_for(gigabytes: float) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes:.0f} GiB of free memory on the device")


def assert_repeats(large: Tensor, pattern: Tensor) -> None:
    assert bool((large.view(-1, len(pattern)) == pattern.to(GPU)).all())


def test_adam_on_more_than_two_gibibytes_is_adam_on_each_part(compiled: Any) -> None:
    room_for(14)
    small = samples.adam_step([PATTERN], Types(BF16, BF16, BF16, BF16), ALIGNED)
    large = changed(lambda t: t.to(GPU) if t.dim() == 0 else repeated(t), small.tensors)
    tensors = placed(small, GPU)
    for each in (tensors, large):
        compiled.adam_step(*each, **small.options)
    for mine, pattern in zip(large, tensors, strict=True):
        if mine[0].dim():
            assert_repeats(mine[0], pattern[0])


def test_the_last_of_more_than_two_gibibytes_of_gradients_counts(compiled: Any) -> None:
    room_for(6)
    gradient = torch.ones(LARGE // 2 + CHUNK + 3, dtype=BF16, device=GPU)
    gradient[-1] = 3
    total, first = compiled.unscale_norm_check([gradient], 0.5)
    assert (float(total), int(first)) == ((gradient.numel() - 1 + 9) / 4, -1)
    assert float(gradient[-1]) == 1.5 and bool((gradient[:-1] == 0.5).all())
    gradient[-1] = NAN
    assert int(compiled.unscale_norm_check([gradient], 1.0)[1]) == gradient.numel() - 1


def test_signs_of_more_than_two_gibibytes(compiled: Any) -> None:
    room_for(8)
    pattern = normal(PATTERN)
    error = repeated(pattern)
    ends = torch.arange(PATTERN, error.numel() + 1, PATTERN, device=GPU)
    small = Sample("sign_pack", (None, pattern, torch.tensor([PATTERN])), {"l1": True})
    want = samples.call(small, GPU)
    packed, scales = compiled.sign_pack(None, error, ends, True)
    assert_repeats(packed, want.results[0])
    torch.testing.assert_close(scales.cpu(), want.results[1].expand(len(scales)), rtol=1.2e-7, atol=0)
    off = error.view(-1, PATTERN).sub_(want.tensors[0].to(GPU)).abs_().max()
    assert float(off) <= 1e-6
    compiled.sign_unpack_mean(packed[None], torch.ones_like(scales)[None], ends, error, False)
    assert_repeats(error, (pattern >= 0).float() * 2 - 1)


@pytest.mark.parametrize("width", [4, 8])
def test_blocks_of_more_than_two_gibibytes(compiled: Any, width: int) -> None:
    room_for(10)
    small = samples.quantize(PATTERN, BF16, Blocks(width, 2048, 0), 0)
    numbers = repeated(small.tensors[0])
    payload = torch.empty(payload_bytes(numbers.numel(), width, 2048), dtype=torch.uint8, device=GPU)
    compiled.quantize_blocks(numbers, payload, width, 2048)
    want = samples.call(small, GPU).tensors[1]
    integers = PATTERN * width // 8
    parts = [integers, len(want) - integers]
    times = numbers.numel() // PATTERN
    for mine, pattern in zip(payload.split([times * part for part in parts]), want.split(parts), strict=True):
        assert_repeats(mine, pattern)
    back = Sample("dequantize_blocks", (want, small.tensors[0]), {**small.options, "add": False})
    compiled.dequantize_blocks(payload, numbers, width, 2048, False)
    assert_repeats(numbers, samples.call(back, GPU).tensors[1])


# Streams, threads, devices -----------------------------------------------------------------------


def test_work_is_queued_on_the_current_stream(sample: Sample) -> None:
    """Its arguments come late: who begins earlier, on another stream, sees zeros, and is written over."""
    run(sample, placed(sample, GPU))  # what is loaded at first use takes long
    given = placed(sample, GPU)
    tensors = changed(torch.zeros_like, given)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        for target, source in zip(flat(tensors), flat(given), strict=True):
            target.copy_(source, non_blocking=True)
        results = run(sample, tensors)
        assert not stream.query(), "the operator has waited for the device"
        got = Outcome(*([each.cpu() for each in some] for some in (flat(tensors), results)))
    samples.assert_same(sample, got, samples.call(sample, CPU))


def test_another_thread_may_call_it(sample: Sample) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(check, sample).result()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_the_second_device_works_while_the_first_is_current(sample: Sample) -> None:
    got = samples.call(sample, torch.device("cuda:1"))
    samples.assert_same(sample, got, samples.call(sample, CPU))
    assert torch.cuda.current_device() == 0


def test_a_call_that_is_captured_in_a_graph_does_the_same_when_it_is_replayed(sample: Sample) -> None:
    eager, captured = placed(sample, GPU), placed(sample, GPU)
    run(sample, placed(sample, GPU))  # what is loaded at first use cannot be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(sample, captured)
    assert_same_bits(flat(captured), flat(sample.tensors))  # nothing has run yet
    for _ in range(2):
        graph.replay()
        expected = run(sample, eager)
        assert_same_bits([*flat(captured), *results], [*flat(eager), *expected])


def test_steps_of_adam_go_on_inside_a_graph(compiled: Any) -> None:
    sample = samples.adam_step([50_001, 3])
    eager, captured = placed(sample, GPU), placed(sample, GPU)

    def step(tensors: Any) -> None:
        for number in tensors[4]:
            number.add_(1)
        compiled.adam_step(*tensors, **sample.options)

    step(placed(sample, GPU))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured)
    for _ in range(3):
        graph.replay()
        step(eager)
    assert float(captured[4][0]) == float(sample.tensors[4][0]) + 3
    assert_same_bits(flat(captured), flat(eager))


@pytest.mark.parametrize("operator", ops.SCHEMAS)
def test_two_runs_give_the_same_bits(operator: str) -> None:
    sample = samples.one_of_each(3_000_001)[operator]
    first, second = (samples.call(sample, GPU) for _ in range(2))
    assert_same_bits(first.tensors + first.results, second.tensors + second.results)


# Mistakes ----------------------------------------------------------------------------------------


def test_a_tensor_on_another_device_is_refused(compiled: Any) -> None:
    sample = samples.adam_step([9])
    tensors = placed(sample, GPU)
    tensors[4] = [step.cpu() for step in tensors[4]]
    with pytest.raises(RuntimeError, match="steps must be on the device of the rest"):
        compiled.adam_step(*tensors, **sample.options)


def test_torch_finds_nothing_wrong_with_the_operator(sample: Sample) -> None:
    operator = getattr(torch.ops.zero_full, sample.operator)
    torch.library.opcheck(operator, tuple(placed(sample, GPU)), sample.options)


@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    program = sanitizer.program()
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    errors, output = sanitizer.run(program, tool)
    assert errors == 0, output
