"""`python -m lessons`: read, try, be checked, get a hint."""

from lessons.interrupt import INTERRUPTED, ends_imports

try:
    with ends_imports():
        import argparse
        import importlib
        import json
        import os
        import sys
        from collections.abc import Callable, Iterator
        from pathlib import Path
        from typing import Any

        from lessons import exercise
        from lessons.check import check
        from lessons.exercise import LessonError, find_lesson, shown
        from lessons.progress import accepted, places, places_of_passed, progress
        from lessons.registry import COURSES, IN_ORDER, RELEASED, Lesson
        from lessons.tables import console, print_table, waiting
        from lessons.yours import run_on_yours, run_replaced
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"{missing.name} is not installed here. Once: make demo. Each time: source .venv/bin/activate\n"
        'Without make, once, in the folder of the project: python -m pip install -e ".[learn]"'
    ) from None

Chosen = argparse.Namespace
EPILOG = "Most commands take the number of a lesson: python -m lessons check 1. Each says more with -h."
NOT_RELEASED = ("demo", "diff", "solution", "bug", "golf", "verify", "release")
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
        if RELEASED is not None and chosen.command in NOT_RELEASED:
            raise LessonError(
                f"{chosen.command}: answers are not here. Your instructor has the whole project"
            )
        needed = chosen.run is not notebook and not _is_about_the_board(chosen)
        if "number" in chosen and chosen.number is None and needed:
            asked = "course" if chosen.command == "golf" else "lesson"
            raise LessonError(f"which {asked}? python -m lessons {chosen.command} N")
        with ends_imports():
            status: int = chosen.run(chosen)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read this, say `head`, wants no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except LessonError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        console().show_cursor()  # which a progress bar had hidden
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


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
    each = add("list", list_lessons, "the lessons, where their pages are, and how far you are")
    each.add_argument("--json", action="store_true", help="a line for each lesson, for a program to read")
    each = add("demo", demo, "train a small GPT at every stage on processes; table and picture")
    each.add_argument("--world", type=int, default=2, help="number of processes (default 2)")
    each.add_argument("--steps", type=int, default=100, help="training steps (default 100)")
    _may_be_mine(each)
    each = add("bill", bill, "bytes per parameter of every stage, on 4 ranks, in seconds")
    each.add_argument("--json", action="store_true", help="bytes, a line for each row, for a program to read")
    _may_be_mine(each)
    each = add("start", start, "write the exercise of lesson N into work/", lesson)
    each.add_argument("--force", action="store_true", help="overwrite your answer")
    each = add("check", check_work, "run the shared tests on your work file", lesson)
    each.add_argument("--json", action="store_true", help="each claim and its points, for a program to read")
    each.add_argument("--sandbox", action="store_true", help="with --json: as handin and verify judge it")
    each = add("handin", hand_in, "one file with your work, to give to an instructor")
    each.add_argument("numbers", nargs="+", metavar="N", help="the lessons' numbers")
    each.add_argument("--name", required=True, help="whose work it is")
    each = add("verify", verify, "for instructors: judge hand-ins again. It runs the code that is in them")
    each.add_argument("files", nargs="+", type=Path, metavar="FILE", help="hand-ins")
    each.add_argument("--json", action="store_true", help="a line for each lesson, for a program to read")
    each.add_argument("--csv", type=Path, metavar="FILE", help="write a row for each student")
    each.add_argument("--feedback", type=Path, metavar="DIR", help="write a page for each student")
    each.add_argument(
        "--due", metavar="DATE", help="as in 2026-12-01, its whole day, or 2026-12-01T18:00+01:00"
    )
    each.add_argument(
        "--late", type=float, default=0, metavar="PERCENT", help="off for each day begun; else 0"
    )
    each.add_argument("--cap", type=float, default=100, metavar="PERCENT", help="off at most; else 100")
    each.add_argument("--grace", type=float, default=0, metavar="MINUTES", help="still in time; else 0")
    text = "when files arrived: columns `received` and `file` or `name`; else the student's clock counts"
    each.add_argument("--received", type=Path, metavar="CSV", help=text)
    each.add_argument("--jobs", type=int, default=1, metavar="N", help="hand-ins at a time; else 1")
    text = "for the tests of a lesson; else 600"
    each.add_argument("--seconds", type=float, default=600, metavar="S", help=text)
    each.add_argument("--memory", type=float, default=4, metavar="GIB", help="of a hand-in's process; else 4")
    each = add("release", release, "for instructors: a folder for students, with exercises and no answers")
    each.add_argument("folder", type=Path, metavar="DIR", help="the folder, which must not exist yet")
    each.add_argument("numbers", nargs="*", metavar="N", help="the lessons' numbers; else all")
    forms = ("github", "classroom50", "nbgrader")
    each.add_argument("--for", dest="form", choices=forms, help="with what this needs, beside or instead")
    each = add("hint", hint, "a hint for a task, or for the next blank one", lesson)
    each.add_argument("more", nargs="*", metavar="T k", help="a task's name, and 1, 2 or 3: 3 says most")
    add("diff", one(exercise.diff), "your file against the answer", lesson)
    add("solution", one(exercise.solution), "the answer to every task", lesson)
    each = add("bug", find_bug, "the answer with a mistake in it, to be found", lesson)
    each.add_argument("--number", type=int, dest="mistake", help="which of the lesson's mistakes")
    each.add_argument("--answer", metavar="[FILE:]LINE", help="the line that you have found")
    each = add(
        "notebook", notebook, "your copies of the notebooks, in work/notebooks", "the notebook's number"
    )
    each.add_argument("--force", action="store_true", help="a new copy of notebook N, without what you wrote")
    each = add("run", run, "the lesson's experiment, with a plot", lesson)
    each.add_argument("--world", type=int, default=4, help="number of ranks (default 4)")
    each = add("clock", clock, "seconds: your step replayed on a machine, as a chart", lesson)
    each.add_argument("--world", type=int, default=4, help="number of ranks (default 4)")
    each.add_argument("--machine", default="pcie", help=f"{MACHINES} (default pcie)")
    each.add_argument("--batch", type=float, default=8192, help="tokens per rank in a step (default 8192)")
    each.add_argument(
        "--parameters", type=float, default=1e9, help="size of the replayed model (default 1e9)"
    )
    each.add_argument("--bucket", type=float, help="lesson 2: bucket, as a share of the model (default 0.08)")
    each = add("gpu", gpu, "your stage 2 on this machine's GPU, snapshot and trace; without one, a recording")
    each.add_argument("--width", type=int, help="width of the model (default 1024, which needs about 10 GB)")
    add("watch", watch, "your file on four ranks, line by line, as a page for a browser", lesson)
    each = add(
        "golf", golf, "a schedule of your own, and what it costs beside a stage", "the course: 1, 2 or 3"
    )
    each.add_argument("--submit", metavar="NAME", help="write an entry for the public board, in this name")
    each.add_argument("--board", action="store_true", help="print the public board")
    each.add_argument(
        "--replay", nargs="*", type=Path, metavar="FILE", help="play entries of the board again; else all"
    )
    return parser


