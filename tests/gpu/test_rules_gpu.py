"""LAMB, Muon, Lion and the rules at one bit on CUDA: alone, two ranks on one device, and over NCCL on two.

The same runs pass without a GPU: on the CPU, and by host staging between two ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cases import Case
from tests.conformance import rule_claims as claims
from tests.rules import IN_FP32, RULES, Rule
from tests.staging import staged_transports
from tests.trainers import Subject
from tests.worlds import POOL
from tests.zero_full.compressed_cases import CASES as BUFFERS
from tests.zero_full.test_compressed import Outcome, agree, outcome
from zero_full.comm.communicator import Communicator

PLACES = {  # where the ranks are, how many there are, and over what they exchange
    "the CPU": (1, "gloo"),
    "staged": (2, "gloo"),
    "cuda:0, alone": (1, "gloo"),
    "cuda:0, shared": (2, "gloo"),
    "a device each": (2, "nccl"),
}
NEEDS = {"cuda:0, alone": 1, "cuda:0, shared": 1, "a device each": 2}  # devices
REASONS = {1: "needs a CUDA device", 2: "NCCL wants a device for each rank"}
# In fp32, and Newton-Schulz in bf16 rounds otherwise on another device: by less than a slice would be off.
ON_DEVICES = [replace(rule, tolerance=2e-3 if rule.name == "Muon" else IN_FP32) for rule in RULES]


def marked(place: str, *values: Any) -> Any:
    """Of what needs devices: only where there are so many."""
    needed = NEEDS.get(place, 0)
    missing = needed > 0 and torch.cuda.device_count() < needed
    marks = [pytest.mark.gpu, pytest.mark.skipif(missing, reason=REASONS[needed])] if needed else []
    return pytest.param(place, *values, marks=marks, id="-".join(map(str, (place, *values))))


@contextmanager
def at(comm: Any, place: str) -> Iterator[torch.device]:
    """This rank's device, while engines and communicators are made."""
    device = torch.device("cpu")
    if place in NEEDS:
        device = torch.device("cuda", comm.rank if place == "a device each" else 0)
        torch.cuda.set_device(device)
    with staged_transports() if place == "staged" else nullcontext():
        yield device


def seen(comm: Any, place: str, subject: Subject, case: Case) -> claims.Seen:
    """The whole run. It comes back by way of the host."""
    with at(comm, place) as device:
        found = claims.seen(comm, subject, case, device)
    assert all(value.device == device for each in found.parameters for value in each.values())
    found.parameters = [{name: p.cpu() for name, p in each.items()} for each in found.parameters]
    return found


def patience(place: str) -> dict[str, float]:
    """The first kernel of each process takes long."""
    return {"limit": 300.0, "collective": 150.0} if place in NEEDS else {}


RUNS = [
    marked(place, rule, stage)
    for place in PLACES
    for rule in ON_DEVICES
    for stage in rule.stages
    if place in NEEDS or stage == rule.stages[-1]  # one of each, without a GPU
]


@pytest.mark.parametrize(("place", "rule", "stage"), RUNS)
def test_every_step_is_the_oracles(place: str, rule: Rule, stage: int) -> None:
    subject, (world, backend) = Subject("full", stage), PLACES[place]
    case = replace(claims.by(rule, Case()), dtype=torch.float32)
    ranks = POOL.run(seen, world, place, subject, case, backend=backend, **patience(place))
    claims.parity(subject, case, ranks)


# The average at one bit --------------------------------------------------------------------------


def averaged(comm: Any, place: str) -> list[Outcome]:
    """Of every buffer."""
    with at(comm, place) as device:
        group = Communicator(dist.group.WORLD, device)
        return [outcome(group, case) for case in BUFFERS]


@pytest.mark.parametrize("place", [marked(place) for place, (world, _) in PLACES.items() if world > 1])
def test_averages_at_one_bit_are_the_algorithm_in_fp64(place: str) -> None:
    world, backend = PLACES[place]
    ranks = POOL.run(averaged, world, place, backend=backend, **patience(place))
    for case, *outcomes in zip(BUFFERS, *ranks, strict=True):
        agree(case, outcomes)
