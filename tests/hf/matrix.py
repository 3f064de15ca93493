"""What Hugging Face's unmodified programs do with zero_full by DeepSpeed's name, beside one plain process.

    python -m tests.hf.matrix > site/records/works_with_hf.md

Each run is one launch of `cases.py`, with all its cases in the same processes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.works_with import Row, page

ROOT = Path(__file__).parents[2]
STAGES = (1, 2, 3)
# Stage 1 differs from stage 2 in when gradients are averaged: these cases see that.
AT_STAGE_1 = [
    "Trainer: accumulation, clipping, schedule, evaluation, saved weights",
    "Trainer: last accumulation of an epoch is short",
    "Accelerate: own loop with a DeepSpeedPlugin",
]
EQUAL, WRONG = "equal to one process", "WRONG"
RESUMED = "Trainer: resumed from the checkpoint"
ELSEWHERE = "Trainer: resumed at another number of ranks and another stage"
# Cases that no plain process can be compared with, and the reason.
ALIKE = {
    "Trainer: bf16": "plain bf16 is autocast",
    "Trainer: optimizer and schedule from the file, all auto": "DeepSpeed's schedules begin one step later",
    "LoRA on a bf16 model, bf16: adapters are fp32": "plain bf16 is autocast",
    "TRL: GRPO": "it samples",
}
NOT_GATHERED = "Trainer: stage3_gather_16bit_weights_on_model_save false"
INSTEAD = "at stage 3 a checkpoint instead of whole weights"
INSTEAD = "at stage 3 a checkpoint instead of whole weights"
Numbers = Mapping[str, Mapping[str, Sequence[float]]]  # by case


class LaunchFailedError(RuntimeError):
    """A launch ended with an error."""


def launch(command: Sequence[str], timeout: float = 500) -> str:
    """Run Python with these arguments, and return what it has printed to stdout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )
    if done.returncode:
        raise LaunchFailedError(f"{' '.join(command)}: {done.stderr[-6000:]}")
    return done.stdout


def run(
    folder: Path, stage: int | None, ranks: int = 1, names: Iterable[str] = (), resume: Path | None = None
) -> Numbers:
    """Run cases (none: all) and return what they have found."""
    own = folder / f"stage {stage}, {ranks} ranks"
    own.mkdir()
    arguments = ["-m", "tests.hf.cases", "--out", str(own / "found.json"), "--folder", str(own)]
    if resume is not None:
        arguments += ["--resume", str(resume)]
    if stage is not None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        arguments = [*torchrun, "-m", "zero_full", "as-deepspeed", *arguments, "--stage", str(stage)]
    print(f"stage {stage}, {ranks} ranks", file=sys.stderr, flush=True)
    launch([*arguments, *names])
    found: Numbers = json.loads((own / "found.json").read_text())
    return found


def off(got: Mapping[str, Sequence[float]], want: Mapping[str, Sequence[float]], last: bool = False) -> str:
    """Say which numbers differ, by more than rounding; "" if none do. `last`: of a resumed run, its end."""
    for key, values in want.items():
        mine = got[key]
        expected = values[-len(mine) :] if last else values
        if len(mine) != len(expected) or not mine:
            return f"{key}: {len(mine)} instead of {len(expected)} numbers"
        apart = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(mine, expected, strict=True)]
        if not all(each < 1e-5 for each in apart):
            return f"{key} differs: {list(mine)} instead of {list(expected)}"
    return ""


def framework_of(case: str) -> str:
    """The distribution that a case is about."""
    kinds = {"TRL": "trl", "Accelerate": "accelerate", "LoRA": "peft", "AdaLoRA": "peft"}
    return next((name for start, name in kinds.items() if case.startswith(start)), "transformers")


def compared(plain: Numbers, by_stage: Mapping[int, Numbers]) -> Iterator[Row]:
    """Yield a row for each case; its result is what was seen."""
    for name, want in plain.items():
        found = {stage: cases[name] for stage, cases in by_stage.items() if name in cases}
        if name == NOT_GATHERED:
            right = found[3] == {"whole weights": [False], "checkpoint": [True]} and found[2] == want
            yield Row("transformers", name, "2", INSTEAD if right else f"{WRONG}: {found}")
            continue
        wanted = found[2] if name in ALIKE else want
        wrong = {stage: text for stage, numbers in found.items() if (text := off(numbers, wanted))}
        result = f"the same at stages 2 and 3 ({ALIKE[name]})" if name in ALIKE else EQUAL
        yield Row(framework_of(name), name, "2", f"{WRONG}: {wrong}" if wrong else result)


def everything(folder: Path) -> list[Row]:
    """Run all cases at all stages, and resume with four ranks what two ranks have saved."""
    plain = run(folder, None)
    by_stage = {stage: run(folder, stage, 2, AT_STAGE_1 if stage == 1 else ()) for stage in STAGES}
    rows = list(compared(plain, by_stage))
    wrong = []
    for stage, other in ((3, 2), (2, 3)):
        found = run(folder, stage, 4, [RESUMED], folder / f"stage {other}, 2 ranks" / "resumable")
        wrong.append(off(found[RESUMED], plain[RESUMED], last=True))
    failed = "; ".join(filter(None, wrong))
    rows.append(Row("transformers", ELSEWHERE, "2, then 4", f"{WRONG}: {failed}" if failed else EQUAL))
    return rows


def main() -> int:
    """Print the record."""
    with TemporaryDirectory() as folder:
        print(page("python -m tests.hf.matrix", everything(Path(folder))), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
