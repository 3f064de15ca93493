"""The recorder of lesson 11 on a CPU, and what a recording says of itself."""

import json
import re
from typing import Any

import pytest
import torch

from lessons import __main__ as cli
from lessons import gpu_report, one_gpu
from lessons.registry import ROOT

SMALL = one_gpu.Size(layers=2, width=32, context=16, rows=1, world=2, bucket_size=2**12)


@pytest.fixture(scope="module")
def made() -> Any:
    """A small recording of this machine's CPU, as a reader of the file has it."""
    return json.loads(json.dumps(one_gpu.record(torch.device("cpu"), SMALL)))


def test_every_part_is_recorded_and_says_that_it_was_a_cpu(made: Any) -> None:
    assert made["failures"] == {}
    assert "on a CPU, not on a GPU" in gpu_report.whose(made)
    assert "no GPU was recorded" in gpu_report.report(made)
    assert "on a CPU, not on a GPU" in gpu_report.timeline(made).alt
    assert "on a CPU, not on a GPU" in gpu_report.over_time(made).alt


def test_what_the_tensors_hold_and_send_is_the_formula_s(made: Any) -> None:
    for stage in (0, 1, 2):
        part = made[f"bytes {stage}"]
        assert part["held"] == [part["formula"]] * 2
        assert sum(part["sent"]) == part["formula sent"]


def test_bytes_over_time_begin_and_end_with_what_is_held(made: Any) -> None:
    for stage in (1, 2):
        part, held = made[f"over time {stage}"], made[f"bytes {stage}"]["formula"]
        first, last = (
            dict(zip(part["kinds"], row[1:], strict=True)) for row in (part["curve"][0], part["curve"][-1])
        )
        for kind in ("parameters", "optimizer"):
            assert first[kind] == last[kind] == 2 * held[kind] // 1024
        assert last["gradients"] == 2 * held["gradients"] // 1024 and last["forward"] == 0
        assert max(row[1 + part["kinds"].index("forward")] for row in part["curve"]) > 0


def test_each_rank_s_phases_are_in_the_trace_and_buckets_in_the_backward(made: Any) -> None:
    trace = made["trace 2"]
    for rank in range(2):
        spans = [(trace["phases"][phase], a, a + d) for a, d, who, phase in trace["spans"] if who == rank]
        ((_, begin, end),) = [span for span in spans if span[0] == "backward"]
        buckets = [span for span in spans if span[0] == "bucket"]
        assert len(buckets) >= 2 and all(begin <= a and b <= end + 2 for _, a, b in buckets)


def test_a_part_that_fails_is_named_and_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError(f"no such thing in {ROOT}/lessons")

    for name in ("bytes_of", "over_time", "traced"):
        monkeypatch.setattr(one_gpu, name, broken)
    found = one_gpu.record(torch.device("cpu"), SMALL)
    assert found["failures"]["trace 2"] == "RuntimeError: no such thing in ./lessons"
    assert "missing" in found["snapshot 2"]


def test_events_of_torch_s_snapshot_are_read() -> None:
    frames = [{"filename": "/x/torch/a.py", "name": "f", "line": 1}]
    frames += [{"filename": "/x/zero_min/gpt.py", "name": "forward", "line": 41}]
    history = [
        {"action": "segment_alloc", "addr": 0, "size": 2**21, "time_us": 5},
        {"action": "alloc", "addr": 1, "size": 4096, "time_us": 5, "frames": []},
        {"action": "alloc", "addr": 2, "size": 2048, "time_us": 15, "frames": frames},
        {"action": "free_completed", "addr": 1, "size": 4096, "time_us": 20},
        {"action": "alloc", "addr": 3, "size": 9, "time_us": 99, "frames": []},
    ]
    found = one_gpu.read_history(history, {"start": 10, "step": 30})
    assert found["at peak"] == [("other", 4096), ("gpt.py:forward:41", 2048)]
    assert [row[0] for row in found["curve"]] == [5, 10] and found["peak"] == 6144
    assert found["history"] == {"order": [4096, 2048, -2, 9], "events": 4, "segments": [[0, 2**21]]}


def test_kernels_belong_to_the_rank_and_the_phase_that_asked_for_them() -> None:
    spans = [
        ("rank 0 backward", 100.0, 50.0, 7),
        ("rank 0 bucket", 110.0, 10.0, 7),
        ("rank 1 step", 120.0, 50.0, 8),
    ]
    events: list[dict[str, Any]] = [
        {"cat": "user_annotation", "name": name, "ts": ts, "dur": dur, "tid": tid}
        for name, ts, dur, tid in spans
    ]
    for number, (asked, thread, begun) in enumerate([(112.0, 7, 140.0), (130.0, 8, 172.0), (13.0, 8, 14.0)]):
        args = {"correlation": number, "stream": 7}
        events.append(
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": asked, "tid": thread, "args": args}
        )
        events.append(
            {"cat": "kernel", "name": "void k<int>", "ts": begun, "dur": 30.0, "tid": 7, "args": args}
        )
    found = one_gpu.read_trace(events, [7, 8])
    assert found["by rank and phase"] == {
        "rank 0 bucket": 30,
        "rank 1 step": 30,
    }  # the third is of a step before
    assert found["runs"] == [[40, 30, 0, 2, 1], [72, 30, 1, 3, 1]] and found["busy"] == 60


def test_the_project_s_recording_names_its_card_and_no_machine() -> None:
    text = gpu_report.KEPT.read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert not re.search(r"/(home|root|work|tmp|usr|opt)/", text)
    found = gpu_report.recorded()
    assert found["about"]["name"] in gpu_report.whose(found) and found["about"]["date"] in gpu_report.whose(
        found
    )


def test_the_command_shows_the_recording_where_there_is_no_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, which the command would record")
    said = one_gpu.show(None)
    assert "Torch sees no GPU on this machine. The tables above are a recording" in said
    assert gpu_report.whose(gpu_report.recorded()) in said
    assert cli.main(["gpu", "--width", "12"]) == 2
    assert "a multiple of 8" in capfd.readouterr().err
