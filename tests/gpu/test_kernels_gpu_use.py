"""The CUDA operators in use on a GPU: large tensors, streams, threads, devices, graphs, a sanitizer."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import large, samples
from tests.gpu.day import sanitizer
from tests.gpu.samples import (
    CPU,
    GPU,
    Outcome,
    Sample,
    assert_same_bits,
    changed,
    check,
    flat,
    placed,
    run,
)
from tests.kernels.cases import normal
from zero_full.kernels import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CYCLES = 200_000_000  # of a GPU: about 0.1 s, in which nobody else may begin

# Sizes that are arguments ------------------------------------------------------------------------

BYTES, ELEMENTS = 2**31, 2**31  # of which a large tensor has more


def room_for(gigabytes: float) -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes:.0f} GiB of free memory on the device")


@pytest.mark.parametrize("least", [BYTES // 2, ELEMENTS])
def test_adam_on_a_large_tensor_is_adam_on_each_part(compiled: Any, least: int) -> None:
    room_for(13 * least / 2**30)
    large.check_adam(compiled, GPU, least)


@pytest.mark.parametrize("least", [BYTES // 2, ELEMENTS])
def test_the_last_of_many_gradients_counts(compiled: Any, least: int) -> None:
    room_for(5 * least / 2**30)
    large.check_unscale(compiled, GPU, least)


@pytest.mark.parametrize("least", [BYTES // 4, ELEMENTS])
def test_signs_of_a_large_tensor(compiled: Any, least: int) -> None:
    room_for(14 * least / 2**30)
    large.check_signs(compiled, GPU, least)


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("least", [BYTES // 2, ELEMENTS])
def test_blocks_of_a_large_tensor(compiled: Any, width: int, least: int) -> None:
    room_for(7 * least / 2**30)
    large.check_blocks(compiled, GPU, width, least)


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("numel", [1000, 4096, 4097])
def test_slices_that_begin_at_4_of_8_bytes(compiled: Any, width: int, numel: int) -> None:
    for rows in (1, 7, 64):
        large.check_rows(compiled, GPU, rows, numel, width)


@pytest.mark.parametrize("give_event", [False, True])
@pytest.mark.parametrize("numel", [1000, 2**20 + 3])
def test_pinned_memory_that_is_still_being_filled(tmp_path: Path, numel: int, give_event: bool) -> None:
    large.check_pinned(tmp_path, GPU, numel, give_event)


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


def test_each_operator_may_be_used_for_the_first_time_inside_a_graph() -> None:
    code = (
        "from tests.gpu import large, samples; from zero_full.kernels.load import operators\n"
        "for name, sample in samples.one_of_each(50_001).items():\n"
        "    large.check_first_use_inside_a_graph(operators(samples.GPU), sample); print(name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ZERO_FULL_KERNELS": "all"},
        cwd=sanitizer.ROOT,
        capture_output=True,
        text=True,
        timeout=sanitizer.SECONDS,
    )
    assert done.stdout.split() == [*ops.SCHEMAS], done.stderr[-3000:]


@pytest.mark.parametrize("ends", [[3, 2, 9], [0, 10], [-1, 9]])
def test_wrong_ends_are_refused_by_who_may_look_at_them(
    compiled: Any, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO_FULL_CHECK_ENDS", "1")
    with pytest.raises(RuntimeError, match="ends must ascend from 0 to 9 at most"):
        compiled.sign_pack(None, normal(9).to(GPU), torch.tensor(ends, device=GPU), True)
