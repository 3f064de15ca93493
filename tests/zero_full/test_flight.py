"""`engine.record`: what every rank did, in one file, whatever the stage, and whatever becomes of the run."""

import errno
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zero_full
import zero_full.flight.timeline as timeline
from tests.recordings import events, hang, part, steps_of
from tests.worlds import POOL, run_each
from tests.zero_full.runs import Net, config, data
from zero_full.__main__ import main
from zero_full.errors import RecordingError
from zero_full.flight.black_box import BlackBox
from zero_full.flight.picture import open_recording, picture
from zero_full.flight.rank_files import FORMAT, folders_of, read_parts
from zero_full.flight.timeline import merge, newest, offsets, recording_of
from zero_full.shard.access.held_bytes import bytes_behind

Recording = dict[str, Any]
ON_HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
RECORDED: list[tuple[int, int, dict[str, Any]]] = [  # ranks, stage, keys
    (3, 0, {}),
    (3, 1, {"gradient_accumulation_steps": 2}),
    (3, 2, {"bf16": {"enabled": True}, "gradient_clipping": 1.0}),
    (3, 2, {"zero_optimization": {"overlap_comm": True}, "gradient_accumulation_steps": 2}),
    (3, 2, ON_HOST),
    (3, 3, {"zero_optimization": {"stage3_param_persistence_threshold": 0, "overlap_comm": True}}),
    (3, 3, {"zero_optimization": {"zero_quantized_weights": True, "zero_quantized_gradients": True}}),
    (3, 0, {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}}}),
]


def engine_of(stage: int = 1, **keys: Any) -> zero_full.Engine:
    return zero_full.initialize(model=Net(), config=config(stage, **keys))[0]


def train(engine: zero_full.Engine, steps: int = 1, rank: int = 0, plain: bool = False) -> None:
    dtype = next(engine.module.parameters()).dtype
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(data(step, micro, rank, dtype))
            loss.backward() if plain else engine.backward(loss)
            engine.step()


def record(comm: Any, folder: str, stage: int, keys: dict[str, Any]) -> tuple[Recording, int, dict[str, int]]:
    """Three steps, of which the last two are kept; what this rank has sent in them, and what it holds."""
    engine = engine_of(stage, **keys)
    path = Path(folder, "step.json")
    with engine.record(path, steps=2):
        train(engine, 1, comm.rank)
        before = sum(engine.traffic().values())
        train(engine, 2, comm.rank, plain=engine.gradient_accumulation_steps() == 1)
        sent = sum(engine.traffic().values()) - before
        held = {kind: bytes_behind(tensors) for kind, tensors in engine.optimizer.holdings().items()}
        assert engine.recorder is not None and engine.recorder.held_bytes.now() == held
    dist.barrier()
    engine.destroy()
    return json.loads(path.read_text()), sent, held


def test_a_recording_has_every_rank_and_what_it_has_sent_and_held(tmp_path: Path) -> None:
    cases = [(str(tmp_path / str(number)), *each[1:]) for number, each in enumerate(RECORDED)]
    for case, by_rank in zip(RECORDED, run_each(record, 3, cases), strict=True):
        recording = by_rank[0][0]
        frames = recording["frames"]
        assert recording["present"] == [0, 1, 2] and recording["ended"] == ["closed"] * 3, case
        assert recording["dropped"]["steps"] == 1 and {frame["step"] for frame in frames} == {2, 3}, case
        assert not recording["unaligned"] and not [f for f in frames if f["missing"] or f["failed"]], case
        passes = [frame["what"] for frame in frames if frame["what"] in ("forward", "backward", "step")]
        micro = case[2].get("gradient_accumulation_steps", 1)
        assert sorted(passes) == sorted((["forward", "backward"] * micro + ["step"]) * 2), case
        for rank, (_, sent, held) in enumerate(by_rank):
            assert sum(frame["sent"][rank] for frame in frames if frame["sent"]) == sent, (case, rank)
            assert frames[-1]["title"] == "After step 3" and frames[-1]["live"][rank] == sum(held.values()), (
                case
            )
        assert max(map(len, picture(recording, moments=True))) <= 80


