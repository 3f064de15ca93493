"""The rules that zero_full brings beside Adam: an axis of the contract. `conformance/oracles.py` has oracles.

Nothing here imports zero_full: a learner's `check` waits for no import of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rule:
    """An optimizer by the name that a configuration file has for it, and what is asked of it."""

    name: str
    stages: tuple[int, ...] = (0, 1, 2, 3)
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)  # beside `lr` and `weight_decay`
    steps: int = 4
    stops: tuple[int, ...] = (2,)  # after how many steps it is saved, and a step is tried that is skipped
    exact: int = 4  # of the steps: these are the plain rule's on averaged gradients
    phases: Mapping[str, int] = field(default_factory=dict, hash=False)  # of a plan: a step that is such
    tolerance: float = 1e-12  # of an oracle that computes in fp64, too
    of_roots: float = 0.0  # at stages where roots of the variance travel in bf16, this one

    def __str__(self) -> str:
        return self.name

    def allowed(self, stage: int) -> float:
        """How far off it may be."""
        return self.of_roots if stage and self.of_roots else self.tolerance


ADAMS = {"betas": [0.9, 0.99], "eps": 1e-6}
WALKS = {"var_freeze_step": 7, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4}
IN_FP32 = 2e-5  # state and averages of one-bit rules have 32 bits, whatever their parameters have


def _one_bit(name: str) -> Rule:
    phases = {"warm-up": 1, "momentum at one bit": 5}
    return Rule(name, (0,), {**ADAMS, "freeze_step": 3}, 8, (2, 3, 5), 3, phases, IN_FP32)


RULES = [
    Rule("Lion", params={"betas": [0.9, 0.99]}),
    Rule("Lamb", params=ADAMS),
    Rule("Muon", params={"momentum": 0.9}),
    Rule("AdamW", params={**ADAMS, "bias_correction": False}),
    _one_bit("OneBitAdam"),
    _one_bit("OneBitLamb"),
    Rule(
        "ZeroOneAdam",
        (0, 1),
        {**ADAMS, **WALKS},
        steps=16,
        stops=(4, 5, 8, 10, 12, 13),
        exact=2,
        phases={"exact gradients": 1, "gradients at one bit": 4, "local step": 12, "synchronization": 15},
        tolerance=IN_FP32,
        of_roots=2e-3,
    ),
]
