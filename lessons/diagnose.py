"""What went wrong, in plain words: from what a test found to the name of a mistake. Pure functions."""

import math
import re
from dataclasses import dataclass
from typing import Any

from lessons.evidence import Facts, alike, is_number, numbers, shown

SAID = {
    "blank": "the task is not written yet",
    "alone": "each rank still has its own value: nothing was exchanged",
    "sum": "it is {world} times too much: the sum over {world} ranks, where the mean was asked",
    "mean of the mean": "it is 1/{world} of what it should be: divided by the number of ranks once too often",
    "last only": "it is 1/{micro} of what it should be: one micro-batch, or their mean, not their sum",
    "ratio": "every number is {ratio} times what it should be",
    "sign": "every number has the wrong sign",
    "does not happen": "this does not happen: {missing}",
    "happens too much": "this happens where it should not: {extra}",
    "at another time": "the right things happen at another time: there should be {missing}, and no {extra}",
    "everybody": "an all_reduce is in the diary: every rank got everything, and needs only its part",
    "one by one": "the same is sent in {got_calls} calls where {calls} is enough: use one collective",
    "silent": "a collective is missing from the diary: {missing}. The ranks exchanged nothing there",
    "another call": "the diary has other collectives than it should: {extra} instead of {missing}",
    "too many calls": "the diary has more collectives than it should: {extra} too often",
    "order": "the numbers are right, but in another order",
    "padding": "without the zeros at the end both are the same: the padding is wrong",
    "cut": "the total is right, but it is cut in other places",
    "length": "there are {got_count} numbers, and there should be {count}",
    "forgotten None": "something is kept that should be freed: it must be None, or empty, afterwards",
    "let go": "something was freed that is needed later",
    "no advance": "nothing has changed: it is what it was before",
    "changed": "it was changed, and must stay as it is: compute in a tensor of your own",
    "not collected": "only a part is new, the rest is as before: the other ranks' parts were never collected",
    "foreign slice": "rank {rank} has what belongs to rank {other}",
    "ranks differ": "the ranks differ, and they must agree",
    "not finite": "there is {nonfinite} where a number should be",
    "dtype": "the type of number is wrong",
    "copy": "it is a copy with memory of its own, where a view of the same memory was asked",
    "view": "it is a view of the same memory, where a copy with memory of its own was asked",
    "memory": "the memory behind it has another size",
    "too many bytes": "{ratio} times the bytes that are needed",
    "too few bytes": "{ratio} times the bytes that are needed: something was not sent, or not all of it",
    "nothing": "there is no answer at all: is the `return`, or the assignment, missing?",
    "waiting ranks": "the ranks do not make the same calls: another one, another length, or no call at all",
    "deadlock": "every running rank waits to receive, and none will send: send first, and as often",
    "unequal parts": "a collective needs parts of one size from all ranks, and they differ: is it padded?",
    "hook returns": "a hook has returned something, and must return None: no `return`, or a bare one",
    "refused": "the collective cannot take what it was given",
    "misspelt": "there is no `{wrong}` here: is `{right}` meant?",
    "raises": "Python stopped in your line",
    "lookalike": "{cause}",
    "other": "the numbers differ, and not by any pattern that is known here",
}
REFUSED = (
    "are they exchanged?",
    "give every rank one, empty or not",
    "elements from the ranks, and gets",
    "resize_ it first",
    "needs contiguous memory",
)


@dataclass(frozen=True)
class Finding:
    """The name of a mistake, which is a key of `SAID`, and what to say about this one."""

    mistake: str
    words: str


def finding(mistake: str, **facts: object) -> Finding:
    """The mistake with its sentence filled in."""
    return Finding(mistake, SAID[mistake].format(**facts))


