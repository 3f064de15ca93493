"""What Lightning does with zero_full's strategies, beside plain DDP: rows of the site's page "Works with".

python -m tests.lightning.matrix > site/records/works_with_lightning.md
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

from tests.lightning.launch import difference, results
from tests.works_with import Row, page

EXACT, LOW = 1e-4, 2e-2  # relative: fp32, and precisions with 8 bits or 11
EQUAL, ROUNDED, DIFFERENT = "equal to DDP", "equal to DDP up to rounding", "DIFFERENT"
KEYS = ("losses", "seen", "sum", "norms", "predicted")
ON_TWO = {  # cases whose runs by stage stand beside DDP's
    "fits": ("Trainer: fit and validate", EXACT),
    "accumulates_and_clips": ("Trainer: accumulation with a short last step, clipping", EXACT),
    "bf16": ("Trainer: bf16-mixed", LOW),
    "bf16_true": ("Trainer: bf16-true", LOW),
    "fp16": ("Trainer: 16-mixed", LOW),
    "init": ("Trainer: configure_model inside Init", EXACT),
    "manual": ("Trainer: manual optimization, two optimizers, clip_gradients", EXACT),
    "manual_without_zero_grad": ("Trainer: manual optimization without zero_grad", EXACT),
    "manual_toggled": ("Trainer: toggle_optimizer", EXACT),
    "one_run_after_another": (
        "Trainer: validate, fit, test, fit again, predict, fit from a checkpoint",
        EXACT,
    ),
    "forward_differs_by_rank": ("Trainer: a layer that one rank does not use, stages 1 and 2", EXACT),
    "compiled": ("Trainer: torch.compile (backend eager) and activation checkpointing", EXACT),
    "averages_and_tunes": (
        "Trainer: lr_find, GradientAccumulationScheduler; below stage 3 also averages of weights (SWA, EMA)",
        EXACT,
    ),
    "odd_batches": ("Trainer: a last batch that is smaller", EXACT),
    "callbacks_and_loggers": ("Trainer: EarlyStopping, save_top_k, ckpt_path best, CSVLogger", EXACT),
    "fabric_loops": (
        "Fabric: accumulation, clip_gradients, schedule, init_module (bf16: up to rounding)",
        EXACT,
    ),
    "fabric_several": ("Fabric: several models and optimizers", EXACT),
}
ALONE = ("refusals", "without_interruption", "begin", "fabric_saves", "fabric_refusals")  # judged by tests
RESUMED = "Trainer: checkpoint, resumed at any stage and from a file of DDP"
EVALUATED = "Trainer: test from a folder, from weights only, consolidate, load_from_checkpoint"
RELOADED = "Fabric: save and load"
Results = Mapping[str, Any]


def differences(runs: Mapping[str, Any], tolerance: float) -> Iterator[str]:
    """Name what differs from DDP's run."""
    for name, run in runs.items():
        kind, _, more = name.partition(" ")
        if kind not in ("1", "2", "3"):
            continue
        wanted = runs.get(f"ddp {more}".strip(), runs.get("ddp 32-true", runs.get("ddp")))
        numbers = {"losses": run} if isinstance(run, list) else run
        beside = {"losses": wanted} if isinstance(wanted, list) else wanted
        for key in KEYS:
            if key in numbers and key in beside and (numbers[key] or beside[key]):
                low = LOW if "bf16" in more else tolerance
                # weights of 16 bits are rounded themselves
                if not (key == "sum" and low == LOW) and (off := difference(numbers[key], beside[key])) > low:
                    yield f"{name} {key} by {off:.1g}"


def compared(two: Results) -> Iterator[Row]:
    """Yield the rows of two ranks."""
    for name, (case, tolerance) in ON_TWO.items():
        runs = {key: run for key, run in two[name].items() if not (name == "init" and "bf16-true" in key)}
        wrong = ", ".join(differences(runs, tolerance))
        right = EQUAL if tolerance == EXACT else ROUNDED
        yield Row("lightning", case, "2", f"{DIFFERENT}: {wrong}" if wrong else right)


def resumed(ranks: int, found: Results, two: Results) -> Iterator[Row]:
    """Yield the rows of a world that went on from two ranks' checkpoints."""
    whole, runs = two["without_interruption"], dict(found["resume"])
    adversaries = two["manual_toggled"]["ddp"]["losses"][len(two["manual_toggled"]["ddp"]["losses"]) // 2 :]
    wrong = [
        name
        for name, run in runs.items()
        if name != "manual" and difference(run["losses"], whole["losses"][6:]) > EXACT
    ]
    wrong += ["manual"] if difference(runs["manual"]["losses"], adversaries) > EXACT else []
    where = f"2, then {ranks}"
    yield Row("lightning", RESUMED, where, f"{DIFFERENT}: {wrong}" if wrong else EQUAL)
    seen = found["evaluates_checkpoints"]
    wrong = [name for name, losses in seen.items() if difference(losses, whole["seen"][2:8]) > EXACT]
    yield Row("lightning", EVALUATED, where, f"{DIFFERENT}: {wrong}" if wrong else EQUAL)
    loads = found["fabric_loads"]
    wanted = two["fabric_saves"]["losses"][4:]
    wrong = [stage for stage in ("1", "3") if difference(loads[stage]["losses"], wanted) > EXACT]
    wrong += [s for s in ("1", "3") if difference(loads[f"{s} from ddp"]["losses"], wanted[:1]) > EXACT]
    yield Row("lightning", RELOADED, where, f"{DIFFERENT}: {wrong}" if wrong else EQUAL)


def on_two(folder: Path) -> dict[str, Any]:
    """Run all cases of two ranks, whose checkpoints are in the folder."""
    return results(2, folder, *ON_TWO, *ALONE)


def on(ranks: int, folder: Path) -> dict[str, Any]:
    """Run what goes on from two ranks' checkpoints, on this many."""
    own = copytree(folder, folder.with_name(f"{folder.name}_{ranks}"))
    return results(ranks, own, "resume", "evaluates_checkpoints", "fabric_loads")


def main() -> int:
    """Print the record."""
    with TemporaryDirectory() as outer:
        folder = Path(outer) / "two"
        folder.mkdir()
        two = on_two(folder)
        rows = [
            *compared(two),
            *(row for ranks in (1, 2, 3) for row in resumed(ranks, on(ranks, folder), two)),
        ]
        print(page("python -m tests.lightning.matrix", rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
