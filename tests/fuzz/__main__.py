"""`python -m tests.fuzz`: random cases on zero_full beside plain torch, until time is up.

    python -m tests.fuzz --seconds 3600        the hour before a release
    python -m tests.fuzz --cases 1000 --seed 7 so many, from this seed on
    python -m tests.fuzz --case FILE           one case, of a JSON text or a file with it

What is wrong becomes small (`shrink.py`) and a script of its own (`script.py`), in build/fuzz.
"""

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench.interleave import heading
from tests.fuzz import script
from tests.fuzz.case import LOW, ONE_BIT, Case, Layout, draw
from tests.fuzz.search import EQUAL, REFUSED, Judge, Verdict
from tests.fuzz.searchers import found_by
from tests.fuzz.shrink import shrink

FOLDER = Path("build/fuzz")


def main() -> int:
    """Print a table; 1 if any case is neither equal nor refused."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, help="begin no case after so many")
    parser.add_argument("--cases", type=int, help="no more than so many")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next one has the next")
    parser.add_argument("--case", help="one case: a JSON text, a file with one, or a seed")
    parser.add_argument("--has", choices=HAS, help="only cases in which this is")
    parser.add_argument("--searchers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--no-shrink", action="store_true", help="report what is wrong as it is")
    asked = parser.parse_args()
    if asked.case is not None:
        return one(case_of(asked.case))
    if asked.seconds is None and asked.cases is None:
        parser.error("say --seconds or --cases")
    seeds = (seed for seed in itertools.count(asked.seed) if asked.has is None or HAS[asked.has](draw(seed)))
    return many(itertools.islice(seeds, asked.cases), asked.seconds, asked.searchers, not asked.no_shrink)


def case_of(text: str) -> Case:
    """A case by its seed, its JSON or the file that has it."""
    if text.isdecimal():
        return draw(int(text))
    return Case.from_json(text if text.lstrip().startswith("{") else Path(text).read_text())


def one(case: Case) -> int:
    """What becomes of it."""
    judge = Judge()
    (verdict,) = judge.verdicts([case])
    judge.close()
    print(f"{verdict.kind}\n{verdict.text}\n{verdict.where}".rstrip())
    return int(verdict.is_wrong)


def _in_a_leg(is_so: Callable[[Layout], bool]) -> Callable[[Case], bool]:
    return lambda case: any(is_so(layout) for layout, _ in case.legs())


def _at_stage(number: int) -> Callable[[Case], bool]:
    return _in_a_leg(lambda layout: layout.stage == number)


def _on_ranks(number: int) -> Callable[[Case], bool]:
    return _in_a_leg(lambda layout: layout.world == number)


HAS: dict[str, Callable[[Case], bool]] = {
    **{f"stage {number}": _at_stage(number) for number in range(4)},
    "one rank": _on_ranks(1),
    **{f"{number} ranks": _on_ranks(number) for number in (2, 3, 4)},
    "parameters in 16 bits": _in_a_leg(lambda layout: layout.precision in LOW),
    "state on the host or a disk": _in_a_leg(lambda layout: layout.tier != "device"),
    "parameters on the host or a disk": _in_a_leg(lambda layout: layout.param_tier != "device"),
    "resumed in the middle": lambda case: case.then is not None,
    "resumed at another layout": lambda case: case.then not in (None, case.first),
    "several micro-batches": lambda case: case.micro_batches > 1,
    "clipping": lambda case: case.clip > 0,
    "an overflow on one rank": lambda case: case.poison is not None,
    "tied parameters": lambda case: any(part.tied is not None for part in case.parts),
    "parameters that are frozen for a time or always": lambda case: any(
        p.frozen != (0, 0) for p in case.parts
    ),
    "a part that is not used": lambda case: len({use.part for use in case.uses}) < len(case.parts),
    "a part that is used several times in a forward": lambda case: (
        len({use.part for use in case.uses}) < len(case.uses)
    ),
    "a part that one rank uses alone": lambda case: any(use.rank is not None for use in case.uses),
    "a pipeline": lambda case: case.is_pipeline,
    "a checkpoint at another number of pipeline stages": lambda case: (
        case.then is not None and case.then.pipe != case.first.pipe
    ),
    "a layer that is tied to others of a pipeline": lambda case: (
        case.is_pipeline and len({use.part for use in case.uses}) < len(case.uses)
    ),
    "activation checkpointing": lambda case: any(use.checkpoint for use in case.uses),
    "a pass that fails between two steps": lambda case: case.between.startswith("failed"),
    "something between forward and backward": lambda case: bool(case.within),
    "small units that are joined": _in_a_leg(lambda layout: layout.joins),
    "1-bit and 0/1 rules": lambda case: case.optimizer in ONE_BIT,
}


def many(seeds: Iterator[int], seconds: float | None, searchers: int, shrinks: bool) -> int:
    """Search, and print what was found."""
    began = time.monotonic()
    counts: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    has: Counter[str] = Counter()
    wrong: list[str] = []
    for seed, verdict in found_by(seeds, seconds, searchers):
        counts[verdict.kind] += 1
        has.update(name for name, is_so in HAS.items() if is_so(draw(seed)))
        if verdict.kind == REFUSED:
            refused[verdict.text.splitlines()[-1].strip()] += 1
        if verdict.is_wrong:
            wrong.append(report(seed, verdict, shrinks))
            print(wrong[-1], file=sys.stderr, flush=True)
    minutes = (time.monotonic() - began) / 60
    print(heading())
    print(f"{counts.total()} cases in {minutes:.0f} minutes.\n\n| what became of a case | cases |\n|---|---|")
    print(f"| equal to plain torch | {counts[EQUAL]} |")
    for text, count in sorted(refused.items()):
        print(f"| refused: {text} | {count} |")
    print(f"| mismatch, unexpected error or hang | {len(wrong)} |\n")
    print("| what was in them | cases |\n|---|---|")
    for name in HAS:
        print(f"| {name} | {has[name]} |")
    return int(bool(wrong))


def report(seed: int, verdict: Verdict, shrinks: bool) -> str:
    """Make it small and write it down; what to tell."""
    case, last = draw(seed), verdict
    if shrinks:
        judge = Judge()

        def is_wrong(simpler: Case) -> bool:
            nonlocal last
            (now,) = judge.verdicts([simpler])
            same = now.is_wrong and now.signature == verdict.signature
            last = now if same else last
            return same

        if is_wrong(case):
            case = shrink(case, is_wrong)
            text = last.text
        else:
            text = f"(not every time)\n{verdict.text}"
        judge.close()
    else:
        text = verdict.text
    path = script.write(case, f"{verdict.kind}\n{text}", FOLDER, f"case_{seed}")
    first = text.splitlines()[0][:200]
    return f"seed {seed}: {verdict.kind}: {first}\n    {path}"


if __name__ == "__main__":
    sys.exit(main())
