"""`python -m lessons`: read, try, be checked, get a hint."""

import argparse
import importlib
import sys

try:
    from rich.console import Console
    from rich.table import Table

    from lessons import bug, exercise
    from lessons.check import check, progress
    from lessons.exercise import LessonError, find_lesson, shown
    from lessons.registry import IN_ORDER, Lesson
    from lessons.yours import run_on_yours
except ModuleNotFoundError as missing:
    sys.exit(
        f"{missing.name} is not installed here. Once: make demo. Each time: source .venv/bin/activate\n"
        'Without make, once, in the folder of the project: python -m pip install -e ".[learn]"'
    )

COMMANDS = """\
list            the lessons, where their pages are, and how far you are
demo            train a small GPT at every stage on 2 processes: a table, and a picture in build/
bill            bytes per parameter of every stage, 4 ranks as threads, a few seconds
start N         write the exercise of lesson N into work/
check N         run the shared tests on your work file
hint N [T] [k]  a hint for task T, or for the next blank one; k = 1, 2, 3 says more and more
diff N          your file against the answer
solution N      the answer to every task
bug N           the answer with a mistake in it, to be found; --number K for a certain one, --answer LINE
run N           the lesson's experiment, with a plot
clock N         seconds: your step replayed on a machine, as a chart; --machine, --batch, --parameters
watch N         your file on four ranks, line by line, as a page for a browser
golf N          a schedule of your own on course 1, 2 or 3: what it costs beside a stage

`demo`, `run` and `clock` take --world W ranks, `demo` --steps S of training."""

OF_CLOCK = ("machine", "batch", "parameters", "bucket")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m lessons", description=COMMANDS, formatter_class=form)
    names = ["list", "demo", "bill", "start", "check", "hint", "diff", "solution", "bug", "run"]
    names += ["clock", "watch", "golf"]
    parser.add_argument("command", choices=names, metavar="command", nargs="?")
    parser.add_argument("number", nargs="?", help="the lesson's number")
    parser.add_argument("more", nargs="*", help="of hint: a task's name, how much of a hint, or both")
    parser.add_argument("--world", type=int, help="ranks of `run` and `clock`, else 4, and of `demo`, else 2")
    parser.add_argument("--steps", type=int, default=100, help="of `demo`; else 100")
    parser.add_argument("--force", action="store_true", help="let `start` overwrite your answer")
    machines = "nvlink, pcie, 25gbe, laptops, or latency,bandwidth,FLOP/s"
    parser.add_argument("--machine", help=f"of `clock`: {machines}; else pcie")
    parser.add_argument("--batch", type=float, help="of `clock`: tokens of each rank in a step, else 8192")
    parser.add_argument("--parameters", type=float, help="of `clock`: replay as a model so large, else 1e9")
    parser.add_argument("--bucket", type=float, help="of `clock 2`: a bucket's part of the model, else 0.08")
    parser.add_argument("--number", type=int, dest="mistake", help="of `bug`: which of the lesson's mistakes")
    parser.add_argument("--answer", type=int, help="of `bug`: the line that you have found")
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    try:
        if chosen.world is not None and chosen.world < 1:
            raise LessonError(f"--world needs at least one rank, not {chosen.world}")
        if chosen.steps < 1:
            raise LessonError(f"--steps: at least one step, not {chosen.steps}")
        for option in OF_CLOCK:
            if getattr(chosen, option) is not None and chosen.command != "clock":
                raise LessonError(f"--{option} is of `clock`, not of `{chosen.command}`")
        if chosen.command in ("list", "bill"):
            return {"list": list_lessons, "bill": bill}[chosen.command]()
        if chosen.command == "demo":
            return demo(chosen.world or 2, chosen.steps)
        if chosen.number is None:
            raise LessonError(f"which lesson? python -m lessons {chosen.command} N")
        if chosen.command == "golf":
            return golf(chosen.number)
        return one_lesson(chosen)
    except LessonError as error:
        print(error, file=sys.stderr)
        return 2


def one_lesson(chosen: argparse.Namespace) -> int:
    """The commands that are about one lesson."""
    lesson = find_lesson(chosen.number)
    if chosen.command == "start":
        works = ", ".join(shown(work) for work in exercise.start(lesson, chosen.force))
        names = ", ".join(exercise.tasks(lesson))
        print(f"read    {shown(lesson.page)}\nfill in {works} (tasks: {names})")
        print(f"then    python -m lessons check {lesson.number}")
    elif chosen.command == "check":
        return check(lesson)
    elif chosen.command == "hint":
        task = next((word for word in chosen.more if not word.isdecimal()), "")
        level = next((int(word) for word in chosen.more if word.isdecimal()), 1)
        print(exercise.hint(lesson, task, level))
    elif chosen.command == "diff":
        print(exercise.diff(lesson))
    elif chosen.command == "solution":
        print(exercise.solution(lesson))
    elif chosen.command == "bug":
        found = chosen.answer
        print(bug.start(lesson, chosen.mistake) if found is None else bug.answer(lesson, found))
    elif chosen.command == "run":
        importlib.import_module(f"lessons.{lesson.folder}.experiment").main(chosen.world or 4)
    elif chosen.command == "clock":
        return clock(lesson, chosen)
    elif chosen.command == "watch":
        return run_on_yours(lesson, "lessons.watch:show", number=str(lesson.number))
    return 0


def golf(number: str) -> int:
    """A course of ZeRO golf."""
    from lessons.golf import golf as play

    return play(number)


def clock(lesson: Lesson, chosen: argparse.Namespace) -> int:
    """A step of the learner's file in seconds."""
    given = {option: getattr(chosen, option) for option in OF_CLOCK if getattr(chosen, option) is not None}
    for option, number in given.items():
        if option != "machine" and not 0 < number < 1e18:
            raise LessonError(f"--{option} {number:g}: give a number above 0")
    options = {"machine": "pcie", "batch": 8192.0, "parameters": 1e9, "bucket": None, **given}
    options["tokens"] = options.pop("batch")
    world = chosen.world or 4
    return run_on_yours(lesson, "lessons.clock:show", number=str(lesson.number), world=world, **options)


def list_lessons() -> int:
    """Every lesson with its page and the learner's progress."""
    rows = [("", "lesson, its page and its notebook", "your work")]
    for x in IN_ORDER:
        places = [shown(path) for path in (x.page, x.notebook) if path.exists()]
        rows.append((str(x.number), "\n".join([x.title, *places]), progress(x)))
    print_table(rows)
    if any(x.page.suffix == ".md" for x in IN_ORDER):
        print("`make site` builds the pages for a browser into build/site; index.html is the first.")
    return 0


def demo(world: int, steps: int) -> int:
    """Train at every stage on real processes."""
    from lessons import train

    return train.demo(world, steps)


def bill() -> int:
    """Bytes per parameter on each rank, measured with four thread-ranks, beside the formula."""
    from lessons.bill import measure, table
    from lessons.rows import ROWS

    bills = [measure(row) for row in ROWS]
    print_table([*table(bills)])
    exact = all(bill.exact() for bill in bills)
    print(f"bytes per parameter on each of 4 ranks; {bills[0].numel:,} parameters; sent = per step and rank")
    print("measured and formula agree as integers" if exact else "measured and formula DISAGREE")
    return 0 if exact else 1


def print_table(rows: list[tuple[str, ...]] | list[list[str]]) -> None:
    """A table whose first row is the header."""
    drawn = Table(*rows[0], show_lines=any("\n" in cell for row in rows for cell in row))
    for row in rows[1:]:
        drawn.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 110).print(drawn)


if __name__ == "__main__":
    sys.exit(main())
