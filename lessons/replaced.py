"""Calls a function of the lessons with the learner's files in zero_min's place. Started by `run_on_yours`."""

# ruff: noqa: E402  the learner's files must be in place before zero_min is imported
from lessons import interrupt, replace

if __name__ == "__main__":
    interrupt.end_silently()
replace.install()

import importlib
import json
import sys
import traceback


def main() -> int:
    """`MODULE:FUNCTION OPTIONS`, these as JSON: print the text that it returns, or return its exit status."""
    try:
        import zero_min
    except Exception:  # whatever the learner's file does wrong at import
        print("your file cannot be imported:\n  " + "\n  ".join(traceback.format_exc().splitlines()[-3:]))
        return 1
    from lessons.exercise import LessonError, blank_in

    module, _, name = sys.argv[1].partition(":")
    try:
        answer = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
        if isinstance(answer, int):
            return answer
        print(answer)
    except LessonError as error:
        print(error, file=sys.stderr)
        return 2
    except (zero_min.WorldError, NotImplementedError) as error:
        met = blank_in(error)
        if met is not None:
            print(f"this needs lesson {met[0]}, which is blank here until your file of it passes")
            return 1
        if isinstance(error, NotImplementedError):
            raise
        print(f"the step did not end: {error}\n{_place(error)}".rstrip())
        return 1
    return 0


def _place(error: BaseException) -> str:
    """The line of the learner's file that the error came through, if it did."""
    theirs = set(replace.places().values())
    frames = traceback.extract_tb(error.__cause__.__traceback__ if error.__cause__ else None)
    own = [frame for frame in frames if frame.filename in theirs]
    return f"  {own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else ""


if __name__ == "__main__":
    sys.exit(main())
