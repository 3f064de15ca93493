"""The engine: one training step out of micro-batches. It owns no numerics.

    forward    the model's own
    backward   scales the loss; gradients are averaged on the way (`shard/reducer.py`)
    step       at the end of a step's last micro-batch: optimizer, schedule, counters; else nothing

`engine.backward(loss)` divides by the number of micro-batches, as DeepSpeed's does. Plain
`loss.backward()` works, too, and divides nothing, as in any PyTorch loop.
"""

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_full._compat import current_backward
from zero_full.checkpoint import Unmatched, load_weights, save_16bit_model, save_weights
from zero_full.config import Resolved
from zero_full.data import RankLoader
from zero_full.facts import EngineFacts
from zero_full.nest import mapped
from zero_full.shard.optimizer import ZeroOptimizer
from zero_full.shard.parking import Parking
from zero_full.shard.whole import (
    copy_on_cpu,
    load_own_state_dict,
    load_whole_state_dict,
    own_state_dict,
    whole_state_dict,
)
from zero_full.stopwatch import Stopwatch

log = logging.getLogger("zero_full")
NOT_LANDED = {
    "save_checkpoint": "save engine.state_dict() of every rank with torch.save",
    "load_checkpoint": "load each rank's part with engine.load_state_dict(...)",
}