def of_facts(facts: Facts) -> Finding:
    """What two sides that do not agree have in common."""
    for cause, value in facts.lookalikes.items():
        if alike(facts.got, value, 1e-5):
            return finding("lookalike", cause=cause)
    if facts.alone is not None and alike(facts.got, facts.alone, 1e-5):
        return finding("alone")
    if _empty(facts.got) and not _empty(facts.expected):
        return finding("nothing")
    if facts.about == "dtype":
        return finding("dtype")
    by_kind = {"calls": _calls, "events": _events, "bytes": _bytes, "memory": _memory, "kept": _kept}
    return by_kind.get(facts.about, _values)(facts)


def _empty(value: Any) -> bool:
    """Whether this is None, or None for every rank."""
    return value is None or (isinstance(value, list) and bool(value) and all(each is None for each in value))


def of_error(name: str, message: str, misspelt: tuple[str, str] | None = None) -> Finding:
    """What an exception says that came out of the learner's lines, or out of a collective below them."""
    if misspelt is not None:
        return finding("misspelt", wrong=misspelt[0], right=misspelt[1])
    if name == "NotImplementedError":
        return finding("blank")
    if "hook returned" in message:
        return finding("hook returns")
    if "nobody can go on" in message:
        return finding("deadlock")
    if re.search(r"never arrived|made different calls|sends nothing", message):
        return finding("waiting ranks")
    if "needs equal parts" in message:
        return finding("unequal parts")
    if any(words in message for words in REFUSED):
        return finding("refused")
    return finding("raises")


def _values(facts: Facts) -> Finding:
    got, expected = numbers(facts.got), numbers(facts.expected)
    if got is None or expected is None:
        return finding("other")
    if not all(map(math.isfinite, got)):
        return finding("not finite", nonfinite=next(shown(float(x)) for x in got if not math.isfinite(x)))
    if len(got) != len(expected):
        return _lengths(got, expected)
    if alike(got, expected, 1e-5):  # one by one, so the difference is where the lists end
        return finding("cut")
    if facts.before is not None and alike(expected, numbers(facts.before)):
        return finding("changed")
    if facts.before is not None and alike(got, numbers(facts.before), 1e-9):
        return finding("no advance")
    ratio = _ratio(got, expected)
    found = _by(ratio, facts, len(got)) if ratio is not None else None
    return found or _among_ranks(facts) or _partly(facts, got, expected) or _shuffled(got, expected)


def _lengths(got: list[float], expected: list[float]) -> Finding:
    shorter, longer = sorted((got, expected), key=len)
    if alike(longer[: len(shorter)], shorter) and not any(longer[len(shorter) :]):
        return finding("padding")
    if _without_zeros(got) == _without_zeros(expected):
        return finding("padding")
    return finding("length", got_count=len(got), count=len(expected))


def _without_zeros(values: list[float]) -> list[float]:
    return [value for value in values if value]


def _ratio(got: list[float], expected: list[float]) -> float | None:
    """The one factor between all numbers, if there is one; zeros must meet zeros."""
    if any((x == 0) != (y == 0) for x, y in zip(got, expected, strict=True)):
        return None
    ratios = [x / y for x, y in zip(got, expected, strict=True) if y]
    if not ratios or not all(math.isclose(each, ratios[0], rel_tol=1e-4) for each in ratios):
        return None
    return ratios[0]


def _by(ratio: float, facts: Facts, count: int) -> Finding | None:
    world, micro = facts.world, facts.micro_batches
    if world > 1 and math.isclose(ratio, world, rel_tol=1e-4):
        return finding("sum", world=world)
    if micro > 1 and math.isclose(ratio * micro, 1, rel_tol=1e-4):
        return finding("last only", micro=micro)
    if world > 1 and math.isclose(ratio * world, 1, rel_tol=1e-4):
        return finding("mean of the mean", world=world)
    if count == 1:
        return None  # any two numbers have a ratio
    if math.isclose(ratio, -1, rel_tol=1e-4):
        return finding("sign")
    return finding("ratio", ratio=f"{ratio:.4g}")


def _among_ranks(facts: Facts) -> Finding | None:
    """Whether each rank that is wrong has what another rank should have."""
    if not facts.by_rank:
        return None
    found = None
    for rank, (mine, right) in enumerate(zip(facts.got, facts.expected, strict=True)):
        if alike(mine, right, 1e-5):
            continue
        others = [other for other, theirs in enumerate(facts.expected) if alike(mine, theirs, 1e-5)]
        if not others:
            return None
        found = found or finding("foreign slice", rank=rank, other=others[0])
    return found


