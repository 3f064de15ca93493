"""The first value that a learner's task gets wrong, found by running the failed test beside the answer.

A task is at fault if the test passes once the answer's lines stand in its place. Both runs are recorded
(`lessons/trace.py`) and compared call by call, rank by rank, from the same arguments on.
"""

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lessons import replace, trace
from lessons.evidence import Evidence, shown
from lessons.exercise import (
    blank,
    blank_line,
    function_at,
    region_lines,
    task_regions,
    tasks,
    tasks_named,
    unmarked,
    written,
)
from lessons.registry import Lesson
from lessons.trace import Call, Did, Numbers, Values, root_of

SECONDS = 5.0  # after which no other task is tried
Rerun = Callable[[], bool]  # run the failed test once more, with what stands in zero_min's place now


def find(lesson: Lesson, test: str, works: Sequence[Path], rerun: Rerun) -> Evidence | None:
    """Look for the task at fault, in the test's own first. None if no single task explains the failure."""
    sources = {answer.name: unmarked(answer.read_text(encoding="utf-8")) for answer, _ in lesson.files}
    if any("raise NotImplementedError(" + '"lesson' in source for source in sources.values()):
        return None  # a release has no answers
    places, began = replace.places(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copies = _copies(works, Path(folder) / "mine")
        mine = _recorded({**places, **_placed(copies)}, copies, rerun)[1]
        named = tasks_named(lesson, test)
        for task in [*named, *(each for each in tasks(lesson) if each not in named)]:
            if time.monotonic() - began > SECONDS:
                return None
            mended = _copies(works, Path(folder) / task)
            answer = next(
                answer
                for answer, _ in lesson.files
                if task in {region.task for region in task_regions(answer.read_text(encoding="utf-8"))}
            )
            work = next(each for each in works if each.name == answer.name)
            if not _mend(lesson, answer, task, next(each for each in mended if each.name == answer.name)):
                continue
            passed, right = _recorded({**places, **_placed(mended)}, mended, rerun)
            if passed:
                lines = written(lesson, answer, work.read_text(encoding="utf-8"))[task]
                line, words = compare(mine, right, _function_of(answer, task), lines)
                return Evidence(task, (work, line) if line else None, words)
    return None


def _copies(works: Sequence[Path], folder: Path) -> list[Path]:
    folder.mkdir()
    for work in works:
        (folder / work.name).write_text(work.read_text(encoding="utf-8"), encoding="utf-8")
    return [folder / work.name for work in works]


def _placed(works: Sequence[Path]) -> dict[str, str]:
    return {f"zero_min.{work.stem}": str(work) for work in works}


def _recorded(places: Mapping[str, str], works: Sequence[Path], rerun: Rerun) -> tuple[bool, list[Call]]:
    with replace.swapped(places), trace.record(works) as calls:
        return rerun(), calls


def _mend(lesson: Lesson, answer: Path, task: str, work: Path) -> bool:
    """Put the answer's lines in the place of the learner's; False if they are the same."""
    text = work.read_text(encoding="utf-8")
    lines, mine = text.splitlines(), written(lesson, answer, text)[task]
    margin = next(
        line[: len(line) - len(line.lstrip())]
        for line in blank(answer, lesson.number).splitlines()
        if line.strip() == blank_line(lesson.number, task)
    )
    right = [margin + line if line else "" for line in region_lines(answer, f"ex_{task}")]
    theirs = [line for line in lines[mine.start : mine.stop] if line.strip()]
    if theirs == [line for line in right if line.strip()]:
        return False
    lines[mine.start : mine.stop] = right
    work.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return True


def _function_of(answer: Path, task: str) -> str:
    source = answer.read_text(encoding="utf-8")
    region = next(each for each in task_regions(source) if each.task == task)
    return function_at(source, region.first + 1)


@dataclass(frozen=True)
class _Difference:
    """Two calls from the same arguments that end differently."""

    mine: Call
    right: Call
    number: int  # which call of the function on this rank, from 0
    kind: int  # 0: values, 1: calls made, 2: memory, 3: memory of its own

    @property
    def foreign(self) -> bool:
        """Whether another rank made it: this one gave a collective the same, and got something else."""
        if (self.mine.raised or "").startswith("WorldError: stopped, because"):
            return True
        for a, b in zip(self.mine.did, self.right.did, strict=False):
            if a.name != b.name or _differing(a.given, b.given):
                return False
            if a.result and b.result and _differing(a.result, b.result):
                return True
        return False


def compare(
    mine: Sequence[Call], right: Sequence[Call], function: str, task: range
) -> tuple[int | None, str]:
    """The line of the first difference, None if there is none to point at, and the difference in words."""
    name = f"`{function if function.endswith('__init__') else function.rpartition('.')[2]}`"
    ours, theirs = _of(mine, function), _of(right, function)
    found: list[_Difference] = []
    compared = []
    for rank in ours:
        for number, (a, b) in enumerate(zip(ours[rank], theirs.get(rank, []), strict=False)):
            if a.function != b.function or _differing(a.entry, b.entry):
                break
            if not (a.ended and b.ended) and not (a.raised or b.raised):
                break
            compared.append((rank, number))
            kind = _kind(a, b)
            if kind is not None:
                found.append(_Difference(a, b, number, kind))
                if kind == 0:
                    break
    if not found:
        return _uncalled(name, ours, theirs)
    first = min(found, key=lambda x: (x.foreign, x.kind, x.mine.world, x.number, x.mine.rank or 0))
    alike = [each for each in found if (each.foreign, each.kind) == (first.foreign, first.kind)]
    line, words = _in_words(first, name, task)
    ranks = {d.mine.rank for d in alike if (d.mine.world, d.number) == (first.mine.world, first.number)}
    others = {rank for (world, rank), n in compared if (world, n) == (first.mine.world, first.number)} - ranks
    where = "" if first.mine.rank is None else f" on rank {first.mine.rank}"
    if where and others and others != {None}:
        where += f" (right on rank {' and '.join(str(rank) for rank in sorted(others - {None}))})"
    when = f" in its {_th(first.number + 1)} call" if first.number else ""
    return line, words.replace("@", where + when, 1)


def _of(calls: Sequence[Call], function: str) -> dict[tuple[int, int | None], list[Call]]:
    found: dict[tuple[int, int | None], list[Call]] = {}
    for call in calls:
        if f"{call.function}.".startswith(f"{function}."):
            found.setdefault((call.world, call.rank), []).append(call)
    return found


def _kind(a: Call, b: Call) -> int | None:
    if a.raised or _differing(a.exit, b.exit) or _differing(a.returned, b.returned):
        return 0
    if [each.name for each in a.did] != [each.name for each in b.did]:
        return 1
    if any(_differing(x.given, y.given) for x, y in zip(a.did, b.did, strict=True)):
        return 1
    if _differing(a.exit, b.exit, memory=True) or _differing(a.returned, b.returned, memory=True):
        return 2
    if _shared(a) != _shared(b) or _moved(a, b):
        return 2
    return 3 if _kept_besides(a, b) else None


def _kept_besides(a: Call, b: Call) -> list[str]:
    """Tensors that an object has after the call, and neither before nor in the answer."""
    roots = {root_of(path) for path in b.entry}
    new = [path for path, value in a.exit.items() if path not in a.entry and isinstance(value, Numbers)]
    return [path for path in new if path not in b.exit and root_of(path) in roots]


def _moved(a: Call, b: Call) -> list[str]:
    """Of tensors that the call was given: those that are other memory afterwards, but not in the answer's."""
    return [path for path in b.entry if _is_new(a, path) and _kept_in_place(b, path)]


def _is_new(call: Call, path: str) -> bool:
    now, before = call.exit.get(path), call.entry.get(path)
    if not (isinstance(now, Numbers) and isinstance(before, Numbers)):
        return False
    return 0 != now.address != before.address != 0


def _kept_in_place(call: Call, path: str) -> bool:
    return isinstance(call.exit.get(path), Numbers) and not _is_new(call, path)


def _shared(call: Call) -> dict[str, str]:
    """Of each tensor that begins where another one does: the path of the first of these."""
    first: dict[int, str] = {}
    found = {}
    for path, value in {**call.exit, **call.returned}.items():
        if isinstance(value, Numbers) and value.address:
            if value.address in first:
                found[path] = first[value.address]
            first.setdefault(value.address, path)
    return found


def _shared_in_words(mine: Call, right: Call, name: str) -> tuple[int | None, str]:
    ours, theirs = _shared(mine), _shared(right)
    path = next(path for path in [*ours, *theirs] if ours.get(path) != theirs.get(path))
    if path in ours:
        does = f"is the same memory as `{ours[path]}`, where the answer has other memory"
    else:
        does = f"has memory of its own, where the answer has that of `{theirs[path]}`"
    return None, f"after {name}@, `{path}` {does}"


def _differing(got: Values, expected: Values, memory: bool = False) -> list[str]:
    """The paths whose values differ; what only one side has is its own affair, but for a length."""
    return [
        path for path, right in expected.items() if path in got and not equal(got[path], right, memory)
    ] + [path for path, right in expected.items() if path not in got and isinstance(right, Numbers)]


def equal(got: Any, expected: Any, memory: bool = False) -> bool:
    """Whether two recorded values are the same, up to rounding."""
    if not (isinstance(got, Numbers) and isinstance(expected, Numbers)):
        if isinstance(got, float) and isinstance(expected, float):
            return got == expected or math.isclose(got, expected, rel_tol=1e-6) or got != got != expected
        return type(got) is type(expected) and bool(got == expected)
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return False
    if memory and (got.nbytes, got.follows) != (expected.nbytes, expected.follows):
        return False
    if got.values == expected.values:
        return True
    if len(got.values) != len(expected.values):
        return False
    largest = max(
        (abs(x) for x in expected.values if isinstance(x, (int, float)) and math.isfinite(x)), default=0
    )
    near = expected.near * largest
    return all(
        x == y or abs(x - y) <= near or (x != x and y != y)
        for x, y in zip(got.values, expected.values, strict=True)
    )


def _in_words(first: _Difference, name: str, task: range) -> tuple[int | None, str]:
    if first.mine.yields and not first.right.yields:
        return (
            first.mine.line,
            f"{name}@ has a `yield`, so it returns a generator; the answer returns a value",
        )
    if first.kind == 3:
        path = _kept_besides(first.mine, first.right)[0]
        line = next((number for number, changed in first.mine.lines if path in changed), None)
        where = f"after line {line} of {name}@" if line else f"after {name}@"
        return line, f"{where}, `{path}` keeps a tensor, and the answer keeps none there"
    if first.kind == 1:
        return _calls_in_words(first.mine.did, first.right.did, name)
    mine, right, memory = first.mine, first.right, first.kind == 2
    ended = {**mine.exit, **mine.returned}
    asked = {**right.exit, **right.returned}
    wrong = _differing(ended, asked, memory) if not mine.raised else []
    if memory and not wrong and _shared(mine) == _shared(right):
        path = _moved(mine, right)[0]
        line = next((number for number, changed in mine.lines if path in changed), None)
        where = f"line {line} of {name}@ makes" if line else f"{name}@ makes"
        return line, f"{where} `{path}` another tensor, where the answer writes into the one that is there"
    if memory and not wrong:
        return _shared_in_words(mine, right, name)
    early = _first_line(mine, right, wrong, memory, task)
    sent = [each for each in mine.did if each.result], [each for each in right.did if each.result]
    given = _given_otherwise(*sent)
    if given is not None and not memory and (early is None or given < early[0]):
        return _calls_in_words(*sent, name)
    if early is not None:
        line, path, got, expected = early
        words = f"after line {line} of {name}@, `{path}` {told(got, expected, memory)}"
        words += _since(mine, line, got) if path in wrong and not memory else ""
        if mine.raised and not right.raised:
            words += f"; so line {mine.line} raises the error above"
        return line, words
    if mine.raised and (first.mine.did != first.right.did[: len(first.mine.did)]):
        line, words = _calls_in_words(first.mine.did, first.right.did, name)
        if line is not None:
            return line, f"{words}; then line {mine.line} raises the error above"
    if mine.raised:
        return mine.line, f"line {mine.line} of {name}@ raises the error above"
    path = wrong[0]
    got, expected = ended.get(path), asked[path]
    if root_of(path) == "the result" or path.startswith("the result"):
        arguments = ", ".join(
            f"{key}={value}" for key, value in mine.entry.items() if isinstance(value, int) and "." not in key
        )
        call = f"{name.strip('`')}({arguments})" if arguments else name.strip("`")
        subject = f"`{call}`@ returns " + (
            "a value which" if path == "the result" else f"a result in which `{path}`"
        )
        return mine.line, f"{subject} {told(got, expected, memory)}"
    line = next((number for number, changed in reversed(mine.lines) if path in changed), None)
    if line is None:
        return None, f"no line of {name}@ changes `{path}`, which {told(got, expected, memory)}"
    return line, f"after line {line} of {name}@, `{path}` {told(got, expected, memory)}"


def _given_otherwise(mine: Sequence[Did], right: Sequence[Did]) -> int | None:
    """The line of the first collective that was given other values, if those before it are the same."""
    for a, b in zip(mine, right, strict=False):
        if a.name != b.name:
            return None
        if _differing(a.given, b.given):
            return a.line
    return None


def _since(call: Call, line: int, got: Any) -> str:
    """Which other name has had the same numbers since which earlier line."""
    if not isinstance(got, Numbers) or not any(got.values):
        return ""
    for number, changed in call.lines:
        for path, value in changed.items() if number < line else ():
            if isinstance(value, Numbers) and value.values == got.values and root_of(path) == path:
                return f" (`{path}` has that since line {number})"
    return ""


def _first_line(
    mine: Call, right: Call, wrong: Sequence[str], memory: bool, task: range
) -> tuple[int, str, Any, Any] | None:
    """The first line that gives a name a value which the answer never gives it.

    Only of what ends up wrong, or of all if the learner has every name that the answer has.
    """
    history: dict[str, list[Any]] = {path: [value] for path, value in right.entry.items()}
    for _, changed in right.lines:
        for path, value in changed.items():
            history.setdefault(path, []).append(value)
    own = {path for _, changed in mine.lines for path in changed}
    same_names = {root_of(path) for path in history} <= {root_of(path) for path in own | set(mine.entry)}
    source = mine.path.read_text(encoding="utf-8").splitlines()
    ends_right = {path for path, each in right.exit.items() if equal(mine.exit.get(path), each, memory)}
    fine = set() if mine.raised or not wrong else ends_right
    counts: dict[str, int] = {}
    for line, changed in mine.lines:
        for path, value in changed.items():
            known = history.get(path)
            counts[path] = counts.get(path, 0) + 1
            if known is None or line - 1 not in task or not (same_names or path in wrong):
                continue
            if path not in wrong and source[line - 1].lstrip().startswith(("for ", "while ")):
                continue  # another turn of a loop follows from what the turns before have done
            if path not in wrong and path in fine:
                continue  # it ends as the answer's does: the way there is the learner's own
            if not any(equal(value, other, memory) for other in known):
                later = known[1:] if path in right.entry else known
                return line, path, value, (later or known)[min(counts[path], len(later or known)) - 1]
    return None


def _calls_in_words(mine: Sequence[Did], right: Sequence[Did], name: str) -> tuple[int | None, str]:
    sent = [each for each in mine if each.result], [each for each in right if each.result]
    if [each.name for each in sent[0]] != [each.name for each in sent[1]]:
        mine, right = sent  # what ranks exchange says more than which functions help with it
    for number, did in enumerate(mine):
        if number >= len(right) or did.name != right[number].name:
            left = [each.name for each in right[number:]]
            if did.name not in left:
                count = sum(each.name == did.name for each in right)
                return (
                    did.line,
                    f"line {did.line} of {name}@ calls {did.name}; the answer does {_times(count)} here",
                )
            return (
                did.line,
                f"line {did.line} of {name}@ calls {did.name}, where the answer calls {left[0]} first",
            )
        wrong = _differing(did.given, right[number].given)
        if wrong:
            told_ = told(did.given.get(wrong[0]), right[number].given[wrong[0]])
            return (
                did.line,
                f"line {did.line} of {name}@ calls {did.name} with another `{wrong[0]}`: it {told_}",
            )
    missing = right[len(mine)].name
    count = sum(each.name == missing for each in mine)
    often = f"calls {missing} {_times(count)}" if count else f"never calls {missing}"
    return (
        None,
        f"{name}@ {often}; the answer's lines do {_times(sum(each.name == missing for each in right))}",
    )


def _uncalled(name: str, mine: Mapping[Any, list[Call]], right: Mapping[Any, list[Call]]) -> tuple[None, str]:
    cut = any(not call.ended and not call.raised for calls in mine.values() for call in calls)
    for rank in right if mine and not cut else []:
        ours, theirs = len(mine.get(rank, [])), len(right[rank])
        if ours != theirs:
            where = "" if rank[1] is None else f" on rank {rank[1]}"
            return (
                None,
                f"{name} and its hooks run {_times(ours)}{where}, with the answer's lines {_times(theirs)}",
            )
    return None, f"with the answer's lines in {name} this test passes, so look there"


def _times(count: int) -> str:
    return ["never", "once", "twice"][count] if count < 3 else f"{count} times"


def _th(number: int) -> str:
    last = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else last}"


