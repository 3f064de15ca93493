"""Ways to write a training loop's step: forward, backward and step of `losses`, one for each micro-batch.

And what may be done between two of them.

Nothing of the tests is imported here: a script that reproduces a mismatch has one of these in it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

import zero_full

Losses = Sequence[Callable[[Any], Any]]  # each runs forward by what it is given, and returns the loss


def of_engine(engine: Any, optimizer: Any, losses: Losses) -> None:
    """As a DeepSpeed script: the engine counts micro-batches."""
    for loss in losses:
        engine.backward(loss(engine))
        engine.step()


def by_scale(engine: Any, optimizer: Any, losses: Losses) -> None:
    """With a `backward` of the script's own."""
    for loss in losses:
        engine.scale(loss(engine)).backward()
        engine.step()


def boundary(engine: Any, optimizer: Any, losses: Losses) -> None:
    """The script says which micro-batch is the last."""
    for number, loss in enumerate(losses):
        engine.set_gradient_accumulation_boundary(number == len(losses) - 1)
        engine.backward(loss(engine))
        engine.step()


def unmanaged(engine: Any, optimizer: Any, losses: Losses) -> None:
    """With "managed_gradient_accumulation": false."""
    for loss in losses:
        engine.backward(loss(engine))
    engine.step()


def no_sync(engine: Any, optimizer: Any, losses: Losses) -> None:
    """All but the last backward pass stay on their rank."""
    for number, loss in enumerate(losses):
        with engine.no_sync() if number < len(losses) - 1 else nullcontext():
            engine.backward(loss(engine))
        engine.step()


def of_torch(engine: Any, optimizer: Any, losses: Losses) -> None:
    """As in plain torch: the script divides."""
    optimizer.zero_grad()
    for loss in losses:
        (loss(engine.module) / len(losses)).backward()
    optimizer.step()


def own_accumulation(engine: Any, optimizer: Any, losses: Losses) -> None:
    """The same, where the configuration knows of one micro-batch only."""
    of_torch(engine, optimizer, losses)


LOOPS: dict[str, Callable[[Any, Any, Losses], None]] = {
    "engine": of_engine,
    "engine.scale": by_scale,
    "boundary": boundary,
    "unmanaged": unmanaged,
    "no_sync": no_sync,
    "torch": of_torch,
    "own accumulation": own_accumulation,
}
OF_TORCH = ("torch", "own accumulation")  # which step the optimizer and not the engine


def do_between(kind: str, engine: Any, batch: Sequence[Any], folder: Path, step: int) -> None:
    """What people do between steps, or between forward and backward; nothing of it may change anything.

    batch  arguments of the model, or a pipeline's micro-batches
    """
    if kind == "eval" and isinstance(engine, zero_full.PipelineEngine):
        engine.eval_batch(iter(batch))
    elif kind == "eval":
        engine.eval()
        with torch.no_grad():
            engine(*batch)
        engine.train()
    elif kind == "state dict":
        engine.module_state_dict()
    elif kind == "gathered":
        with zero_full.GatheredParameters(list(engine.module.parameters())):
            sum(float(p.detach().float().sum()) for p in engine.module.parameters())
    elif kind == "forward only":
        engine(*batch)
    elif kind == "save":
        engine.save_checkpoint(folder / "between", tag="one", asynchronous=step % 2 == 0)
    elif kind == "look":
        for p in engine.module.parameters():
            zero_full.safe_get_full_fp32_param(p)
    elif kind == "cache":
        engine.empty_partition_cache()
    elif kind == "record on one rank":
        if engine.recorder is not None and not engine.recorder.closed:
            engine.recorder.close()
        elif engine.global_rank == step % engine.world_size:
            engine.record(folder / f"recording{step}.json")
    elif kind in ("failed forward", "failed backward"):
        fail(engine, batch, kind == "failed forward", 1 + step)


def fail(engine: Any, batch: Sequence[Any], in_forward: bool, number: int) -> None:
    """A pass that fails at its module or gradient of this number, of which the gradients are discarded."""
    calls: list[None] = []

    def count(*_: Any) -> None:
        calls.append(None)
        if len(calls) == number:
            raise ArithmeticError("on purpose")

    if in_forward:
        hooks = [module.register_forward_pre_hook(count) for module in engine.module.modules()]
    else:
        params = [p for p in engine.module.parameters() if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(count) for p in params]
    with suppress(ArithmeticError):
        engine.backward(engine(*batch))
    for hook in hooks:
        hook.remove()
    engine.zero_grad()
