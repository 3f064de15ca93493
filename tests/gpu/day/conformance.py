"""Does a run on the device end where plain AdamW on a CPU ends? Also after an overflow, and when clipping."""

from typing import Any

import torch
from torch import Tensor

import zero_full
from tests.gpu.day.place import PRECISIONS, RELEASES, Place
from tests.zero_full.runs import Net, config, data, reference

STAGES = (0, 1, 2, 3)
STEPS = 4
CLIP = 0.05  # below every norm of this run
ALLOWED = {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.01}


def check(place: Place) -> None:
    """Every stage in every precision, with and without overlap. What is wrong is raised at the end."""
    wrong = []
    for stage in STAGES:
        for precision, keys in PRECISIONS.items():
            for overlap in (True,) if place.tiny else (False, True):
                zero = {"overlap_comm": overlap, **RELEASES}
                given = config(stage, zero_optimization=zero, gradient_accumulation_steps=2, **keys)
                want = reference(place.world, STEPS, micro_batches=2)
                wrong += judged(
                    place, given, want, ALLOWED[precision], f"stage {stage}, {precision}", overlap
                )
        clipped = config(stage, gradient_clipping=CLIP, zero_optimization=RELEASES)
        wrong += judged(
            place, clipped, reference(place.world, STEPS, clip=CLIP), 1e-5, f"stage {stage}, clipped", None
        )
        wrong += overflow(place, stage)
    if wrong:
        raise ArithmeticError(f"not where plain AdamW ends: {', '.join(wrong)}")


def judged(
    place: Place,
    given: dict[str, Any],
    want: dict[str, Tensor],
    tolerance: float,
    run: str,
    overlap: bool | None,
) -> list[str]:
    """Train, say how far off it is, and return the run's name if that is too far."""
    engine = zero_full.initialize(model=Net().to(place.device), config=given)[0]
    dtype = next(engine.parameters()).dtype
    for step in range(STEPS):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(data(step, micro, place.rank, dtype).to(place.device)))
            engine.step()
    got = {name: p.cpu() for name, p in engine.module_state_dict().items()}
    engine.destroy()
    off = max(float((got[name].float() - want[name]).abs().max()) for name in want)
    fine = off <= tolerance
    place.say(run=run, overlap=overlap, **{"off by": f"{off:.1e}", "allowed": f"{tolerance:.0e}"}, fine=fine)
    return [] if fine else [run]


def overflow(place: Place, stage: int) -> list[str]:
    """An infinity on the last rank skips the step on all of them and halves the scale."""
    keys = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    engine = zero_full.initialize(
        model=Net().to(place.device), config=config(stage, zero_optimization=RELEASES, **keys)
    )[0]
    applied, scales = [], []
    for step in range(2):
        x = data(step, 0, place.rank, torch.float16)
        if step == 0 and place.rank == place.world - 1:
            x[0, 0] = float("inf")
        engine.backward(engine(x.to(place.device)))
        engine.step()
        applied.append(engine.was_step_applied())
        scales.append(engine.loss_scale())
    engine.destroy()
    fine = applied == [False, True] and scales == [128, 128]
    place.say(overflow=f"stage {stage}", applied=applied, scales=scales, fine=fine)
    return [] if fine else [f"overflow at stage {stage}"]