def told(got: Any, expected: Any, memory: bool = False) -> str:
    """One value, the other, and what is between them."""
    if isinstance(got, Numbers) and isinstance(expected, Numbers):
        if got.dtype != expected.dtype:
            return f"is {got.dtype}, where the answer has {expected.dtype}"
        if not got.values and expected.values and math.prod(got.shape):
            return "has no memory any more, where the answer still has its numbers"
        if got.shape != expected.shape:
            shapes = f"has shape {list(got.shape)}, where the answer has {list(expected.shape)}"
            return f"{shapes}{_also(lengths(got.values, expected.values))}"
        if memory and got.follows != expected.follows and equal(got, expected):
            if got.follows:
                return "is followed by autograd, and the answer's is not"
            return "is not followed by autograd, and the answer's is"
        if memory and got.nbytes != expected.nbytes and equal(got, expected):
            return f"has {got.nbytes} bytes of memory behind it, where the answer has {expected.nbytes}"
        if len(got.values) == 1:
            return f"is {_number(got.values[0])}, where the answer has {_number(expected.values[0])}" + _also(
                between(got.values, expected.values)
            )
        first = next(
            (i for i, (x, y) in enumerate(zip(got.values, expected.values, strict=False)) if x != y), 0
        )
        begin = 0 if first < 6 else first - 2
        mine, right = (_some(each.values, begin) for each in (got, expected))
        return f"is {mine}, where the answer has {right}{_also(between(got.values, expected.values))}"
    if isinstance(got, Numbers) or isinstance(expected, Numbers):
        return f"is {_one(got)}, where the answer has {_one(expected)}"
    words = between([got], [expected]) if _is_number(got) and _is_number(expected) else ""
    return f"is {_one(got)}, where the answer has {_one(expected)}{_also(words)}"


