"""Pipelines: the plain model's loss and gradients, and the formula's bytes, bubble and activations."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worlds import run_in
from zero_min import Adam, Pipeline, run_world
from zero_min.comm import Comm
from zero_min.formula import pipeline_bubble, pipeline_kept, pipeline_sent
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.pipeline import bubble, cut_layers, gpipe, one_f_one_b, replay

CONFIG = GPTConfig(context=8, layers=4, width=16)
ROWS, STEPS = 4, 2
SCHEDULES = {"gpipe": gpipe, "1F1B": one_f_one_b}


def data(step: int) -> tuple[Tensor, Tensor]:
    """The same on every rank."""
    return batch(load_text(), ROWS, CONFIG.context, torch.Generator().manual_seed(step))


@cache
def plain() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, first gradients and last parameters of the model on one process, by whole batches."""
    model = GPT(CONFIG).double()
    adam = Adam([{"params": list(model.parameters())}], lr=0.01)
    losses, first = [], {}
    for step in range(STEPS):
        model.zero_grad()
        loss = model(*data(step))
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        adam.step()
        losses.append(float(loss.detach()))
    return losses, first, {name: p.detach() for name, p in model.named_parameters()}


def train(comm: Comm, schedule: str, micro_batches: int) -> dict[str, Any]:
    """The same as a pipeline."""
    trainer = Pipeline(GPT(CONFIG).double(), comm, micro_batches, SCHEDULES[schedule], lr=0.01)
    losses, first = [], {}
    for step in range(STEPS):
        trainer.zero_grad()
        comm.ledger.clear_traffic()
        losses.append(trainer.run(*data(step)))
        named = list(trainer.stage.named_parameters())
        first = first or {name: p.grad.clone() for name, p in named if p.grad is not None}
        trainer.step()
    return {
        "losses": losses,
        "gradients": first,
        "parameters": {name: p.detach() for name, p in trainer.stage.named_parameters()},
        "sent": comm.ledger.total_sent(),
        "kept": trainer.most_kept,
        "left": len(trainer.kept),
        "order": trainer.order,
    }


def plain_name(name: str, rank: int, ranks: int) -> str:
    """The parameter of the plain model that this one of a stage is."""
    if name == "head.weight":
        return "characters.weight"
    kind, _, rest = name.partition(".")
    if kind != "blocks":
        return name
    number, _, rest = rest.partition(".")
    return f"blocks.{cut_layers(CONFIG.layers, ranks)[rank][int(number)]}.{rest}"


CASES = [("threads", 1, "1F1B", 4), ("threads", 2, "1F1B", 1), ("threads", 2, "gpipe", 4)]
CASES += [("threads", 3, "1F1B", 4), ("threads", 4, "1F1B", 4), ("threads", 4, "gpipe", 2)]
CASES += [("processes", 3, "1F1B", 4)]


@pytest.mark.parametrize(("place", "ranks", "schedule", "micro_batches"), CASES)
def test_a_pipeline_is_the_plain_model_in_the_formula_s_bytes(
    place: str, ranks: int, schedule: str, micro_batches: int
) -> None:
    losses, gradients, parameters = plain()
    runs = run_in(place, train, ranks, schedule, micro_batches)
    assert runs[-1]["losses"] == pytest.approx(losses, rel=1e-6)
    assert all(run["losses"] == [None] * STEPS for run in runs[:-1])
    seen = set()
    for rank, run in enumerate(runs):
        for what, want in (("gradients", gradients), ("parameters", parameters)):
            for name, got in run[what].items():
                whole = plain_name(name, rank, ranks)
                seen.add(whole)
                said = f"{what} of {name}, rank {rank}"
                torch.testing.assert_close(got, want[whole], rtol=1e-5, atol=1e-8, msg=said)
        assert run["kept"] == pipeline_kept(schedule, rank, ranks, micro_batches) and run["left"] == 0
    assert seen == set(parameters)
    tied = CONFIG.vocabulary * CONFIG.width
    want_sent = pipeline_sent(ranks, ROWS * CONFIG.context, CONFIG.width, tied, value=8)
    assert sum(run["sent"] for run in runs) == want_sent


def test_both_ends_of_a_tied_weight_stay_equal_to_the_bit() -> None:
    first, *_, last = run_world(train, 3, "1F1B", 2)
    assert torch.equal(first["parameters"]["characters.weight"], last["parameters"]["head.weight"])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (3.0, 1.0)])
def test_the_bubble_is_the_formula_s(schedule: str, forward: float, backward: float) -> None:
    for ranks in (1, 2, 3, 4, 7):
        for m in (1, 2, 4, 9):
            orders = [SCHEDULES[schedule](rank, ranks, m) for rank in range(ranks)]
            got = bubble(replay(orders, forward, backward))
            assert got == pytest.approx(pipeline_bubble(ranks, m), abs=1e-12), (
                f"{ranks} ranks, {m} micro-batches"
            )


def live(comm: Comm, schedule: str, micro_batches: int) -> int:
    """The most bytes that were alive at once beside what is there before a batch."""
    tokens, targets = (x.repeat(2, 1) for x in data(0))
    trainer = Pipeline(GPT(CONFIG), comm, micro_batches, SCHEDULES[schedule])
    with comm.ledger.watch():
        trainer.run(tokens, targets)
    return comm.ledger.peak


def test_1f1b_holds_fewer_bytes_than_gpipe() -> None:
    first = {schedule: run_world(live, 2, schedule, 8)[0] for schedule in SCHEDULES}
    assert first["1F1B"] < 0.6 * first["gpipe"], first


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(RuntimeError, match="4 rows cannot be cut into 3 equal micro-batches"):
        run_world(train, 2, "1F1B", 3)
    with pytest.raises(RuntimeError, match="5 ranks cannot share 4 blocks: each needs one at least"):
        run_world(train, 5, "1F1B", 1)


def test_a_replay_in_which_nobody_can_go_on_says_who_waits() -> None:
    with pytest.raises(ValueError, match=r"each rank waits for another one: rank 0 at \('B', 0\), rank 1 at"):
        replay([[("F", 0), ("B", 0), ("F", 1), ("B", 1)], [("F", 0), ("F", 1), ("B", 0), ("B", 1)]])
