"""`python -m tests.hostile [RANKS]`: the whole matrix, as a table for the site."""

import sys

from tests.bench.interleave import heading
from tests.hostile import parts
from tests.hostile.cells import STAGES, Cell, everything, run
from tests.hostile.event import EVENTS
from tests.hostile.players import NUMBERS
from tests.worlds import POOL


def main(ranks: int) -> int:
    """Print it; 1 if any cell is neither equal nor refused by name."""
    verdicts = run(everything(), ranks)
    print(heading())
    print(f"On {ranks} ranks, {len(verdicts)} runs of three steps.\n")
    print("| in the second step | " + " | ".join(f"stage {stage}" for stage in STAGES) + " |")
    print("|---|" + "---|" * len(STAGES))
    for event in EVENTS:
        print(f"| {event} | " + " | ".join(_summary(verdicts, event, stage) for stage in STAGES) + " |")
    wrong = [f"{cell}: {text}" for cell, text in verdicts.items() if text]
    for kind in parts.EVENTS:
        wrong += _parts(kind, ranks)
    print(f"\n{len(wrong)} runs were neither.", *wrong, sep="\n")
    return 1 if wrong else 0


def _parts(kind: str, ranks: int) -> list[str]:
    """Print the table of one kind of runs whose ranks have parts of a model. Returns what is wrong."""
    found = parts.run((cell for cell in parts.everything() if cell.kind == kind), ranks)
    print(f"\n{kind.capitalize()}-parallel ranks, {len(found)} runs of three steps.\n")
    stages = parts.STAGES[kind]
    print("| in the second step | " + " | ".join(f"stage {stage}" for stage in stages) + " |")
    print("|---|" + "---|" * len(stages))
    for event, (_, refused, _) in parts.EVENTS[kind].items():
        words = "equal" if refused is None else "refused"
        bad = {cell.stage for cell, text in found.items() if cell.event == event and text}
        print(f"| {event} | " + " | ".join("**wrong**" if s in bad else words for s in stages) + " |")
    return [f"{cell}: {text}" for cell, text in found.items() if text]


def _summary(verdicts: dict[Cell, str], event: str, stage: int) -> str:
    here = [cell for cell in verdicts if cell.event == event and cell.stage == stage]
    if any(verdicts[cell] for cell in here):
        return "**wrong**"
    refused = {cell.numbers for cell in here if cell.refusal is not None}
    equal = {cell.numbers for cell in here if cell.refusal is None}
    if not refused:
        return "equal"
    partly = refused & equal  # where a loop of some kind is refused
    whole = [name for name in NUMBERS if name in refused - partly]
    if not equal:
        return "refused"
    told = [f"refused in {', '.join(whole)}"] if whole else []
    told += [f"in {', '.join(sorted(partly))} refused where the loss scale is missing"] if partly else []
    return "equal; " + "; ".join(told)


if __name__ == "__main__":
    code = main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    POOL.stop()
    sys.exit(code)
