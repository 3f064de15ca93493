"""`python -m zero_full`: its help, its examples, its exit codes, and a reader who leaves early."""

import os
import shlex
import subprocess
import sys

import pytest

import zero_full
from zero_full.__main__ import build_parser, main
from zero_full.commands import COMMANDS, PROGRAM, Command

Capture = pytest.CaptureFixture[str]


def helped(capsys: Capture, *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_alone_it_prints_the_help_as_pip_does(capsys: Capture) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed == helped(capsys) and all(f"\n    {each.name}" in printed for each in COMMANDS)


def test_a_command_that_there_is_not_is_refused_with_those_that_there_are(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["docter"])
    told = capsys.readouterr().err
    assert caught.value.code == 2 and all(each.name in told for each in COMMANDS)


def test_the_version_is_the_packages(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"zero_full {zero_full.__version__}\n")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_fits_a_terminal_and_its_examples_are_accepted(
    command: Command, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = helped(capsys, command.name)
    assert max(map(len, printed.splitlines())) <= 80
    lines = printed.partition("examples:\n")[2].replace("\\\n", " ").splitlines()
    assert lines and all(line.split()[:4] == [*PROGRAM.split(), command.name] for line in lines)
    for line in lines:
        assert build_parser().parse_args(shlex.split(line)[3:]).command == command.name


def test_the_list_of_commands_needs_no_torch_and_a_reader_may_leave() -> None:
    """What argparse prints is written at the end, when nobody reads any more."""
    code = "import sys, runpy; sys.modules.update(torch=None, pydantic=None); "
    code += "sys.argv = ['zero_full', *sys.argv[1:]]; runpy.run_module('zero_full', run_name='__main__')"
    for arguments in ([], ["plan", "--help"]):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "wb") as stdout:
            done = subprocess.run(
                [sys.executable, "-c", code, *arguments],
                stdout=stdout,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONUNBUFFERED": ""},
                check=False,
            )
        assert (done.returncode, done.stderr) == (1, b"")
