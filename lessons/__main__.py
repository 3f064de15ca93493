"""`python -m lessons`: read, try, be checked, get a hint."""

import argparse
import importlib
import sys
from collections.abc import Callable

try:
    from rich.console import Console
    from rich.table import Table

    from lessons import bug, exercise
    from lessons.check import check
    from lessons.exercise import LessonError, find_lesson, shown
    from lessons.progress import places_of_passed, progress
    from lessons.registry import IN_ORDER, Lesson
    from lessons.yours import run_on_yours, run_replaced
except ModuleNotFoundError as missing:
    sys.exit(
        f"{missing.name} is not installed here. Once: make demo. Each time: source .venv/bin/activate\n"
        'Without make, once, in the folder of the project: python -m pip install -e ".[learn]"'
    )

Chosen = argparse.Namespace
EPILOG = "Most commands take the number of a lesson: python -m lessons check 1. Each says more with -h."
MACHINES = "nvlink, pcie, 25gbe, laptops, or latency,bandwidth,FLOP/s"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    try:
        for option in ("world", "steps"):
            if getattr(chosen, option, 1) < 1:
                raise LessonError(f"--{option} needs at least one, not {getattr(chosen, option)}")
        if "number" in chosen and chosen.number is None:
            asked = "course" if chosen.command == "golf" else "lesson"
            raise LessonError(f"which {asked}? python -m lessons {chosen.command} N")
        status: int = chosen.run(chosen)
        return status
    except LessonError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m lessons", description="Read, try, be checked, get a hint.", epilog=EPILOG
    )
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")

    def add(name: str, run: Callable[[Chosen], int], text: str, number: str = "") -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        if number:
            made.add_argument("number", nargs="?", metavar="N", help=number)
        return made

    lesson = "the lesson's number"
    add("list", list_lessons, "the lessons, where their pages are, and how far you are")
    each = add("demo", demo, "train a small GPT at every stage on processes; table and picture")
    each.add_argument("--world", type=int, default=2, help="processes; else 2")
    each.add_argument("--steps", type=int, default=100, help="of training; else 100")
    _may_be_mine(each)
    _may_be_mine(add("bill", bill, "bytes per parameter of every stage, on 4 ranks, in seconds"))
    each = add("start", start, "write the exercise of lesson N into work/", lesson)
    each.add_argument("--force", action="store_true", help="overwrite your answer")
    add("check", one(check), "run the shared tests on your work file", lesson)
    each = add("hint", hint, "a hint for a task, or for the next blank one", lesson)
    each.add_argument("more", nargs="*", metavar="T k", help="a task's name, 1, 2 or 3 for how much is said")
    add("diff", one(exercise.diff), "your file against the answer", lesson)
    add("solution", one(exercise.solution), "the answer to every task", lesson)
    each = add("bug", find_bug, "the answer with a mistake in it, to be found", lesson)
    each.add_argument("--number", type=int, dest="mistake", help="which of the lesson's mistakes")
    each.add_argument("--answer", type=int, help="the line that you have found")
    each = add("run", run, "the lesson's experiment, with a plot", lesson)
    each.add_argument("--world", type=int, default=4, help="ranks; else 4")
    each = add("clock", clock, "seconds: your step replayed on a machine, as a chart", lesson)
    each.add_argument("--world", type=int, default=4, help="ranks; else 4")
    each.add_argument("--machine", default="pcie", help=f"{MACHINES}; else pcie")
    each.add_argument("--batch", type=float, default=8192, help="tokens of each rank in a step; else 8192")
    each.add_argument("--parameters", type=float, default=1e9, help="replay as a model so large; else 1e9")
    each.add_argument("--bucket", type=float, help="of lesson 2: a bucket's part of the model; else 0.08")
    add("watch", watch, "your file on four ranks, line by line, as a page for a browser", lesson)
    add("golf", golf, "a schedule of your own, and what it costs beside a stage", "the course: 1, 2 or 3")
    return parser


