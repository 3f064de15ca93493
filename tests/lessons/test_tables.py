"""Tables in the terminal, at any width; hand-ins that do not exist; and Ctrl-C in the demo."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from lessons import __main__ as cli
from lessons import interrupt, registry
from lessons.tables import print_table

Capture = pytest.CaptureFixture[str]
ROWS = [["", "parameters", "optimizer", "sent"], ["stage 1", "4.00", "2.00", "6.00"]]
TEXTS = [("", "lesson, its page and more", "work"), ("1", "Stage 1\nlessons/lesson.md", "passed")]


@pytest.mark.parametrize("columns", [25, 40, 80, 120])
def test_a_table_fits_the_terminal_or_is_printed_row_by_row(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_table(ROWS)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= columns
    assert printed.startswith("┏") == (columns >= 80)
    if columns < 80:
        assert printed == "stage 1\n  parameters  4.00\n  optimizer   2.00\n  sent        6.00\n"
    print_table(TEXTS)
    printed = capsys.readouterr().out
    assert printed.startswith("┏") or printed == "1  Stage 1\n  lessons/lesson.md\n  passed\n"
    monkeypatch.setenv("COLUMNS", "15")
    print_table(TEXTS)
    assert "lessons/lesson.md\n" in capsys.readouterr().out  # a path is not cut


def test_hand_ins_that_do_not_exist_are_an_error_with_those_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(registry, "WORK", tmp_path)
    assert cli.main(["verify", "nope"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "there is no hand-in nope; python -m lessons handin" in printed.err
    (tmp_path / "handin_1.json").write_text("{}")
    assert cli.main(["verify", "nope"]) == 2
    assert "handin_1.json" in capsys.readouterr().err


def test_a_list_for_programs(capsys: Capture) -> None:
    assert cli.main(["list", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["lesson"] for row in rows] == [str(lesson.number) for lesson in registry.IN_ORDER]
    assert all(set(row) == {"lesson", "title", "work"} for row in rows)


def is_running(group: int) -> bool:
    """Whether a process of this group is alive."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signal masks")
def test_ctrl_c_waits_until_a_process_has_been_started() -> None:
    code = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()), end='')"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = None
    try:
        with pytest.raises(KeyboardInterrupt), interrupt.held_back():
            os.kill(os.getpid(), signal.SIGINT)
            started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGINT, before)
    assert started is not None and started.communicate() == ("True", None)


@pytest.mark.rotates
@pytest.mark.skipif(os.name == "nt", reason="Windows has no process groups with SIGINT")
def test_ctrl_c_in_the_demo_is_one_line_and_ends_all_processes() -> None:
    command = [sys.executable, "-m", "lessons", "demo", "--steps", "1000000"]
    pipe = subprocess.PIPE
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a background job does not
    demo = subprocess.Popen(
        command, cwd=registry.ROOT, stdout=pipe, stderr=pipe, start_new_session=True, preexec_fn=heed
    )
    try:
        time.sleep(3)  # the ranks import torch, or train
        os.killpg(demo.pid, signal.SIGINT)
        _, errors = demo.communicate(timeout=60)
        assert (demo.returncode, errors) == (130, b"interrupted\n")
        deadline = time.monotonic() + 30
        while is_running(demo.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not is_running(demo.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(demo.pid, signal.SIGKILL)
