"""What one rank does in the notebooks: a few steps of a small GPT, and what can be said of them afterwards.

Each of these is given to `run_world`, which calls it on every rank. A notebook shows one with `train??`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from zero_min import DynamicScale, MixedPrecision, Stage0, Stage2, ZeroOneAdam
from zero_min.comm import Comm
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import held

CONFIG, TEXT = GPTConfig(context=16, layers=1, width=32), load_text()


def train(
    comm: Comm,
    stage: Callable[..., Any] = Stage0,
    steps: int = 5,
    micro_batches: int = 1,
    lr: float = 3e-3,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, Any]:
    """Train under the care of any stage, on this rank's own part of the text; traffic is the last step's."""
    generator = torch.Generator().manual_seed(comm.rank)
    model = GPT(CONFIG).to(dtype)
    trainer = stage(model, comm, lr=lr, **options)
    losses = []
    for _ in range(steps):
        comm.ledger.clear_traffic()
        trainer.zero_grad()
        for _ in range(micro_batches):
            loss = model(*batch(TEXT, 4, CONFIG.context, generator)) / micro_batches
            comm.ledger.note("backward")
            trainer.backward(loss)
        whole = sum(p.grad is not None for p in model.parameters())
        comm.ledger.note("step")
        trainer.step()
        comm.ledger.note("done")
        losses.append(loss.item() * micro_batches)
    result = {
        "losses": losses,
        "held": {kind: held(tensors) for kind, tensors in trainer.holdings().items()},
        "sent": comm.ledger.total_sent(),
        "moved": dict(comm.ledger.moved),
        "events": list(comm.ledger.events),
        "whole gradients": whole,
        "a weight": model.blocks[0].up.weight.detach().clone(),
    }
    with getattr(trainer, "gathered", nullcontext)():  # at stage 3 all ranks must ask for the whole together
        return result | {"weights": weights_of(model)}


def train_watched(comm: Comm, *arguments: Any, **options: Any) -> dict[str, Any]:
    """The same, while the ledger counts the bytes that are alive."""
    with comm.ledger.watch():
        return train(comm, *arguments, **options)


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    """All weights, one after another."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_scaled(
    comm: Comm, start: float = 2.0**20, window: int = 4, hysteresis: int = 1, steps: int = 24
) -> tuple[list[tuple[float, bool]], float]:
    """Train in fp16 at stage 2: (scale, applied) of every step, and the last loss."""
    generator = torch.Generator().manual_seed(comm.rank)
    model = GPT(CONFIG).half()
    scale = DynamicScale(start, window=window, hysteresis=hysteresis)
    trainer = MixedPrecision(Stage2(model, comm, lr=3e-3), scale)
    seen = []
    for _ in range(steps):
        trainer.zero_grad()
        loss = model(*batch(TEXT, 8, CONFIG.context, generator))
        trainer.backward(loss)
        report = trainer.step()
        seen.append((report.scale, report.applied))
    return seen, loss.item()


def train_apart(comm: Comm, steps: int, **schedule: Any) -> dict[str, Any]:
    """Train with 0/1 Adam: what the rank sends in each step, and where its weights are after it."""
    generator = torch.Generator().manual_seed(comm.rank)
    model = GPT(CONFIG)
    trainer = ZeroOneAdam(model, comm, lr=1e-3, **schedule)
    comm.ledger.clear_traffic()
    sent, weights, before = [], [], 0
    for _ in range(steps):
        comm.ledger.note("step")
        trainer.zero_grad()
        trainer.backward(model(*batch(TEXT, 4, CONFIG.context, generator)))
        trainer.step()
        sent.append(comm.ledger.total_sent() - before)
        before += sent[-1]
        weights.append(weights_of(model))
    return {
        "sent": sent,
        "weights": weights,
        "rounds": trainer.rounds,
        "held": {kind: held(tensors) for kind, tensors in trainer.holdings().items()},
        "events": list(comm.ledger.events),
    }


def rows(step: int) -> tuple[torch.Tensor, ...]:
    """The 8 rows of text that all ranks together read in a step."""
    return batch(TEXT, 8, CONFIG.context, torch.Generator().manual_seed(step))


def losses_of(engine: Any, steps: int) -> list[float]:
    """A loop as DeepSpeed has it: the engine does the backward and the step."""
    losses = []
    for step in range(steps):
        loss = engine(*rows(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def plain_losses(steps: int, weight_decay: float = 0.1, clip: float | None = 1.0) -> list[float]:
    """PyTorch alone: AdamW on one process."""
    model, losses = GPT(CONFIG), []
    adam = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=weight_decay)
    for step in range(steps):
        adam.zero_grad()
        loss = model(*rows(step))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        adam.step()
        losses.append(loss.item())
    return losses
