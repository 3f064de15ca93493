"""An error of all ranks that nobody catches: printed once, by one who has it, and never by nobody."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_full
from tests.zero_full.runs import config
from zero_full.comm import error_dedup
from zero_full.comm.error_dedup import MARK, PrintOnceHook, Shared
from zero_full.config import resolve
from zero_full.errors import CheckpointError

ROOT = Path(__file__).parents[2]
Printed = Callable[[int], str]


def refused() -> None:
    resolve({"train_batch_siz": 8}, 1)


def misused() -> None:
    resolve([], 1)  # type: ignore[arg-type]


def broken() -> None:
    raise ZeroDivisionError("a function of the user's")


def made_of_a_missing_file() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, float(Path("missing", "rate.txt").read_text()))

    zero_full.initialize(model=torch.nn.Linear(2, 2), optimizer=make, config=config(1))


def no_folder_to_record_in() -> None:
    zero_full.initialize(
        model=torch.nn.Linear(2, 2), config=config(1, debug={"record": f"{__file__}/a.json"})
    )


def not_saved() -> None:
    try:
        broken()
    except ZeroDivisionError as error:
        raise CheckpointError("rank 0: a function of the user's") from error


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Lets some of three ranks, in threads, end by an error that all have: what each prints, reports."""
    rank = threading.local()
    printed: dict[int, str] = {}

    def note(text: str, **_: Any) -> None:
        printed[rank.number] = printed.get(rank.number, "") + text

    monkeypatch.setattr(error_dedup, "print", note, raising=False)
    monkeypatch.setattr(error_dedup, "this_rank", lambda: rank.number)
    monkeypatch.setattr(error_dedup, "_error_file", lambda: tmp_path / str(rank.number))
    monkeypatch.setattr(error_dedup, "TIMEOUT_S", 0.5)
    store = dist.HashStore()

    def end(number: int, fail: Callable[[], None], ranks: list[int]) -> None:
        rank.number = number
        try:
            fail()
        except Exception as error:
            setattr(error, MARK, Shared(ranks, store))
            hook = PrintOnceHook(lambda kind, error, trace: note(f"full: {error}"))
            hook(type(error), error, error.__traceback__)

    def run(fail: Callable[[], None], dying: list[int]) -> tuple[dict[int, str], dict[int, str]]:
        threads = [threading.Thread(target=end, args=(number, fail, [0, 1, 2])) for number in dying]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        texts = {n: json.loads((tmp_path / str(n)).read_text())["message"]["message"] for n in dying}
        return printed, texts

    return run


@pytest.mark.parametrize("dying", [[0, 1, 2], [2, 1, 0]], ids=str)
def test_one_rank_prints_the_users_line_and_the_reason(dying: list[int], ended: Any) -> None:
    printed, reports = ended(refused, dying)
    assert list(printed) == [0] and len(printed[0].splitlines()) <= 9
    reason = "ConfigError: the configuration cannot be used:\n  train_batch_siz: unknown key"
    assert reason in printed[0] and "resolve({" in printed[0] and "_given" not in printed[0]
    assert reason in reports[0] and reports[1] == reports[2] == "ConfigError, printed by rank 0"


def test_who_waits_in_vain_prints_it_too(ended: Any) -> None:
    """The first rank has caught its own."""
    printed, reports = ended(refused, [1, 2])
    assert set(printed) == {1, 2} and all("unknown key" in text for text in printed.values())
    assert all("unknown key" in text for text in reports.values())


@pytest.mark.parametrize(
    ("fail", "is_short"),
    [
        (refused, True),
        (misused, True),
        (no_folder_to_record_in, True),
        (broken, False),
        (not_saved, False),
        (made_of_a_missing_file, False),
    ],
)
def test_what_is_no_message_of_ours_keeps_its_traceback(
    fail: Callable[[], None], is_short: bool, ended: Any
) -> None:
    printed, reports = ended(fail, [0, 1, 2])
    assert list(printed) == [0] and ("full: " not in printed[0]) is is_short
    assert ("Traceback" not in reports[0]) is is_short and "printed by rank 0" in reports[1]
    assert is_short or "in broken" in reports[0] or "in make" in reports[0]


def test_other_errors_and_other_hooks_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    error = ValueError("another")
    PrintOnceHook(lambda kind, error, trace: seen.append(error))(ValueError, error, None)
    assert seen == [error]
    mine = lambda *_: None  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", mine)
    assert (
        error_dedup.print_once(error, [0, 1]) is error and sys.excepthook is mine and not hasattr(error, MARK)
    )
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    assert error_dedup.print_once(error, [0]) is error and sys.excepthook is sys.__excepthook__


SCRIPT = """
import torch, zero_full
zero_full.init_distributed()
zero_full.initialize(model=torch.nn.Linear(4, 4), config={"train_batch_siz": 8})
"""


@pytest.mark.rotates
def test_torchrun_shows_a_reason_and_where_it_is_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, str(script)], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )
    ours, _, theirs = done.stderr.partition("ChildFailedError")
    assert done.returncode == 1
    assert ours.count("train_batch_siz: unknown key; did you mean train_batch_size?") == 1
    assert ours.count('train.py", line 4') == 1 and "resolve.py" not in ours
    assert theirs.count("did you mean train_batch_size?") == 1, "the report of who has printed it"
    assert theirs.count("exitcode") == 2 and theirs.count("exitcode  : 0") == 0
