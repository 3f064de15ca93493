"""From a case that is wrong to a small one that is wrong in the same way."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.fuzz.case import Case, Layout, is_valid
from tests.fuzz.model import Part, Use

SIMPLEST = Case()
TRIALS = 150


def shrink(case: Case, is_wrong: Callable[[Case], bool], trials: int = TRIALS) -> Case:
    """The smallest that is found in so many trials. Each step makes the case simpler in one respect."""
    tried = {case}
    progress = True
    while progress and trials > 0:
        progress = False
        for simpler in simpler_than(case):
            if simpler in tried or not is_valid(simpler) or trials <= 0:
                continue
            tried.add(simpler)
            trials -= 1
            if is_wrong(simpler):
                case, progress = simpler, True
                break
    return case


def simpler_than(case: Case) -> Iterator[Case]:
    """What may be left out or made usual, the largest things first."""
    if case.then is not None:
        yield replace(case, then=None)
        yield replace(case, then=None, first=case.then)
        yield replace(case, then=case.first)
    for steps in (1, 2, case.steps - 1):
        if 0 < steps < case.steps and (case.then is None or steps > 1):
            parts = tuple(_until(part, case.steps, steps) for part in case.parts)
            yield replace(case, steps=steps, parts=parts, resume_at=max(1, min(case.resume_at, steps - 1)))
    for number in reversed(range(len(case.parts))):
        if not any(part.tied == number for part in case.parts):
            yield _without(case, number)
    for place in reversed(range(len(case.uses))):
        yield replace(case, uses=case.uses[:place] + case.uses[place + 1 :])
    for name in ("first", "then"):
        layout = getattr(case, name)
        if layout is not None:
            yield from (replace(case, **{name: simpler}) for simpler in _simpler_layouts(layout))
    if case.micro_batches > 1:
        yield replace(case, micro_batches=case.micro_batches - 1)
    usual = (each.name for each in fields(Case) if each.name not in KEPT)
    for name in usual:
        if getattr(case, name) != getattr(SIMPLEST, name):
            yield replace(case, **{name: getattr(SIMPLEST, name)})
    for place, part in enumerate(case.parts):
        for simpler in (replace(part, frozen=(0, 0)), replace(part, tied=None), replace(part, kind="linear")):
            if simpler != part and not (
                simpler.tied is None and part.tied is not None and part.kind == "own"
            ):
                yield replace(case, parts=_put(case.parts, place, simpler))
    for place, use in enumerate(case.uses):
        for change in ({"checkpoint": ""}, {"rank": None}, {"micro": None}):
            other = replace(use, **change)  # type: ignore[arg-type]
            if other != use:
                yield replace(case, uses=_put(case.uses, place, other))


KEPT = ("parts", "uses", "first", "then", "steps", "micro_batches", "resume_at")


def _simpler_layouts(layout: Layout) -> Iterator[Layout]:
    for world in range(1, layout.world):
        yield replace(layout, world=world)
    if layout.tensor > 1:
        yield replace(layout, tensor=layout.tensor // 2)
    if layout.pipe:
        if layout.pipe > 1:
            yield replace(layout, pipe=layout.pipe - 1)
        if layout.schedule != "1f1b":
            yield replace(layout, schedule="1f1b")
        yield replace(layout, pipe=0, schedule="1f1b")
    for stage in range(layout.stage):
        yield replace(layout, stage=stage)
    usual: dict[str, Any] = {"precision": "fp32", "tier": "device", "param_tier": "device"}
    usual |= {"whole": False, "joins": False}
    for name, value in usual.items():
        if getattr(layout, name) != value:
            yield replace(layout, **{name: value})
    for kind in ("keys", "zero"):
        held = getattr(layout, kind)
        for key in held:
            yield replace(layout, **{kind: {k: v for k, v in held.items() if k != key}})


def _put(listed: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*listed[:place], value, *listed[place + 1 :])


def _until(part: Part, before: int, now: int) -> Part:
    """What is always frozen stays so in a shorter run."""
    return replace(part, frozen=(0, now)) if part.frozen == (0, before) else part


def _without(case: Case, number: int) -> Case:
    """The case without this part and its uses."""

    def moved(other: int) -> int:
        return other - (other > number)

    parts = [
        replace(part, tied=None if part.tied is None else moved(part.tied))
        for place, part in enumerate(case.parts)
        if place != number
    ]
    uses: list[Use] = [replace(use, part=moved(use.part)) for use in case.uses if use.part != number]
    return replace(case, parts=tuple(parts), uses=tuple(uses))
