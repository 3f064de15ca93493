"""Print an exception of the user's code, with the frames that are the user's own."""

import traceback
from collections.abc import Iterator

from zero_full.comm.error_dedup import is_library_frame, is_package_frame


def raised(error: BaseException) -> str:
    """Return an exception on one line, and below it the traceback without frames of libraries."""
    text = " ".join(str(error).split())
    lines = [f"{type(error).__name__}{f': {text}' if text else ''}"]
    for frame in traceback.extract_tb(error.__traceback__):
        if not is_package_frame(frame) and not is_library_frame(frame):
            lines += _lines(frame)
    return "\n".join(lines)


def _lines(frame: traceback.FrameSummary) -> Iterator[str]:
    yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
    if frame.line:
        yield f"    {frame.line}"