def _also(words: str) -> str:
    return f": {words}" if words else ""


def _number(value: Any) -> str:
    return shown(float(value)) if isinstance(value, float) else str(value)


def _some(values: Sequence[Any], begin: int) -> str:
    part = ", ".join(_number(value) for value in values[begin : begin + 6])
    more = ", ..." if len(values) > begin + 6 else ""
    return f"[{'..., ' if begin else ''}{part}{more}]"


def _one(value: Any) -> str:
    if isinstance(value, Numbers):
        return f"{len(value.values)} numbers, {_some(value.values, 0)}"
    return "nothing (None)" if value is None else _number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def lengths(got: Sequence[Any], expected: Sequence[Any]) -> str:
    """What is between two lists of different lengths."""
    a, b = len(got), len(expected)
    if a == b:
        return "the same numbers in another shape" if list(got) == list(expected) else ""
    if a < b and list(got) == list(expected[:a]):
        return "the last one is missing" if b - a == 1 else f"the last {b - a} are missing"
    if a > b and list(got[:b]) == list(expected):
        return f"{a - b} too many at the end"
    return f"{abs(a - b)} too {'few' if a < b else 'many'}"


def _telling(ratios: Sequence[float], got: Sequence[Any]) -> bool:
    """Whether a factor says something: between different numbers, or a whole one."""
    simple = ratios and any(
        math.isclose(x, round(x), rel_tol=1e-4) for x in (ratios[0], 1 / ratios[0]) if ratios[0]
    )
    return len(ratios) > 1 and (len(set(got)) > 1 or bool(simple and abs(ratios[0]) > 0))


