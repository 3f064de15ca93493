"""What a lesson's reader sees: the output of its cells, and numbers in columns."""

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stdout

from lessons.registry import LESSONS
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


def run_cell(step: int, section: str) -> str:
    """Run the python cell of the lesson's section and return what its reader sees.

    Left out is what changes from run to run: which rank noticed an error first, and line numbers.
    """
    text = (LESSONS[step].path / "lesson.md").read_text(encoding="utf-8")
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