def test_nobody_leaves_a_collective_before_the_last_has_come(tmp_path: Path) -> None:
    """Once clocks are brought together, of which each has begun at another moment."""
    ((recording, _, _), *_) = run_each(record, 3, [(str(tmp_path), 2, {})])[0]
    calls = [frame for frame in recording["frames"] if frame["last"] is not None]
    assert len(calls) > 8
    apart = sorted(min(frame["end"]) - max(frame["start"]) for frame in calls)
    assert apart[len(apart) // 2] > 0 and apart[0] > -5000  # microseconds; one may have been held up


def stuck(comm: Any, path: str) -> str:
    """The last rank stays away from a backward pass until the others have given up."""
    engine = engine_of(2)
    engine.record(path)
    train(engine, 1, comm.rank)
    if comm.rank == 2:
        while not Path(path).exists():
            time.sleep(0.05)
        return "was away"
    try:
        train(engine, 1, comm.rank)
    except zero_full.CommunicationError as error:
        return str(error)
    return "nothing was said"


def test_a_collective_that_times_out_leaves_a_picture_of_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hang.json"
    said = POOL.run(stuck, 3, str(path), collective=2)
    assert said[2] == "was away" and all("timed out" in each for each in said[:2])
    assert main(["replay", str(path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Ranks 0 and 1 wait for rank 2. Rank 2 has not come, and was last seen after" in told
    assert "It failed: RuntimeError: timed out: rank 2 has not come within 2 s." in told
    frame = next(f for f in json.loads(path.read_text())["frames"] if f["missing"])
    assert frame["missing"] == [2] and frame["waited"][2] == 0 and min(frame["waited"][:2]) > 1.5e6


def test_a_recording_may_begin_and_end_in_the_middle_of_a_step(tmp_path: Path) -> None:
    engine = engine_of(2, gradient_accumulation_steps=2)
    loss = engine(data(0, 0, 0))
    with engine.record(tmp_path / "new folder" / "a.json", steps=1) as recorder:
        engine.backward(loss)
        engine.step()
    assert recorder.closed and engine.optimizer.communicators.traffic.listener is None
    frames = json.loads((tmp_path / "new folder" / "a.json").read_text())["frames"]
    assert [frame["what"] for frame in frames] == ["backward"]  # of a forward nobody knows the beginning
    assert not folders_of(tmp_path / "new folder" / "a.json")
    engine.destroy()


def test_a_forward_that_fails_ends_there(tmp_path: Path) -> None:
    path, engine = tmp_path / "a.json", engine_of()
    with engine.record(path):
        with pytest.raises(RuntimeError):
            engine(data(0, 0, 0)[:, 1:])
        time.sleep(0.1)
        train(engine)
    frames = [f for f in json.loads(path.read_text())["frames"] if f["what"] == "forward"]
    assert len(frames) == 2 and frames[0]["end"][0] - frames[0]["start"][0] < 50_000  # microseconds
    engine.destroy()


def test_a_rank_whose_part_is_merged_while_it_ends_raises_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, path, close = engine_of(), tmp_path / "a.json", BlackBox._close

    def close_while_another_rank_merges(box: BlackBox) -> None:
        close(box)
        merge(path)  # all ranks have ended: it removes their folder

    monkeypatch.setattr(BlackBox, "_close", close_while_another_rank_merges)
    recorder = engine.record(path)
    train(engine)
    recorder._fail("the ranks make different collectives")
    assert recorder.closed and path.exists() and not folders_of(path)
    engine.destroy()


def test_one_recording_at_a_time_and_a_new_one_takes_the_place_of_an_old(tmp_path: Path) -> None:
    path, engine = tmp_path / "a.json", engine_of()
    recorder = engine.record(path)
    with pytest.raises(RuntimeError, match=r"already records into .*a\.json"):
        engine.record(tmp_path / "b.json")
    train(engine, 2)
    recorder.close()
    with engine.record(str(path)):
        train(engine)
    assert {frame["step"] for frame in json.loads(path.read_text())["frames"]} == {3}
    train(engine)
    recorder.close()  # once more
    engine.destroy()


def record_twice(comm: Any, folder: str) -> None:
    """Rank 0 begins the next recording into the path while rank 1 merges the last one."""
    path, ended, next_began = (Path(folder, name) for name in ("a.json", "ended", "next began"))

    def wait_for(file: Path) -> None:
        while not file.exists():
            time.sleep(0.01)

    def newest_slowly(folder: Path) -> int:
        found = newest(folder)
        if any(folder.parent.glob(".a.json.*")):  # the merge looks a second time, then replaces and deletes
            ended.touch()
            wait_for(next_began)
        return found

    engine = engine_of()
    first = engine.record(path)
    train(engine, 1, comm.rank)
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            dist.barrier()
            patch.setattr(timeline, "newest", newest_slowly)
            first.close()
        else:
            first.close()
            dist.barrier()
            wait_for(ended)
    second = engine.record(path)
    next_began.touch()
    train(engine, 1, comm.rank)
    second.close()
    dist.barrier()
    engine.destroy()


def test_a_rank_that_merges_leaves_the_next_recording_of_the_path_alone(tmp_path: Path) -> None:
    POOL.run(record_twice, 2, str(tmp_path), collective=10)
    recording = json.loads((tmp_path / "a.json").read_text())
    assert recording["present"] == [0, 1] and recording["ended"] == ["closed"] * 2
    assert {frame["step"] for frame in recording["frames"]} == {2} and not recording["unaligned"]
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("a.json")] == ["a.json"]


def test_where_nothing_can_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine = engine_of()
    for path in (tmp_path / "file" / "a.json", tmp_path):
        with pytest.raises(OSError):
            engine.record(path)
    assert engine.optimizer.communicators.traffic.listener is None and engine.recorder is None
    with pytest.raises(ValueError, match="at least 1, not 0"):
        engine.record(tmp_path / "a.json", steps=0)
    train(engine)
    engine.destroy()


def test_a_disk_that_fills_up_ends_the_recording_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = engine_of()
    engine.record(tmp_path / "a.json")
    train(engine)
    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        train(engine, 2)
    assert caplog.text.count("No space left on device): it ends here") == 1
    monkeypatch.undo()
    engine.destroy()
    recording = merge(tmp_path / "a.json")
    assert {frame["step"] for frame in recording["frames"]} == {1} and recording["ended"] == [""]


def test_the_key_records_from_the_start_to_destroy(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    engine = engine_of(1, debug={"record": str(path), "record_steps": 2})
    train(engine, 4)
    assert not path.exists()
    engine.destroy()
    recording = json.loads(path.read_text())
    assert {frame["step"] for frame in recording["frames"]} == {3, 4} and recording["dropped"]["steps"] == 2
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        engine_of(1, debug={"record": str(path)})


def on_one_rank(comm: Any, path: str) -> str:
    keys = {"debug": {"record": path}} if comm.rank == 0 else {}
    with pytest.raises(zero_full.DisagreementError) as error:
        engine_of(1, **keys)
    return str(error.value)


def test_the_key_on_one_rank_only_is_refused_on_all(tmp_path: Path) -> None:
    for said in POOL.run(on_one_rank, 2, str(tmp_path / "a.json"), collective=10):
        assert "debug.record" in said and "no path" in said


# What is left on disk ------------------------------------------------------------------------------


def test_files_are_bounded_and_say_what_they_have_dropped(tmp_path: Path) -> None:
    path, rounds = tmp_path / "a.json", 70_000
    stream = BlackBox(path, 0, part(0).about, steps=1000)
    sizes = []
    for number in range(rounds):
        stream.write({"n": number, "t": number, "what": "sum", "name": "x", "held": {"parameters": 1}})
        stream.write({"n": number, "t": number})
        if number % 1000 == 0:
            sizes.append(sum(each.stat().st_size for each in stream.folder.iterdir()))
    assert max(sizes[45:]) <= 1.1 * max(sizes[:45])
    (left,) = read_parts(stream.folder)
    assert 20_000 <= len(left.events) <= 40_000
    assert left.dropped_events + len(left.events) == rounds
    stream.finish("closed")


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    stream = BlackBox(tmp_path / "a.json", 0, part(0).about, steps=2)
    stream.write({"n": 0, "t": 5, "what": "sum", "name": "x"})
    file = next(each for each in stream.folder.iterdir() if each.stat().st_size)
    file.write_bytes(file.read_bytes() + b'{"n": 1, "t": 7, "wha')
    (left,) = read_parts(stream.folder)
    assert [each.name for each in left.events] == ["x"] and left.ended == ""


def test_what_an_earlier_run_has_left_is_not_mixed_in(tmp_path: Path) -> None:
    other = BlackBox(tmp_path / "a.json.b", 0, {**part(0).about, "run": "3"}, steps=2)
    for rank, run in ((0, "1"), (1, "1"), (0, "2")):
        box = BlackBox(tmp_path / "a.json", rank, {**part(rank).about, "run": run}, steps=2)
        box.write({"n": 0, "t": 1, "what": "sum"})
    assert merge(tmp_path / "a.json")["present"] == [0]
    assert folders_of(tmp_path / "a.json") == [box.folder] and other.folder.exists()
    with pytest.raises(RecordingError, match="is a folder"):
        open_recording(Path())
    with pytest.raises(RecordingError, match="contains no recording"):
        read_parts(tmp_path)


def test_replay_says_what_is_no_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    for text, said in (
        (None, "there is no"),
        ("{", "cannot be read"),
        ("[]", "is not a recording"),
        (json.dumps({FORMAT: 2}), "format version 2"),
    ):
        if text is not None:
            path.write_text(text)
        with pytest.raises(SystemExit) as caught:
            main(["replay", str(path)])
        assert caught.value.code == 2 and said in capsys.readouterr().err


# All ranks together ----------------------------------------------------------------------------------


def test_clocks_are_compared_by_the_ends_of_collectives_and_through_others() -> None:
    meetings = [{0: 100, 1: 1100}, {0: 205, 1: 1200}, {0: 300, 1: 1310}, {1: 2000, 2: 7}, {3: 1, 4: 2}]
    assert offsets([0, 1, 2, 3, 4], meetings) == {0: 0, 1: 1000, 2: 1000 - 1993}


def test_a_rank_that_waits_is_told_apart_from_the_one_that_came_last() -> None:
    """Clocks that differ by hours."""
    late = [events([(0, 40, "all_gather", 3600_000_000)]), events([(30, 40, "all_gather", 0)])]
    recording = recording_of([part(rank, *each, ranks=2) for rank, each in enumerate(late)])
    (frame,) = recording["frames"]
    assert frame["waited"] == [30_000, 0] and frame["last"] == 1
    assert recording["waits"] == [[[1, 30_000]], []] or recording["waits"] == [[(1, 30_000)], []]
    assert frame["text"] == "Rank 0 waited 30.0 ms for rank 1, the last."


def test_ranks_that_part_ways_are_told_with_both_calls() -> None:
    recording = recording_of(hang())
    first = next(frame for frame in recording["frames"] if frame["missing"])
    assert first["title"] == "Reduce-scatter: gradients b"
    assert first["text"] == (
        "Ranks 0 and 1 wait for rank 2. Rank 2 makes another call in its place, sum of norm. It failed: "
        "timed out."
    )
    told = "\n".join(picture(recording))
    assert "There are no events of rank 3." in told and max(map(len, told.splitlines())) <= 80
    assert steps_of(recording) == {1, 2}


def test_a_recording_of_many_ranks_keeps_the_last_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_full.flight.timeline.MAX_EVENTS", 6)
    parts = [part(rank, *events([(10 * n, 10 * n + 5, f"c{n}", 0) for n in range(9)])) for rank in range(2)]
    recording = recording_of(parts)
    assert [frame["what"] for frame in recording["frames"]] == ["c6", "c7", "c8"]
    assert recording["dropped"]["events"] == 12