def _may_be_mine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mine", action="store_true", help="with your files, where they have passed")


def one(function: Callable[[Lesson], int | str]) -> Callable[[Chosen], int]:
    """The command that calls this for a lesson, and prints what it returns if that is text."""

    def command(chosen: Chosen) -> int:
        answer = function(find_lesson(chosen.number))
        if isinstance(answer, int):
            return answer
        print(answer)
        return 0

    return command


def start(chosen: Chosen) -> int:
    """Write the exercise, and say what comes next."""
    lesson = find_lesson(chosen.number)
    works = ", ".join(shown(work) for work in exercise.start(lesson, chosen.force))
    names = ", ".join(exercise.tasks(lesson))
    print(f"read    {shown(lesson.page)}\nfill in {works} (tasks: {names})")
    print(f"then    python -m lessons check {lesson.number}")
    return 0


def hint(chosen: Chosen) -> int:
    """As much of a hint as is asked for."""
    task = next((word for word in chosen.more if not word.isdecimal()), "")
    level = next((int(word) for word in chosen.more if word.isdecimal()), 1)
    print(exercise.hint(find_lesson(chosen.number), task, level))
    return 0


def find_bug(chosen: Chosen) -> int:
    """A mistake to be found, or what is to be said of the line that was."""
    lesson, found = find_lesson(chosen.number), chosen.answer
    print(bug.start(lesson, chosen.mistake) if found is None else bug.answer(lesson, found))
    return 0


def run(chosen: Chosen) -> int:
    """The lesson's experiment."""
    folder = find_lesson(chosen.number).folder
    importlib.import_module(f"lessons.{folder}.experiment").main(chosen.world)
    return 0


def watch(chosen: Chosen) -> int:
    """The learner's file, line by line."""
    lesson = find_lesson(chosen.number)
    return run_on_yours(lesson, "lessons.watch:show", number=str(lesson.number))


def golf(chosen: Chosen) -> int:
    """A course of ZeRO golf."""
    from lessons.golf import golf as play

    return play(chosen.number)


def clock(chosen: Chosen) -> int:
    """A step of the learner's file in seconds."""
    for option in ("batch", "parameters", "bucket"):
        number = getattr(chosen, option)
        if number is not None and not 0 < number < 1e18:
            raise LessonError(f"--{option} {number:g}: give a number above 0")
    lesson, sizes = find_lesson(chosen.number), {"tokens": chosen.batch, "parameters": chosen.parameters}
    options = {"world": chosen.world, "machine": chosen.machine, "bucket": chosen.bucket, **sizes}
    return run_on_yours(lesson, "lessons.clock:show", number=str(lesson.number), **options)


def list_lessons(chosen: Chosen) -> int:
    """Every lesson with its page and the learner's progress."""
    rows = [("", "lesson, its page and its notebook", "your work")]
    for x in IN_ORDER:
        places = [shown(path) for path in (x.page, x.notebook) if path.exists()]
        rows.append((str(x.number), "\n".join([x.title, *places]), progress(x)))
    print_table(rows)
    if any(x.page.suffix == ".md" for x in IN_ORDER):
        print("`make site` builds the pages for a browser into build/site; index.html is the first.")
    return 0


def demo(chosen: Chosen) -> int:
    """Train at every stage on real processes."""
    if chosen.mine:
        options = {"world": chosen.world, "steps": chosen.steps}
        return run_replaced(places_of_passed(), "lessons.train:demo", None, **options)
    from lessons import train

    return train.demo(chosen.world, chosen.steps)


def bill(chosen: Chosen) -> int:
    """Bytes per parameter on each rank, measured with four thread-ranks, beside the formula."""
    if chosen.mine:
        return run_replaced(places_of_passed(), "lessons.__main__:print_bills")
    return print_bills()


def print_bills() -> int:
    """A table of all rows of the demo."""
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