def _is_about_the_board(chosen: Chosen) -> bool:
    return chosen.command == "golf" and (chosen.board or chosen.replay is not None)


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


def check_work(chosen: Chosen) -> int:
    """Judge the learner's files."""
    if chosen.sandbox and not chosen.json:
        raise LessonError("--sandbox needs --json")
    return check(find_lesson(chosen.number), chosen.json, chosen.sandbox)


def hand_in(chosen: Chosen) -> int:
    """Write a file for the instructor."""
    from lessons.handin import handin

    return handin(chosen.numbers, chosen.name)


def verify(chosen: Chosen) -> int:
    """A table of what is in hand-ins; 0 if all of them claim what is found."""
    from lessons import late, marks
    from lessons import verify as judging

    for option in ("late", "cap", "grace", "jobs", "seconds", "memory"):
        least = 0 if option in ("late", "cap", "grace") else 1 if option == "jobs" else 0.1
        if not least <= getattr(chosen, option) < 1e9:
            raise LessonError(f"--{option} {getattr(chosen, option):g}: give a number from {least} on")
    judging.check_files(chosen.files)
    due = late.moment(chosen.due, end_of_day=True) if chosen.due else None
    policy = late.Policy(due, chosen.late, chosen.cap, chosen.grace)
    received = late.received_times(chosen.received) if chosen.received else {}
    limits = judging.Limits(chosen.seconds, chosen.memory)
    found = judging.verify(chosen.files, policy, received, limits, chosen.jobs)
    if chosen.csv:
        marks.write_csv(chosen.csv, found)
    if chosen.feedback:
        marks.write_feedback(chosen.feedback, found, policy)
    if chosen.json:
        print("\n".join(json.dumps(each.facts()) for each in found))
    else:
        dated = due is not None or bool(received)
        dates = ("received", "days late", "points") if dated else ()
        header = ("file", "name", "lesson", "points claimed", "points found", *dates, "result")
        print_table([header, *(each.row(dated) for each in found)])
    return 0 if all(each.note == "same" for each in found) else 1


def release(chosen: Chosen) -> int:
    """Write a folder for students."""
    from lessons import release as releasing
    from lessons import templates

    if chosen.form:
        print(templates.release_for(chosen.form, chosen.folder, chosen.numbers))
    else:
        print(releasing.release(chosen.folder, chosen.numbers))
    return 0


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
    from lessons import bug  # a release has none

    lesson, found = find_lesson(chosen.number), chosen.answer
    print(bug.start(lesson, chosen.mistake) if found is None else bug.answer(lesson, found))
    return 0


def notebook(chosen: Chosen) -> int:
    """The learner's copies of the notebooks."""
    from lessons.notebook_copies import copy_all

    print(copy_all(chosen.number, chosen.force))
    return 0