def between(got: Sequence[Any], expected: Sequence[Any]) -> str:
    """The shape of the difference between two lists of numbers of one length."""
    n = len(got)
    if any(isinstance(x, float) and not math.isfinite(x) for x in got):
        return f"{sum(isinstance(x, float) and not math.isfinite(x) for x in got)} of {n} are not finite"
    if any(isinstance(y, float) and not math.isfinite(y) for y in expected):
        return ""
    near = 1e-5 * max((abs(y) for y in expected), default=0)
    wrong = [i for i, (x, y) in enumerate(zip(got, expected, strict=True)) if abs(x - y) > near]
    if n == 1:
        x, y = got[0], expected[0]
        if x == -y:
            return "the sign is turned"
        return f"{'larger' if x > y else 'smaller'} by {_number(abs(x - y))}" if y else ""
    if not any(got):
        return "all are 0"
    ratios = [got[i] / expected[i] for i in range(n) if expected[i]]
    whole = all((x == 0) == (y == 0) for x, y in zip(got, expected, strict=True))
    if whole and _telling(ratios, got) and all(math.isclose(r, ratios[0], rel_tol=1e-4) for r in ratios):
        return (
            "every sign is turned" if math.isclose(ratios[0], -1) else f"each is {ratios[0]:.4g} times that"
        )
    if len(wrong) > 1 and all(
        math.isclose(x, y, rel_tol=1e-5) for x, y in zip(sorted(got), sorted(expected), strict=True)
    ):
        for by in range(1, n):
            if all(abs(got[(i + by) % n] - expected[i]) <= near for i in range(n)):
                return f"the same numbers, {min(by, n - by)} places {'later' if by <= n - by else 'earlier'}"
        return "the same numbers in another order"
    apart = [got[i] - expected[i] for i in range(n)]
    if n > 2 and all(math.isclose(each, apart[0], rel_tol=1e-4) for each in apart):
        return f"each is {'larger' if apart[0] > 0 else 'smaller'} by {_number(abs(apart[0]))}"
    if len(wrong) == 1:
        return f"only the element at {wrong[0]} differs"
    if wrong and wrong[-1] - wrong[0] + 1 == len(wrong) < n:
        place = "first" if wrong[0] == 0 else "last" if wrong[-1] == n - 1 else ""
        return (
            f"only the {place} {len(wrong)} of {n} differ"
            if place
            else f"only those from {wrong[0]} to {wrong[-1]} differ"
        )
    return f"{len(wrong)} of {n} differ"