class Engine(EngineFacts):
    """A model under care. What it does not know itself, it asks the module."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroOptimizer,
        resolved: Resolved,
        device: torch.device,
        lr_scheduler: Any = None,
        training_dataloader: RankLoader | None = None,
        world_size: int = 1,
    ) -> None:
        self.module, self.optimizer, self.device = module, optimizer, device
        self.lr_scheduler, self.training_dataloader = lr_scheduler, training_dataloader
        self.resolved, self.config = resolved, resolved.config
        self.world_size = world_size
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self.stopwatch = Stopwatch(device, self.config.wall_clock_breakdown)
        self._micro_batches = self.config.gradient_accumulation_steps
        self._boundary: bool | None = None  # what the user says, if anything
        self._scaled_loss: weakref.ref[Tensor] | None = None  # the last one
        self._scaled_pass: int | None = None  # the backward pass that began at a scaled loss
        self._stepped = False
        self.parking = Parking(optimizer)
        if optimizer.settings.gather_beside_forward:
            optimizer.hold_back(module)

    # One micro-batch -----------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The module's forward."""
        return self.forward(*inputs, **named_inputs)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The module's forward, with hooks that notice a plain `loss.backward()`."""
        self._refuse_parked("forward")
        if self.config.fp16.auto_cast:
            inputs, named_inputs = self._cast(inputs), self._cast(named_inputs)
        with self.stopwatch.measure("forward"):
            outputs = self.module(*inputs, **named_inputs)
        return mapped(self._watched, outputs) if torch.is_grad_enabled() else outputs

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward of a scalar loss; returns it divided by the number of micro-batches."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss)
            raise ValueError(f"backward needs a scalar loss, not {kind}: take its mean, for example")
        is_scaled = self._scaled_loss is not None and self._scaled_loss() is loss
        if scale_wrt_gas and self._micro_batches > 1:
            loss = loss / self._micro_batches
        scaled = loss if is_scaled else self.scale(loss)
        with self.stopwatch.measure("backward"):
            self._begin_backward(loss.detach())
            try:
                scaled.backward(retain_graph=retain_graph)
            except BaseException:
                self.optimizer.reducer.abandon()
                raise
            self.optimizer.reducer.finish()
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a `backward` of your own: `engine.scale(loss).backward()`."""
        scale = self.optimizer.scaler.scale
        if scale == 1:
            return loss
        scaled = loss.float() * scale  # in fp16 the product would overflow before anything else does
        scaled.register_hook(self._note_scaled)
        self._scaled_loss = weakref.ref(scaled)
        return scaled

    def _note_scaled(self, grad: Tensor) -> None:
        self._scaled_pass = current_backward()

    def _refuse_parked(self, call: str) -> None:
        if self.parking.parked:
            raise RuntimeError(f"{call} while states are offloaded: call reload_states first")

    def _begin_backward(self, loss: Tensor | None) -> None:
        if loss is not None:
            self.optimizer.note_loss(loss)
        self.optimizer.reducer.boundary = self.is_gradient_accumulation_boundary()
        self.optimizer.reducer.begin()

    def _watched(self, output: Any) -> Any:
        """An output of the model that tells when a backward pass reaches it."""
        if not isinstance(output, Tensor) or not output.requires_grad:
            return output
        if self.fp16_enabled():
            # Not a hook: gradients that reach an output on their way from another one are scaled already.
            watched: Tensor = _Gate.apply(output, self)  # type: ignore[no-untyped-call]
            return watched
        output.register_hook(partial(self._backward_reaches, output.detach()))
        return output

    def _backward_reaches(self, output: Tensor, grad: Tensor) -> Tensor:
        """Autograd has reached an output of the model: a backward pass has begun."""
        reducer = self.optimizer.reducer
        if not reducer.is_running():
            self._begin_backward(output if output.dim() == 0 else None)
        reducer.note_pass()
        scale = self.optimizer.scaler.scale
        if scale == 1 or self._scaled_pass == current_backward():
            return grad
        if output.dim():
            raise RuntimeError(
                "with a loss scale, gradients must be scaled before they reach the model's outputs, or small "
                "ones are lost: use engine.backward(loss) or engine.scale(loss).backward(), or let the "
                "model return its loss"
            )
        return grad * scale

    # One step ------------------------------------------------------------------------------------

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """After every micro-batch. On a step's last one the optimizer moves, unless gradients overflow."""
        self._refuse_parked("step")
        if self.optimizer.reducer.muted:
            raise RuntimeError("step inside no_sync: leave the block first, its gradients are not averaged")
        self._stepped = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if self._stepped:
            with self.stopwatch.measure("step"):
                self._take_step(lr_kwargs or {})
            self._report()

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        self.optimizer.last = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if self.was_step_applied():
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        else:
            self.skipped_steps += 1

    def _report(self) -> None:
        if self.global_rank != 0:
            return
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0:
            log.info(
                "step %d: %d skipped, lr %s, gradient norm %s, loss scale %g",
                self.global_steps,
                self.skipped_steps,
                self.get_lr(),
                self.get_global_grad_norm(),
                self.loss_scale(),
            )
        if self.stopwatch.on:
            log.info("step %d: %s", self.global_steps, self.stopwatch.lap())

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Let go of the gradients. `step` has done it already."""
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in this block stay on this rank, whole, until a later one.

        At stage 2 that saves traffic and costs the memory which the stage saves.
        """
        reducer = self.optimizer.reducer
        before, reducer.muted = reducer.muted, True
        try:
            yield
        finally:
            reducer.muted = before

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the step's last."""
        return (self.micro_steps + 1) % self._micro_batches == 0 if self._boundary is None else self._boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say yourself whether the current micro-batch is the step's last; None: count again."""
        self._boundary = is_boundary

    def allreduce_gradients(self) -> None:
        """Average the gradients now, instead of in `step`."""
        self.optimizer.reducer.flush()

    # The module ----------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> "Engine":
        """The module's."""
        self.module.train(mode)
        return self

    def eval(self) -> "Engine":
        """The module's."""
        return self.train(False)

    def __getattr__(self, name: str) -> Any:
        if name in NOT_LANDED:
            raise AttributeError(
                f"Engine.{name} has not landed in zero_full yet; meanwhile: {NOT_LANDED[name]}"
            )
        if name.startswith("__") or "module" not in vars(self):
            raise AttributeError(name)
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(
                f"neither Engine nor {type(self.module).__name__} has an attribute {name!r}"
            ) from None

    def _cast(self, inputs: Any) -> Any:
        def cast(value: Any) -> Any:
            floating = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(torch.float16) if floating else value

        return mapped(cast, inputs)

    # Saving --------------------------------------------------------------------------------------

    def module_state_dict(self, keep: Callable[[Tensor], Any] = copy_on_cpu) -> dict[str, Any]:
        """The module's, with whole parameters, on every rank. Every rank must call this.

        `keep` says what to keep of a tensor: a copy on the CPU, or what else you make of it.
        """
        self.optimizer.settle()
        return whole_state_dict(self.module, self.optimizer, keep)

    def load_module_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """New parameters, and masters that follow them. Every rank must call this with the same values."""
        load_whole_state_dict(self.module, self.optimizer, state, strict)

    def save_weights(self, directory: str | Path, **options: Any) -> None:
        """Whole weights as safetensors, see `checkpoint.save_weights`. Every rank must call this."""
        save_weights(self.module, self.optimizer, directory, **options)

    def load_weights(self, path: str | Path, **options: Any) -> Unmatched:
        """Weights from safetensors, of which this rank reads its slices. Every rank must call this."""
        return load_weights(self.module, self.optimizer, path, **options)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """The weights in one file, by torch.save or as safetensors. Every rank must call this."""
        return save_16bit_model(
            self.module, self.optimizer, save_dir, save_filename, exclude_frozen_parameters
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of everything, to be saved between steps and loaded by the same rank."""
        scheduler = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        return {
            "module": own_state_dict(self.module, self.optimizer),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": scheduler,
            "counters": {name: getattr(self, name) for name in COUNTERS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue bit for bit where `state_dict` was taken. Every rank loads its own part."""
        load_own_state_dict(self.module, self.optimizer, state["module"])
        if self.lr_scheduler is not None and state["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in COUNTERS:
            setattr(self, name, state["counters"][name])

    def offload_states(
        self,
        include: Collection[str] | None = None,
        device: str | torch.device = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move state off the device until `reload_states`: all, or the kinds in `parking.KINDS`."""
        self.parking.offload(include, torch.device(device), pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` has moved."""
        self.parking.reload()

    def empty_partition_cache(self) -> None:
        """Release what is gathered, and give the allocator's free memory back."""
        if self.optimizer.gatherer is not None:
            self.optimizer.gatherer.release_all()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def destroy(self, gather: bool = False) -> None:
        """Take the engine off the model, which keeps its parameters.

        At stage 3 they stay released. With `gather`, which every rank must ask for, they become whole again.
        """
        self.parking.reload()
        self.optimizer.close(gather)


COUNTERS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")


class _Gate(torch.autograd.Function):
    """The identity on the way forward; on the way back the engine may scale the gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, engine: Engine) -> Tensor:
        """The output as it is."""
        ctx.engine, ctx.output = engine, output.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient, scaled if nobody has done it."""
        return ctx.engine._backward_reaches(ctx.output, grads[0]), None
