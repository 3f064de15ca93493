"""The engine: one training step out of micro-batches. It owns no numerics.

    forward    the model's own
    backward   scales the loss; gradients are averaged on the way (`shard/passes/reduce.py`)
    step       at the end of a step's last micro-batch: optimizer, schedule, counters; else nothing

`engine.backward(loss)` and `engine.scale(loss).backward()` divide by the number of micro-batches, as
DeepSpeed's do. Plain `loss.backward()` works, too; with several micro-batches the key
`plain_backward_divides` says who divides.
"""

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_full.config import Resolved
from zero_full.engine.forward_hooks import ModelCalls, watch_losses
from zero_full.engine.loader import RankLoader
from zero_full.engine.queries import DeepSpeedQueries
from zero_full.engine.reporting import Reporting
from zero_full.engine.saving import Saving
from zero_full.engine.stopping import Stopping
from zero_full.engine.stopwatch import Stopwatch
from zero_full.flight.recorder import STEPS, FlightRecorder
from zero_full.precision.dtypes import NAMES
from zero_full.shard.access.offload_states import OffloadedStates
from zero_full.shard.guards.unfinished_step import COUNTED
from zero_full.shard.passes.backward import Rules
from zero_full.shard.step.optimizer import ZeroOptimizer

log = logging.getLogger("zero_full")
STANDS_STILL = (
    "the schedule of the configuration (%s) stands still: two steps were taken by optimizer.step(), which "
    "does not move it. Call engine.step() instead, or call step() of the schedule that initialize returns"
)