def _partly(facts: Facts, got: list[float], expected: list[float]) -> Finding | None:
    """Whether every number is either as it should be or as it was."""
    before = numbers(facts.before) if facts.before is not None else None
    if before is None or len(before) != len(got):
        return None
    rows = zip(got, expected, before, strict=True)
    if all(alike(x, right, 1e-5) or alike(x, old, 1e-9) for x, right, old in rows):
        return finding("not collected")
    return None


def _shuffled(got: list[float], expected: list[float]) -> Finding:
    if alike(sorted(got), sorted(expected), 1e-5):
        return finding("order")
    if all(isinstance(x, int) and x >= 0 for x in (*got, *expected)) and sum(got) == sum(expected):
        return finding("cut")
    if alike(sorted(_without_zeros(got)), sorted(_without_zeros(expected)), 1e-5):
        return finding("padding")
    return finding("other")


def _calls(facts: Facts) -> Finding:
    """Lists of collectives, of one rank or of all."""
    got, expected = facts.got, facts.expected
    if facts.by_rank:
        if any(calls != got[0] for calls in got) and all(calls == expected[0] for calls in expected):
            return finding("ranks differ")
        pairs = zip(got, expected, strict=True)
        got, expected = next((mine, right) for mine, right in pairs if mine != right)
    missing, extra = _beyond(expected, got), _beyond(got, expected)
    if "all_reduce" in extra and "all_reduce" not in expected:
        return finding("everybody")
    if missing and not extra:
        return finding("silent", missing=" and ".join(missing))
    if extra and missing and len(extra) > len(missing):
        return finding("one by one", got_calls=len(extra), calls=len(missing))
    if extra and missing:
        return finding("another call", extra=" and ".join(extra), missing=" and ".join(missing))
    if extra:
        return finding("too many calls", extra=" and ".join(dict.fromkeys(extra)))
    return finding("order")


def _events(facts: Facts) -> Finding:
    """Lists of what happens, in words."""
    missing, extra = _beyond(facts.expected, facts.got), _beyond(facts.got, facts.expected)
    words = {"missing": " and ".join(missing), "extra": " and ".join(extra)}
    if missing and extra:
        return finding("at another time", **words)
    if missing or extra:
        return finding("does not happen" if missing else "happens too much", **words)
    return finding("order")


def _beyond(some: list[str], others: list[str]) -> list[str]:
    """What is in the first list more often than in the second."""
    left = list(others)
    found = []
    for each in some:
        if each in left:
            left.remove(each)
        else:
            found.append(each)
    return found


def _bytes(facts: Facts) -> Finding:
    got, expected = numbers(facts.got), numbers(facts.expected)
    if got is None or expected is None:
        return finding("other")
    ratio = sum(got) / sum(expected) if sum(expected) else math.inf
    if math.isclose(ratio, 1):
        return finding("ranks differ") if facts.by_rank else finding("order")
    return finding("too many bytes" if ratio > 1 else "too few bytes", ratio=f"{ratio:.3g}")


def _memory(facts: Facts) -> Finding:
    """`True` says that memory is shared; a number is its size in bytes."""
    if isinstance(facts.expected, bool):
        return finding("copy" if facts.expected else "view")
    got, expected = _total(facts.got), _total(facts.expected)
    return finding("view" if got > expected else "memory")


def _total(value: Any) -> float:
    return sum(numbers(value) or [])


def _kept(facts: Facts) -> Finding:
    """`None`, an empty list or a number of zero says that nothing is to be kept."""
    asked = facts.expected if isinstance(facts.expected, list) else [facts.expected]
    if not any(each for each in asked if each is not None):
        return finding("forgotten None")
    if is_number(facts.got) and facts.got > _total(facts.expected):
        return finding("other")
    return finding("let go")
