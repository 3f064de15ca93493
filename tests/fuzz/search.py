"""From cases to verdicts: many cases run in one job of a pool, and each one alone where the job fails."""

import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.fuzz.case import Case
from tests.fuzz.compare import Comparison, everywhere_equal, pipelines
from tests.fuzz.refusals import expected_refusal, matches
from tests.fuzz.run import Shown, legs
from tests.worlds import Pool, RankError

EQUAL, REFUSED, MISMATCH, ERROR, HANG = "equal", "refused", "mismatch", "error", "hang"
WRONG = (MISMATCH, ERROR, HANG)
CASE_LIMIT_S, COLLECTIVE_LIMIT_S = 40.0, 15.0


@dataclass(frozen=True)
class Verdict:
    """What became of a case."""

    kind: str
    text: str = ""
    where: str = ""
    worst: float = 0.0  # the largest part of a tolerance that was used

    @property
    def is_wrong(self) -> bool:
        return self.kind in WRONG

    @property
    def signature(self) -> str:
        """The same for what is wrong in the same way: of an error, its type."""
        found = re.search(r"rank \d+: (\w+):", self.text) if self.kind == ERROR else None
        return self.kind if found is None else f"{self.kind} {found[1]}"


@dataclass
class Open:
    """A case whose legs are being run."""

    case: Case
    folder: str
    shown: list[list[Shown]]  # by leg and rank
    verdict: Verdict | None = None

    @property
    def next_leg(self) -> int:
        return len(self.shown)


class Judge:
    """A pool of four ranks, and what it says."""

    def __init__(self, defect: str = "", limit_s: float = CASE_LIMIT_S) -> None:
        torch.set_num_threads(1)  # as ranks do: threads split sums, which rounds them in another order
        self.pool, self.defect, self.limit_s = Pool(), defect, limit_s

    def verdicts(self, cases: Sequence[Case]) -> list[Verdict]:
        """On each of them."""
        with tempfile.TemporaryDirectory(prefix="zero_full_fuzz_") as folder:
            opened = []
            for number, case in enumerate(cases):
                own = Path(folder) / str(number)
                own.mkdir()
                opened.append(Open(case, str(own), []))
            while waiting := [o for o in opened if o.verdict is None and o.next_leg < len(o.case.legs())]:
                by_world: dict[tuple[int, str], list[Open]] = {}
                for each in waiting:
                    layout = each.case.legs()[each.next_leg][0]
                    # DTensor remembers meshes of earlier cases: their groups must have the same names.
                    alone = each.folder if layout.tensor > 1 else ""
                    by_world.setdefault((layout.ranks, alone), []).append(each)
                for (world, _), some in by_world.items():
                    self._run_all(some, world)
            return [self._judged(each) for each in opened]

    def close(self) -> None:
        """No process is left."""
        self.pool.stop()

    def _run_all(self, opened: Sequence[Open], world: int) -> None:
        """The next leg of each, in as few jobs as possible."""
        rest = list(opened)
        while rest:
            done = self._run_some(rest, world)
            rest = rest[done:]

    def _run_some(self, opened: Sequence[Open], world: int) -> int:
        """The next legs until one fails; how many are done with."""
        works = [(each.case, each.next_leg, each.folder) for each in opened]
        limit = self.limit_s + len(works)
        try:
            by_rank = self.pool.run(
                legs, world, works, self.defect, limit=limit, collective=COLLECTIVE_LIMIT_S
            )
        except RankError as error:
            self.pool.stop()
            if len(opened) > 1:  # whose fault is it?
                for each in opened:
                    self._again(each)
                    self._run_some([each], world)
                return len(opened)
            kind = HANG if "did not answer" in str(error) else ERROR
            opened[0].verdict = Verdict(kind, str(error)[:3000])
            return 1
        done = max(len(shown) for shown in by_rank)
        for place, each in enumerate(opened[:done]):
            shown = [found[place] if place < len(found) else Shown() for found in by_rank]
            each.shown.append(shown)
            if any(one.error for one in shown):
                each.verdict = _of_errors(each.case, shown)
                if each.verdict.is_wrong:
                    self.pool.stop()  # who knows what is left there
        return done

    def _again(self, opened: Open) -> None:
        """Empty what a leg that was cut off has left in the folder, if it was the first."""
        if opened.next_leg == 0:
            shutil.rmtree(opened.folder)
            Path(opened.folder).mkdir()

    def _judged(self, opened: Open) -> Verdict:
        if opened.verdict is not None:
            return opened.verdict
        expected = expected_refusal(opened.case)
        if expected is not None:
            return Verdict(MISMATCH, f"was not refused, and should be: {expected}")
        comparison, problems = Comparison(opened.case), list[str]()
        for number, shown in enumerate(opened.shown):
            layout = opened.case.legs()[number][0]
            if layout.pipe:
                shown, unequal = pipelines(opened.case, layout, shown)
                problems += unequal
            problems += everywhere_equal(opened.case, shown)
            shown = shown[:: layout.tensor]  # tensor-parallel ranks are neighbours
            problems += comparison.leg(number, shown)
            if problems:
                break
        if problems:
            return Verdict(MISMATCH, "\n".join(problems[:12]), worst=comparison.worst)
        return Verdict(EQUAL, worst=comparison.worst)


def _of_errors(case: Case, shown: Sequence[Shown]) -> Verdict:
    """A refusal has the same words on all ranks, and was to be expected."""
    told = {each.error for each in shown}
    text = "\n".join(f"rank {rank}: {each.error or 'no error'}" for rank, each in enumerate(shown))
    expected = expected_refusal(case)
    if len(told) == 1 and expected is not None and matches(expected, shown[0].error):
        return Verdict(REFUSED, shown[0].error)
    where = next(each.where for each in shown if each.error)
    return Verdict(ERROR, text, where)
