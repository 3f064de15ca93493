"""What a reader sees and does in cells: output, columns, a changed line, real processes."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from lessons.exercise import LessonError, find_lesson
from lessons.registry import ROOT
from lessons.run_judge import run_judge
from zero_min import WorldError


def columns(rows: Sequence[Sequence[object]]) -> str:
    """Rows as aligned text: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = []
    for first, *others in cells:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)


def run_cell(step: int | str, section: str) -> str:
    """Run the python cell of the lesson's section and return what its reader sees.

    Left out is what changes from run to run: which rank noticed an error first, and line numbers.
    """
    text = (find_lesson(str(step)).path / "lesson.md").read_text(encoding="utf-8")
    text = re.sub(r"<!-- weave:.*?<!-- /weave -->", "", text, flags=re.DOTALL)
    after = text[re.search(rf"^## {re.escape(section)}", text, re.MULTILINE).end() :]  # type: ignore[union-attr]
    code = after.split("```python\n", 1)[1].split("```", 1)[0]
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            exec(compile(code, "cell", "exec"), {"__name__": "cell"})
    except WorldError as error:
        message = re.sub(r"^rank \d+ of", "rank ? of", str(error))
        printed.write("WorldError: " + re.sub(r" at \S+:\d+", "", message))
    return printed.getvalue().rstrip()


def scripts() -> Path:
    """The folder for what notebooks write: beside other build products, so git ignores it."""
    folder = ROOT / "build" / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True)
class Verdict:
    """What the task tests of a step said about a changed line, and `check`, if they saw nothing."""

    passed: int
    failed: int
    text: str


def change_line(step: int | str, right: str, mine: str, limit: float = 300) -> Verdict:
    """Put `mine` in the place of a line of the step's answer key, and run the step's task tests on that.

    If none of them sees a difference, all of `check` is run: only then the line does what the right one does.
    The answer key itself stays as it is: the changed copy takes its place in another process only.
    """
    lesson = find_lesson(str(step))
    places = [source for source, _ in lesson.files if right in source.read_text(encoding="utf-8")]
    if len(places) != 1 or places[0].read_text(encoding="utf-8").count(right) != 1:
        files = ", ".join(lesson.sources)
        raise LessonError(f"{right!r} must stand in {files} exactly once: copy the line from there")
    changed = scripts() / "changed" / places[0].name  # not beside scripts, which could import it by its name
    changed.parent.mkdir(exist_ok=True)
    changed.write_text(places[0].read_text(encoding="utf-8").replace(right, mine), encoding="utf-8")
    done, end = _judge(changed, ["--tasks", str(step)], limit)
    counts = re.search(r"^passed: (\d+), failed: (\d+)$", done.stdout, re.MULTILINE)
    if end:
        return Verdict(0, 1, end)
    if counts is None:  # not a verdict on the line but no tests, no pytest, ...
        raise LessonError(f"the tests could not run:\n{done.stdout}{done.stderr}".rstrip())
    passed, failed, text = int(counts[1]), int(counts[2]), done.stdout.rstrip()
    if failed == 0:
        done, end = _judge(changed, [str(step)], limit)
        if end or done.returncode != 0:
            failed, text = 1, f"{text}\n\nbut `check` refuses it:\n{end or done.stdout.rstrip()}"
    return Verdict(passed, failed, text)


def _judge(changed: Path, arguments: list[str], limit: float) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the judge on a changed file; what it says, and why the tests could not go on, or ""."""
    places = {f"zero_min.{changed.stem}": str(changed)}
    done, end = run_judge(places, [changed], *arguments, capture_output=True, timeout=limit)
    return done, f"the tests stopped in {end.during}\n  {end.why}" if end else ""


def torchrun(script: str, ranks: int = 2, limit: float = 120) -> str:
    """Run a script with real processes; show and return what it prints. No process outlives the limit."""
    options = ["--standalone", "--nproc-per-node", str(ranks), script]
    print("$ torchrun", *options)
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # processes must not fight for the cores
    if os.name == "nt":
        env.setdefault("USE_LIBUV", "0")  # torch for Windows may be built without it
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            printed, complaints = process.communicate(timeout=limit)
        except BaseException:  # the limit, or the stop button: torchrun ends its ranks when it is ended
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    print(printed, end="")
    if process.returncode != 0:
        raise RuntimeError(f"torchrun ended with status {process.returncode}\n{complaints}")
    return printed