class Engine(DeepSpeedQueries, Reporting, Saving, Stopping):
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
        self.made_in = os.getpid()
        self.lr_scheduler, self.training_dataloader = lr_scheduler, training_dataloader
        self.resolved, self.config = resolved, resolved.config
        self.world_size = world_size
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        # None: the configuration has no batch size
        self.global_samples: int | None = 0 if self.config.train_micro_batch_size_per_gpu else None
        self.stopwatch = Stopwatch(device, self.config.wall_clock_breakdown)
        self._micro_batches = self.config.gradient_accumulation_steps
        self._boundary: bool | None = None  # what the user says, if anything
        self._kept_back = False  # the user has said, since the last step, that it was none
        self._scaled_loss: weakref.ref[Tensor] | None = None  # the last one
        self._stepping = self._stepped = False
        self._forwards = 0  # training ones of this engine since the last step
        self._passes = 0  # backward passes until the last step
        self._schedule_at: dict[str, Any] | None = None  # after the last plain step
        self._has_told = False  # that it stands still
        self.offloaded = OffloadedStates(optimizer)
        self.recorder: FlightRecorder | None = None
        self.kept: dict[str, Any] = {}  # see `keep_in_checkpoint`
        self._save_at_stop: Callable[[], Any] | None = None  # see `on_signal`
        optimizer.reducer.backward.rules = Rules(
            self.is_gradient_accumulation_boundary,
            self._plain_divisor,
            self._refuse_unscaled,
            self.loss_scale,
            optimizer.report.note_plain_loss,
            self._adds_up,
        )
        self._calls = self._watch_calls()
        self._watch_pace()
        optimizer.at_step.append(self._count_step)
        optimizer.register_step_post_hook(self._report_plain_step)

    def _watch_calls(self) -> ModelCalls:
        autocast, section = None, self.config.torch_autocast
        if section.enabled:
            autocast = partial(torch.autocast, self.device.type, NAMES[section.dtype or "bf16"])
        casts_to = torch.float16 if self.config.fp16.auto_cast else None
        return ModelCalls(self.module, self.optimizer, self.optimizer.scaler.scales, casts_to, autocast)

    # One micro-batch -----------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Run the module's forward, and return what it returns."""
        return self.forward(*inputs, **named_inputs)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Run the module's forward, and return what it returns."""
        self._refuse_parked("forward")
        self.optimizer.look_at_model()
        if self.recorder is not None:
            self.recorder.begin("forward")
        try:
            with self.stopwatch.measure("forward"):
                outputs = self.module(*inputs, **named_inputs)
        finally:
            if self.recorder is not None:
                self.recorder.end("forward")
        backward = self.optimizer.reducer.backward
        if torch.is_grad_enabled() and self.module.training and not backward.inside_autograd():
            self._forwards += 1
            self._count_tokens(inputs, named_inputs)
        is_watched = torch.is_grad_enabled() and not self._calls.gates  # which do it themselves
        return watch_losses(backward, outputs) if is_watched else outputs

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward of a scalar loss; returns it divided by the number of micro-batches."""
        if self.optimizer.closed:
            raise RuntimeError("backward after destroy: initialize the model again")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss)
            raise ValueError(f"backward needs a scalar loss, not {kind}: take its mean, for example")
        is_scaled = self._scaled_loss is not None and self._scaled_loss() is loss
        if scale_wrt_gas and self._micro_batches > 1 and not is_scaled:
            loss = loss / self._micro_batches
        scaled = loss if is_scaled else self.optimizer.scaler.times(loss)
        with self.stopwatch.measure("backward"):
            if not is_scaled:
                self.optimizer.report.note_loss(loss)
            self.optimizer.reducer.begin(divided=True, scaled=True)
            try:
                scaled.backward(retain_graph=retain_graph)
            except BaseException:
                self.optimizer.reducer.backward.fail()
                raise
            self.optimizer.reducer.finish()
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss over the number of micro-batches times the loss scale: what `engine.backward` starts from.

        For a `backward` of your own: `engine.scale(loss).backward()`.
        """
        loss = loss / self._micro_batches
        self.optimizer.report.note_loss(loss)
        scaled = self.optimizer.scale(loss, divided=True)
        self._scaled_loss = weakref.ref(scaled)
        return scaled

    def _plain_divisor(self) -> float:
        """What gradients of a plain `loss.backward()` are divided by; an error if the file does not say."""
        steps, divides = self._micro_batches, self.config.plain_backward_divides
        if steps > 1 and divides is None:
            raise RuntimeError(
                f"loss.backward() with gradient_accumulation_steps {steps}: who divides the loss by {steps}? "
                'Set "plain_backward_divides" in the config: true if zero_full shall (as DeepSpeed does '
                "since 0.18.3), false if your loop has done so. Or call engine.backward(loss), which always "
                "divides"
            )
        return float(steps) if divides else 1.0

    def division_rule(self) -> str:
        """Who divides the loss by the micro-batches of a step, in words; "" where there is one of them."""
        steps, divides = self._micro_batches, self.config.plain_backward_divides
        if steps == 1:
            return ""
        plain = {
            None: "loss.backward() is an error until plain_backward_divides says who divides",
            True: "so does loss.backward(), because plain_backward_divides is true",
            False: "loss.backward() does not, because plain_backward_divides is false",
        }[divides]
        return f"engine.backward(loss) divides by gradient_accumulation_steps {steps}; {plain}"

    def _refuse_unscaled(self) -> None:
        if self.optimizer.scaler.scale != 1:
            raise RuntimeError(
                "a backward pass has brought gradients without the loss scale, which a step would divide "
                "them by: use engine.backward(loss) or engine.scale(loss).backward(), or call the model as a "
                "whole and let it return its loss"
            )

    def _refuse_parked(self, call: str) -> None:
        if self.offloaded.moved:
            raise RuntimeError(f"{call} while states are offloaded: call reload_states first")

    # One step ------------------------------------------------------------------------------------

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """After every micro-batch. On a step's last one the optimizer moves, unless gradients overflow."""
        self._refuse_parked("step")
        if self.optimizer.reducer.no_sync:
            raise RuntimeError("step inside no_sync: leave the block first, its gradients are not averaged")
        self._stepping = True
        try:
            self._stepped = self.is_gradient_accumulation_boundary()
            if self._stepped:
                with self.stopwatch.measure("step"):
                    self.optimizer.unfinished.run(partial(self._take_step, lr_kwargs or {}))
                self._report()
            else:
                self.micro_steps += 1
        finally:
            self._stepping = False
        if self._stepped:
            self._stop_if_asked()

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        unfinished = self.optimizer.unfinished
        try:
            self.optimizer.step()  # which counts it
        except Exception:
            if unfinished.phase == COUNTED:  # of a hook after the step, which is taken all the same
                self._end_step(lr_kwargs)
                unfinished.is_over()
            raise
        if self.optimizer.last is None:
            self.micro_steps += 1  # not before: who catches an error may call again
            raise RuntimeError(
                "step without gradients: since the last step no backward pass has reached a parameter that "
                "is trained, on any rank (is backward missing, or was zero_grad called after it?)"
            )
        self._end_step(lr_kwargs)

    def _end_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        self.optimizer.zero_grad()
        if self.was_step_applied() and self.lr_scheduler is not None:
            try:
                self.lr_scheduler.step(**lr_kwargs)
            except Exception:  # the schedule's own, which is at its end for example
                self.optimizer.unfinished.is_over()
                raise

    def _count_step(self) -> None:
        """In every step of the optimizer, as soon as it has had its effect."""
        if self._stepping:
            self.micro_steps += 1
        else:  # a loop that calls the optimizer's step itself
            self._stepped = True
            self.micro_steps += self._micro_batches - self.micro_steps % self._micro_batches
        self.global_steps += 1
        self._kept_back = False
        samples = self._samples_of_this_step()
        self._pace.count(samples)
        if self.global_samples is not None:
            self.global_samples += samples
        if not self.was_step_applied():
            self.skipped_steps += 1

    def _report_plain_step(self, *step: Any) -> None:
        """After a step of the optimizer: of a loop that calls it itself, and not `step`."""
        if not self._stepping and self.optimizer.last is not None:
            self._report()
            self._look_at_schedule()

    def _look_at_schedule(self) -> None:
        """After a plain step: the file's schedule moves in `step`, or the loop moves it, or nobody does."""
        if self.config.scheduler is None or self.lr_scheduler is None:
            return
        at = self.lr_scheduler.state_dict()
        if at == self._schedule_at and not self._has_told:
            self._has_told = True
            log.warning(STANDS_STILL, self.config.scheduler.type)
        self._schedule_at = at

    def _samples_of_this_step(self) -> int:
        """Those of its forwards: one batch may have several backward passes, see [Note: recomputed parts].

        Passes are counted where the module was called without the engine, or out of training mode.
        """
        passes = self.optimizer.reducer.backward.count
        micro_batches = self._forwards or passes - self._passes
        self._forwards, self._passes = 0, passes
        if self.global_samples is None:
            return 0
        if self.config.managed_gradient_accumulation and self._stepping:
            return self.train_batch_size()
        return self.train_micro_batch_size_per_gpu() * self.world_size * micro_batches

    def record(self, path: str | Path, steps: int = STEPS) -> FlightRecorder:
        """Record what this rank does and holds, and keep the last `steps` steps. Call it on every rank.

        path   the file in which all ranks' recordings are put together when they end: by `close` of what is
               returned, at the end of a `with` block of it, by `destroy`, with the process, or when a
               collective fails. It is for the player on the site's page "One step, animated", and for
               `python -m zero_full replay PATH`. Until then each rank writes into PATH.parts

        Ranks need not call it at the same moment, and may in the middle of a step. OSError if nothing can be
        written there.
        """
        if steps < 1:
            raise ValueError(f"record keeps at least 1 step, not {steps!r}")
        if self.recorder is not None and not self.recorder.closed:
            raise RuntimeError(
                f"record: this engine is recorded in {self.recorder.path} already: close that first"
            )
        about = {
            "stage": self.zero_optimization_stage(),
            "micro_batches": self._micro_batches,
            "step": self.global_steps + 1,
        }
        self.recorder = FlightRecorder(path, self.optimizer, about, steps)
        return self.recorder

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Let go of the gradients. `step` has done it already."""
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in this block stay on this rank, whole, until a later one.

        At stage 2 that saves traffic and costs the memory which the stage saves.
        """
        with self.optimizer.reducer.keep_back():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Gradients of all backward passes in this block are averaged together, once, when it ends.

        For several losses of one step. If the block raises, nothing is averaged.
        """
        with self.no_sync():
            yield
        if not self.optimizer.reducer.no_sync:  # else the outer block's end
            self.optimizer.reducer.flush()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the step's last."""
        if self._boundary is not None:
            return self._boundary
        if not self.config.managed_gradient_accumulation:
            return self._stepping  # whoever calls `step` decides
        return (self.micro_steps + 1) % self._micro_batches == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say yourself whether the current micro-batch is the step's last; None: count again."""
        if not self.config.managed_gradient_accumulation:
            raise RuntimeError("managed_gradient_accumulation is false: every call of step is the boundary")
        self._boundary = is_boundary
        self._kept_back = self._kept_back or is_boundary is False

    def _adds_up(self) -> bool:
        """Whether a step may have several micro-batches, as all ranks know: see [Note: what travels]."""
        managed = self.config.managed_gradient_accumulation
        return self._micro_batches > 1 or not managed or self._kept_back

    def allreduce_gradients(self) -> None:
        """Average the gradients now, instead of in `step`."""
        self.optimizer.reducer.flush()
        self.optimizer.reducer.reduce_late()

    # The module ----------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> "Engine":
        """Put the module into training mode, or with `mode` False out of it; return the engine."""
        self.module.train(mode)
        return self

    def eval(self) -> "Engine":
        """Put the module out of training mode; return the engine."""
        return self.train(False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "module" not in vars(self):
            raise AttributeError(name)
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(
                f"neither Engine nor {type(self.module).__name__} has an attribute {name!r}"
            ) from None

    # States off the device --------------------------------------------------------------------------

    def offload_states(
        self,
        include: Collection[str] | None = None,
        device: str | torch.device = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move state off the device until `reload_states`: all, or the kinds in `offload_states.KINDS`."""
        self.offloaded.offload(include, torch.device(device), pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` has moved."""
        self.offloaded.reload()

    def empty_partition_cache(self) -> None:
        """Release what is gathered, and give the allocator's free memory back."""
        if self.optimizer.gatherer is not None:
            self.optimizer.gatherer.release_all()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def destroy(self, gather: bool = False) -> None:
        """Take the engine off the model, which keeps its parameters.

        At stage 3 they stay released. With `gather`, which every rank must ask for, they become whole again.
        In a process that was forked from the engine's it does nothing: what would end is the parent's.
        """
        if os.getpid() != self.made_in:
            return
        if self.recorder is not None:
            self.recorder.close()
        self.offloaded.reload()
        self._calls.remove()
        self.optimizer.close(gather)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY)


NO_COPY = (
    "an engine cannot be copied or pickled: it holds connections to other ranks. Copy engine.module (at "
    "stage 3 inside zero_full.GatheredParameters), or save engine.state_dict()"
)