def run(chosen: Chosen) -> int:
    """The lesson's experiment."""
    lesson = find_lesson(chosen.number)
    if RELEASED is not None:  # no answers are here: the learner's files have to do
        options = {"folder": lesson.folder, "world": chosen.world}
        return run_replaced(places(accepted()), "lessons.__main__:run_experiment", None, **options)
    return run_experiment(lesson.folder, chosen.world)


def run_experiment(folder: str, world: int) -> int:
    """The same in this process."""
    importlib.import_module(f"lessons.{folder}.experiment").main(world)
    return 0


def watch(chosen: Chosen) -> int:
    """The learner's file, line by line."""
    lesson = find_lesson(chosen.number)
    return run_on_yours(lesson, "lessons.watch:show", number=str(lesson.number))


def gpu(chosen: Chosen) -> int:
    """A step of the learner's stage 2 on one GPU, recorded."""
    from lessons.progress import stand_ins
    from lessons.yours import places_of

    if chosen.width is not None and (chosen.width < 8 or chosen.width % 8):
        raise LessonError(f"--width {chosen.width}: give a multiple of 8, the number of heads")
    lesson = find_lesson("2")
    mine = {**stand_ins(lesson), **places_of(lesson)}
    return run_replaced(mine, "lessons.one_gpu:show", None, width=chosen.width)


def golf(chosen: Chosen) -> int:
    """A course of ZeRO golf, or its public board."""
    if _is_about_the_board(chosen):
        return golf_board(chosen)
    if chosen.number not in COURSES:  # before torch is imported
        known = "; ".join(f"{number}: {title}" for number, title in COURSES.items())
        raise LessonError(f"there is no course {chosen.number!r}; the courses are {known}")
    if chosen.submit is not None:
        from lessons import golf_board as board

        print(board.submit(chosen.number, chosen.submit))
        return 0
    from lessons.golf import golf as play

    return play(chosen.number)


def golf_board(chosen: Chosen) -> int:
    """The public board; or its entries, played again: 0 if all of them count."""
    from lessons import golf_board as board  # a release has none

    if chosen.replay is None:
        print_table(board.table())
        print(f"{board.OURS}: what `golf N` writes. How to hand in: site/docs/golf.md")
        return 0
    rows, fine = board.replay(chosen.replay)
    print_table([("course", "name", "score", "result"), *rows])
    return 0 if fine else 1


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
    from lessons.notebook_copies import copy_or_original

    if chosen.json:
        for x in IN_ORDER:
            print(json.dumps({"lesson": str(x.number), "title": x.title, "work": progress(x)}))
        return 0
    rows = [("", "lesson, its page and its notebook", "your work")]
    for x in IN_ORDER:
        places = [shown(path) for path in (x.page, copy_or_original(x.notebook)) if path.exists()]
        rows.append((str(x.number), "\n".join([x.title, *places]), progress(x)))
    print_table(rows)
    if RELEASED is None and any(x.page.suffix == ".md" for x in IN_ORDER):
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
    if chosen.mine or RELEASED is not None:
        mine = places_of_passed() if RELEASED is None else places(accepted())
        return run_replaced(mine, "lessons.__main__:print_bills", as_json=chosen.json)
    return print_bills(chosen.json)


def print_bills(as_json: bool = False) -> int:
    """A table of all rows of the demo, or a line of JSON for each."""
    from lessons.bill import table

    bills, blank = _bills()
    exact = all(bill.exact() for bill in bills)
    if as_json:
        for each in bills:
            print(json.dumps(each.facts()))
        return 0 if bills and exact else 1
    for name, number in blank.items():
        print(f"{name}: lesson {number} is blank here, or has not passed")
    if not bills:
        return 1
    print_table([*_without_equals(table(bills))])
    print(f"bytes per parameter on each of 4 ranks; {bills[0].numel:,} parameters; sent = per step and rank")
    print("measured and formula agree as integers" if exact else "measured and formula DISAGREE")
    return 0 if exact else 1


def _without_equals(rows: list[list[str]]) -> Iterator[list[str]]:
    """Formulas only where they say something else than what was measured: so the table fits a terminal."""
    formulas = [place for place, name in enumerate(rows[0]) if name == "formula"]
    for row in rows:
        cells = list(row)
        for place in reversed(formulas):
            measured, formula = cells[place - 1], cells.pop(place)
            if formula not in (measured, "formula"):
                cells[place - 1] = f"{measured} (formula {formula})"
        yield cells


def _bills() -> tuple[list[Any], dict[str, str]]:
    """What can be measured; and in a release which rows need a lesson that is blank there."""
    from lessons.bill import measure
    from lessons.rows import ROWS
    from zero_min import WorldError

    bills, blank = [], {}
    for row in waiting(ROWS, "measuring"):
        try:
            bills.append(measure(row))
        except WorldError as error:
            met = exercise.blank_in(error)
            if RELEASED is None or met is None:
                raise
            blank[row.name] = met[0]
    return bills, blank


if __name__ == "__main__":
    status = main()
    if status == INTERRUPTED:  # without waiting for threads that are ranks
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
