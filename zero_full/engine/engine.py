"""The engine: one training step out of micro-batches. The numerics are the optimizer's.

    forward    run the module
    backward   scale the loss and run autograd; hooks reduce the gradients (`shard/passes/reduce.py`)
    step       at the gradient accumulation boundary: optimizer, schedule, counters; else only count

`engine.backward(loss)` and `engine.scale(loss).backward()` divide the loss by the number of micro-batches, as
DeepSpeed's do. Plain `loss.backward()` works as well. With several micro-batches the key
`plain_backward_divides` defines whether zero_full or the training loop divides.

Parts that only some runs have are None in all others: `_meter` counts for `metrics`, `reporting` logs a line
every few steps and writes to monitors, `stopping` saves and exits after a signal, `recorder` writes a flight
recording.
"""

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler

from zero_full._compat import is_profiling
from zero_full.checkpoint import (
    Extras,
    LoadOptions,
    SaveOptions,
    Unmatched,
    load_weights,
    save_16bit_model,
    save_checkpoint,
    save_weights,
    wait_for_checkpoint,
)
from zero_full.comm.topology import this_rank
from zero_full.config import Resolved
from zero_full.engine.forward_hooks import ForwardHooks
from zero_full.engine.loader import RankLoader
from zero_full.engine.metrics import Lap, Means, Meter, Metrics, clipped, peak_memory, rates_of
from zero_full.engine.monitors import is_monitored
from zero_full.engine.out_of_memory import MemoryNotes
from zero_full.engine.profiler_ranges import ProfilerRanges, ranged
from zero_full.engine.queries import DeepSpeedQueries
from zero_full.engine.reporting import Reporting
from zero_full.engine.saving import load_run, load_run_state, run_state
from zero_full.engine.stopping import ClientState, Stopping
from zero_full.engine.stopwatch import Stopwatch
from zero_full.flight.recorder import STEPS, FlightRecorder
from zero_full.precision.dtypes import NAMES
from zero_full.shard.access.gathered_parameters import copy_on_cpu, load_whole_state_dict, whole_state_dict
from zero_full.shard.access.offload_states import OffloadedStates
from zero_full.shard.guards.unfinished_step import COUNTED
from zero_full.shard.passes.backward import watch_losses
from zero_full.shard.step.optimizer import ZeroOptimizer
from zero_full.shard.step.stop_signals import SIGNALS
from zero_full.shard.step.wrapped_optimizer import NO_JOIN

if TYPE_CHECKING:
    from zero_full.generation.deltas import Deltas
    from zero_full.generation.weights import WeightIterator

log = logging.getLogger("zero_full")
COUNTERS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")  # what a checkpoint keeps
STATES_OFFLOADED = "%s: states are offloaded. Call reload_states first"
NO_COPY = (
    "an engine cannot be copied or pickled, because it holds process groups. Copy engine.module (at stage 3 "
    "inside zero_full.GatheredParameters), or save engine.state_dict()"
)
SCHEDULE_NOT_STEPPED = (
    "the configuration's schedule (%s) does not advance: the loop calls optimizer.step(), which does not "
    "step it. Call engine.step() instead, or call step() of the schedule that initialize returns"
)


class Engine(DeepSpeedQueries):
    """Trains a module with ZeRO. Attributes that only the module has are read from it and written to it.

    module               the model; its hooks gather parameters and reduce gradients
    optimizer            steps this rank's shards
    resolved             the configuration
    device               this rank's device
    lr_scheduler         moves after every step that was applied; None: none
    training_dataloader  this rank's micro-batches, whose position checkpoints save; None: none
    world_size           data-parallel ranks
    """

    is_made = False  # set by `initialize`: from then on attributes are written as `__setattr__` says

    def __init__(
        self,
        module: nn.Module,
        optimizer: ZeroOptimizer,
        resolved: Resolved,
        device: torch.device,
        lr_scheduler: Any = None,
        training_dataloader: RankLoader | None = None,
        world_size: int = 1,
        plan: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`plan` returns the planned bytes of this run by kind, for an out-of-memory error."""
        self.module, self.optimizer, self.device = module, optimizer, device
        self.made_in = os.getpid()
        self.lr_scheduler, self.training_dataloader = lr_scheduler, training_dataloader
        self.resolved, self.config = resolved, resolved.config
        self.world_size = world_size
        self.global_steps = self.skipped_steps = 0
        # None: the configuration has no batch size
        self.global_samples: int | None = 0 if self.config.train_micro_batch_size_per_gpu else None
        self.accumulation = optimizer.accumulation
        self._scaled_loss: weakref.ref[Tensor] | None = None  # the last result of `scale`
        self._stepping = False  # inside `step`
        self._stepped = False  # the last call of `step`, or of the optimizer's, was at a boundary
        self._forwards = 0  # training forwards of this engine since the last step
        self._passes = 0  # backward passes until the last step
        self._schedule_at: dict[str, Any] | None = None  # its state after the last plain step
        self._warned_of_schedule = False
        self.offloaded = OffloadedStates(optimizer)
        self.kept: dict[str, Any] = {}  # see `keep_in_checkpoint`
        self._memory_notes = MemoryNotes(optimizer, self.config, device, plan)
        self.stopwatch = Stopwatch(device, self.config.wall_clock_breakdown)
        self._timed = self.stopwatch.phases()
        self._ranges: ProfilerRanges | None = None  # while a profiler runs
        self.recorder: FlightRecorder | None = None  # see `record`
        self._recorded: AbstractContextManager[None] = nullcontext()  # around a forward
        self.stopping: Stopping | None = None  # see `on_signal`
        self._meter: Meter | None = None  # see `metrics`
        self._deltas: Deltas | None = None  # see `weights`
        self._lap: Lap | None = None  # between two calls of `metrics`
        self.reporting: Reporting | None = None
        if this_rank() == 0 and (
            self.config.steps_per_print or self.stopwatch.on or is_monitored(self.config)
        ):
            self.reporting = Reporting(self._get_meter(), self.config, device, self._read_metrics)
        self._forward_hooks = self._make_forward_hooks()
        optimizer.at_step.append(self._count_step)
        optimizer.register_step_post_hook(self._end_plain_step)

    def _make_forward_hooks(self) -> ForwardHooks:
        autocast, section = None, self.config.torch_autocast
        if section.enabled:
            autocast = partial(torch.autocast, self.device.type, NAMES[section.dtype or "bf16"])
        casts_to = torch.float16 if self.config.fp16.auto_cast else None
        return ForwardHooks(self.module, self.optimizer, self.optimizer.scaler.scales, casts_to, autocast)

    # One micro-batch -----------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Run the module's forward, and return its outputs."""
        return self.forward(*inputs, **named_inputs)

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Run the module's forward, and return its outputs."""
        if self.optimizer.offloaded.copies:
            raise RuntimeError(STATES_OFFLOADED % "forward")
        self.optimizer.check_model_unchanged()
        if is_profiling(profiler) != (self._ranges is not None):  # a profiler has started or ended
            self._follow_profiler()
        try:
            with self._recorded, self._timed["forward"]():
                outputs = self.module(*inputs, **named_inputs)
        except BaseException as error:
            self._note_interrupt(error)
            self._memory_notes.explain(error, "forward")
            raise
        if not torch.is_grad_enabled():
            return outputs
        backward = self.optimizer.reducer.backward
        if self.module.training and not backward.inside_autograd():  # inside: a recomputed forward
            self._forwards += 1
            if self._meter is not None:
                self._meter.count_tokens(inputs, named_inputs)
        # With a loss scale the hooks of ForwardHooks watch the outputs.
        return outputs if self._forward_hooks.scales_outputs else watch_losses(backward, outputs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run backward from a scalar loss. Returns the loss divided by the number of micro-batches.

        scale_wrt_gas  False: the loss is divided already, and is returned as it is
        """
        self.optimizer.check_open("backward")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss)
            raise ValueError(f"backward needs a scalar loss, not {kind}. Take its mean, for example")
        is_scaled = self._scaled_loss is not None and self._scaled_loss() is loss
        if scale_wrt_gas and self.accumulation.micro_batches > 1 and not is_scaled:
            loss = loss / self.accumulation.micro_batches
        scaler = self.optimizer.scaler
        scaled = loss if is_scaled or scaler.scale == 1 else scaler.times(loss)
        with self._timed["backward"]():
            if not is_scaled:
                self.accumulation.add_loss(loss)
            self.optimizer.reducer.begin(divided=True, scaled=True)
            try:
                scaled.backward(retain_graph=retain_graph)
            except BaseException as error:
                self._note_interrupt(error)
                self.optimizer.reducer.backward.fail()
                self._memory_notes.explain(error, "backward")
                raise
            self.optimizer.reducer.finish()
        return loss

    def _note_interrupt(self, error: BaseException) -> None:
        """Tell the gatherer if an interrupt, such as KeyboardInterrupt, has cut a pass short."""
        if not isinstance(error, Exception) and self.optimizer.gatherer is not None:
            self.optimizer.gatherer.interrupt(error)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss divided by the number of micro-batches and multiplied by the loss scale.

        For a loop that calls autograd itself: `engine.scale(loss).backward()` is `engine.backward(loss)`.
        """
        loss = loss / self.accumulation.micro_batches
        self.accumulation.add_loss(loss)
        scaled = self.optimizer.scale(loss, divided=True)
        self._scaled_loss = weakref.ref(scaled)
        return scaled

    def division_rule(self) -> str:
        """Return as text which calls divide the loss by the number of micro-batches; "" if that is 1."""
        steps, divides = self.accumulation.micro_batches, self.config.plain_backward_divides
        if steps == 1:
            return ""
        plain = {
            None: "loss.backward() is an error until plain_backward_divides is set",
            True: "so does loss.backward(), because plain_backward_divides is true",
            False: "loss.backward() does not, because plain_backward_divides is false",
        }[divides]
        return f"engine.backward(loss) divides by gradient_accumulation_steps {steps}; {plain}"

    # One step ------------------------------------------------------------------------------------

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch. At the accumulation boundary step the optimizer, unless gradients overflow.

        lr_kwargs  keyword arguments of the schedule's step
        """
        if self.optimizer.offloaded.copies:
            raise RuntimeError(STATES_OFFLOADED % "step")
        if self.optimizer.reducer.no_sync:
            raise RuntimeError(
                "step inside no_sync or coalesce_grad_reduction: its gradients are not averaged yet. Leave "
                "the block first"
            )
        self._stepping = True
        try:
            self._stepped = self.accumulation.step_raised = self.is_gradient_accumulation_boundary()
            if self._stepped:
                try:
                    with self._timed["step"]():
                        self.optimizer.unfinished.run(partial(self._take_step, lr_kwargs or {}))
                    self.accumulation.step_raised = False
                except (RuntimeError, MemoryError) as error:
                    self._memory_notes.explain(error, "step")
                    raise
                if self.reporting is not None:
                    self.reporting.report(self.global_steps, self.skipped_steps)
            else:
                self.accumulation.micro_steps += 1
        finally:
            self._stepping = False
        if self._stepped and self.stopping is not None:
            self.stopping.stop_if_requested()

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        """Step the optimizer, which calls `_count_step`; then clear gradients and move the schedule."""
        unfinished = self.optimizer.unfinished
        try:
            self.optimizer.step()
        except Exception:
            if unfinished.phase == COUNTED:  # a hook after the step has raised: the step counts all the same
                self._end_step(lr_kwargs)
                unfinished.mark_complete()
            raise
        if self.optimizer.last is None:
            self.accumulation.micro_steps += 1  # only now: after an error the caller may call `step` again
            raise RuntimeError(
                "step without gradients: no backward pass reached a trained parameter since the last step, "
                "on any rank. Perhaps backward is missing, or zero_grad was called after it"
            )
        self._end_step(lr_kwargs)

    def _end_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        self.optimizer.zero_grad()
        assert self.optimizer.last is not None
        if self.optimizer.last.applied and self.lr_scheduler is not None:
            try:
                self.lr_scheduler.step(**lr_kwargs)
            except Exception:  # such as the end of the schedule: the step itself is complete
                self.optimizer.unfinished.mark_complete()
                raise

    def _count_step(self) -> None:
        """Count a step of the optimizer, applied or skipped. The optimizer calls this in every step.

        Samples are those of the step's forwards, because one forward may have several backward passes (see
        [Note: recomputed parts]). If the module was called directly or in evaluation mode, backward passes
        are counted instead.
        """
        passes = self.optimizer.reducer.backward.count
        micro_batches = self._forwards or passes - self._passes
        self._forwards, self._passes = 0, passes
        if self._stepping:
            self.accumulation.micro_steps += 1
            if self.accumulation.managed:
                micro_batches = self.accumulation.micro_batches
        else:  # the loop calls the optimizer's step itself
            self._stepped = True
            of_a_step = self.accumulation.micro_batches
            self.accumulation.micro_steps += of_a_step - self.accumulation.micro_steps % of_a_step
        samples = 0
        if self.global_samples is not None:
            samples = self.config.train_micro_batch_size_per_gpu * self.world_size * micro_batches
            self.global_samples += samples
        self.global_steps += 1
        self.accumulation.end_step()
        assert self.optimizer.last is not None
        if not self.optimizer.last.applied:
            self.skipped_steps += 1
        if self._meter is not None:
            self._meter.count(samples)

    def _end_plain_step(self, *step: Any) -> None:
        """Report a step that the loop took by `optimizer.step()`; `step` reports its own."""
        if self._stepping or self.optimizer.last is None:
            return
        if self.reporting is not None:
            self.reporting.report(self.global_steps, self.skipped_steps)
        if self.config.scheduler is not None and self.lr_scheduler is not None:
            self._check_schedule_moves(self.config.scheduler.type)

    def _check_schedule_moves(self, name: str) -> None:
        """Warn once if the configuration's schedule has not moved between two plain steps."""
        at = self.lr_scheduler.state_dict()
        if at == self._schedule_at and not self._warned_of_schedule:
            self._warned_of_schedule = True
            log.warning(SCHEDULE_NOT_STEPPED, name)
        self._schedule_at = at

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients. `step` does this already."""
        self.optimizer.zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep the gradients of this block's backward passes on this rank, until a later pass reduces them.

        At stage 2 this saves traffic and costs the memory that the stage saves.
        """
        return self.optimizer.reducer.without_sync()

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Average the gradients of all backward passes in this block once, when it ends.

        For several losses of one step. If the block raises, nothing is averaged.
        """
        with self.no_sync():
            yield
        if not self.optimizer.reducer.no_sync:  # else at the end of the outer block
            self.optimizer.reducer.flush()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the step's last."""
        # Without managed accumulation every call of `step` is a boundary.
        return self.accumulation.is_boundary() or (self._stepping and not self.accumulation.managed)

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the current micro-batch is the step's last; None: go back to counting."""
        if not self.accumulation.managed:
            raise RuntimeError("managed_gradient_accumulation is false: every call of step is a boundary")
        self.accumulation.set_boundary(is_boundary)

    def allreduce_gradients(self) -> None:
        """Average the gradients now instead of in `step`. Every rank must call this."""
        self.optimizer.reducer.flush()
        self.optimizer.reducer.reduce_late()

    @property
    def micro_steps(self) -> int:
        """The micro-batches so far."""
        return self.accumulation.micro_steps

    @micro_steps.setter
    def micro_steps(self, count: int) -> None:
        self.accumulation.micro_steps = count

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the samples of a step, by another number of micro-batches. Call it between steps."""
        each = self.train_micro_batch_size_per_gpu() * self.world_size
        if self.accumulation.micro_steps % self.accumulation.micro_batches:
            raise RuntimeError("set_train_batch_size inside a step: call it between steps")
        if train_batch_size < 1 or train_batch_size % each:
            raise ValueError(
                f"train_batch_size {train_batch_size} is not a multiple of {each} (micro-batch size x ranks) "
                "above 0"
            )
        self.accumulation.micro_batches, self.micro_steps = train_batch_size // each, 0

    # Checkpoints ---------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        asynchronous: bool = False,
    ) -> bool:
        """Save a checkpoint of this run in `save_dir/tag`. Every rank must call this between steps.

        tag           None: global_stepN
        client_state  plain data of the caller, which `load_checkpoint` returns; rank 0's is saved
        save_latest   make this the checkpoint that `load_checkpoint` loads without a tag
        asynchronous  return once everything is copied to host memory; write it during the next steps

        Returns True, or raises on every rank and keeps the checkpoints that the folder has. A failure after
        an asynchronous save has returned is raised by the next step, save, load, `wait_for_checkpoint` or
        `destroy`. A step that raises it has changed nothing and may be called again.
        """
        self._check_between_steps("save_checkpoint")
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        keep_last = self.config.checkpoint.keep_last
        options = SaveOptions(save_latest, exclude_frozen_parameters, keep_last, asynchronous)
        save_checkpoint(self.module, self.optimizer, save_dir, tag, client_state, self._extras(), options)
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until an asynchronous save is complete; raise if it has failed."""
        wait_for_checkpoint(self.optimizer)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        drop_errors: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint, at any number of ranks, stage and precision. Every rank must call this.

        tag                       None: the checkpoint that the folder's file `latest` names
        load_module_strict        False: parameters and buffers may be missing or additional, with a warning
        load_optimizer_states     False: skip optimizer state, random number generators, loss scale and the
                                  objects of `keep_in_checkpoint`
        load_lr_scheduler_states  False: the schedule stays as it is; groups still get the saved learning
                                  rates with the state of the optimizer
        load_module_only          True: load weights and buffers only, no optimizer state and no counters
        drop_errors               True: drop the compression errors and local steps that each rank of 1-bit
                                  and 0/1 Adam has. Another number of ranks cannot use them

        Returns the checkpoint's folder and the client state. If the folder has no checkpoint and no tag is
        given, returns (None, None), as DeepSpeed does, so that a script may begin or resume by the same
        call. If anything is wrong, raises CheckpointError on every rank, and nothing has changed. That is so
        where checkpoints exist, but no `latest` that names one: DeepSpeed would begin anew.
        """
        self._check_outside_step("load_checkpoint")
        options = LoadOptions(
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            drop_errors or self.config.checkpoint.drop_errors,
        )
        found = load_run(self.module, self.optimizer, load_dir, tag, options, self._extras())
        if found is None:
            return None, None
        self._load_counters(found.counters)
        return str(found.path), found.client_state

    def keep_in_checkpoint(self, **objects: Any) -> None:
        """Add objects to every checkpoint, such as a data loader. Each rank saves and loads its own state.

        objects  by name, with `state_dict` and `load_state_dict`; their state is plain data

        Another number of ranks can load a state only if all ranks saved the same.
        """
        for name, each in objects.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TypeError(f"keep_in_checkpoint: {name} needs state_dict and load_state_dict")
        self.kept |= objects

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the run, for `load_state_dict` on the same rank, between steps."""
        self._check_between_steps("state_dict")
        return run_state(self.module, self.optimizer, self.lr_scheduler, self._counters())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue bit for bit where `state_dict` was called. Every rank loads its own part."""
        self._check_outside_step("load_state_dict")
        load_run_state(self.module, self.optimizer, self.lr_scheduler, state)
        self._load_counters(state["counters"])

    def _extras(self) -> Extras:
        """Return the contents of a checkpoint besides the module and the optimizer."""
        kept = dict(self.kept)
        if self.training_dataloader is not None:
            kept["training_dataloader"] = self.training_dataloader
        return Extras(self.lr_scheduler, self._counters(), kept)

    def _counters(self) -> dict[str, int | None]:
        return {name: getattr(self, name) for name in COUNTERS}

    def _load_counters(self, saved: Mapping[str, Any]) -> None:
        for name in COUNTERS:
            if name != "global_samples" or self.global_samples is not None:  # None: no batch size to count by
                setattr(self, name, saved.get(name, getattr(self, name)))
        # Loading clears the gradients of an unfinished step, and so what was counted for it.
        self._forwards, self._passes = 0, self.optimizer.reducer.backward.count
        of_a_step = self.accumulation.micro_batches
        if self.accumulation.micro_steps % of_a_step:  # the saved run had another number of micro-batches
            self.micro_steps = self.global_steps * of_a_step

    def _check_between_steps(self, call: str) -> None:
        """Raise between the micro-batches of a step: a checkpoint does not hold their gradients."""
        self._check_outside_step(call)
        accumulation = self.accumulation
        after = self.accumulation.micro_steps % accumulation.micro_batches
        if accumulation.managed and accumulation.boundary is None and after:
            raise RuntimeError(
                f"{call} after {after} of a step's {accumulation.micro_batches} micro-batches, whose "
                "gradients a checkpoint does not hold. Save after the last one"
            )

    def _check_outside_step(self, call: str) -> None:
        """Raise inside `step`."""
        if self._stepping:
            raise RuntimeError(
                f"{call} inside engine.step(): the weights are updated, but the counters and the schedule "
                "are not. Call it after engine.step()"
            )

    # Weights -------------------------------------------------------------------------------------

    def module_state_dict(self, keep: Callable[[Tensor], Any] = copy_on_cpu) -> dict[str, Any]:
        """Return the module's state dict, with whole parameters. Every rank must call this.

        keep  makes the value of an entry from its tensor, which is released afterwards; by default a CPU copy
        """
        return whole_state_dict(self.module, self.optimizer, keep)

    def load_module_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole parameters and update the master weights. Every rank must pass the same values."""
        load_whole_state_dict(self.module, self.optimizer, state, strict)

    def save_weights(
        self,
        directory: str | PathLike[str],
        dtype: torch.dtype | None = None,
        max_shard_bytes: int = 5 * 10**9,
        names: Callable[[str], str | None] | None = None,
        filename: str = "model.safetensors",
    ) -> None:
        """Write whole parameters and persistent buffers as safetensors. Every rank must call this.

        dtype            convert floating-point tensors to it, from the fp32 master weights if the run has
                         them; None: the dtype of training
        max_shard_bytes  bytes of a file, at most; more tensors than that become several files and an index
        names            maps a tensor's name in the module to its name in the file, or to None to leave the
                         tensor out; the same on every rank
        """
        save_weights(self.module, self.optimizer, directory, dtype, max_shard_bytes, names, filename)

    def load_weights(
        self,
        path: str | PathLike[str],
        strict: bool = True,
        names: Callable[[str], str | None] | None = None,
    ) -> Unmatched:
        """Read weights from safetensors; each rank reads its slices. Every rank must call this.

        path    a .safetensors file, an index, or a folder with model.safetensors or its index
        strict  False: tensors that the file lacks keep their values, and unexpected ones are ignored
        names   maps a tensor's name in the module to its name in the file, or to None to not load it

        Returns the names of missing and of unexpected tensors. The optimizer's state stays as it is.
        """
        return load_weights(self.module, self.optimizer, path, strict, names)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights to one file, by torch.save or as safetensors. Every rank must call this."""
        return save_16bit_model(
            self.module, self.optimizer, save_dir, save_filename, exclude_frozen_parameters
        )

    def generation(
        self, memory: int | None = None, merge_adapters: bool = False
    ) -> AbstractContextManager[nn.Module]:
        """Return a context for generation with the module: whole parameters, no autograd, eval mode.

        memory          bytes of gathered parameters to keep on this rank, at most; the other parameters are
                        gathered in each call, so that ranks must call the module equally often. None: all,
                        or as much as fits into three quarters of the free memory
        merge_adapters  merge PEFT's active LoRA adapters into their base weights, which come back bit for bit

        Every rank must enter and leave it, between steps. If all parameters are kept, ranks may call the
        module, or its `generate`, a different number of times. Else rank 0 logs a warning. Leaving restores
        each module's training mode. Random numbers come from torch's generators, as everywhere.
        """
        from zero_full.generation.generating import generating  # only runs that generate import it

        problem = ""
        accumulation = self.accumulation
        after = accumulation.micro_steps % accumulation.micro_batches if accumulation.managed else 0
        if self._stepping or after or (self.optimizer.reducer.began and self.optimizer.reducer.state.are_new):
            problem = (
                "engine.generation() in the middle of a step, after some of its micro-batches. Generate "
                "after engine.step() at the accumulation boundary"
            )
        return generating(self.module, self.optimizer, memory, merge_adapters, problem)

    def weights(
        self,
        bucket_bytes: int = 2**30,
        delta: bool = False,
        dtype: torch.dtype | None = None,
        merge_adapters: bool = False,
        since: int | None = None,
    ) -> "WeightIterator":
        """Return an iterator over (name, whole tensor), for an inference server. Every rank must iterate.

        bucket_bytes    additional memory, at most; a larger tensor is a bucket by itself
        delta           yield (name, indices, values) of what has changed since the last such call with the
                        same `dtype` and `merge_adapters`: indices are int32 in the flattened tensor; None:
                        the whole tensor, as in the first call. The iterator's `base` is the version that
                        the receiver must have for that (0: none), and its `version` the new one
        dtype           convert floating-point tensors to it, from the fp32 master weights if the run has
                        them; None: the dtype of training
        merge_adapters  hand over base weights with PEFT's active LoRA adapters merged, by the names of the
                        model without adapters. At stage 3 this gathers one layer's units in addition
        since           with `delta`: the version that the receiver has; 0: none. If that was not the last
                        call's, everything is handed over. So receivers that pass it cannot miss changes.
                        None: there is one receiver, and it has got the last call's

        Names are those of the module's state dict, and tied tensors appear once. Every rank gets every
        tensor. A tensor from a bucket stays valid while it is referenced, and its bucket's memory with it. A
        parameter that this rank keeps whole is handed over itself: do not write to it, and clone it to keep
        it beyond the next step.
        """
        from zero_full.generation.weights import check_options, weights_of  # only runs that ask for it

        check_options(bucket_bytes, dtype, delta, since)
        if delta:
            from zero_full.generation.deltas import Deltas

            if self._deltas is None or not self._deltas.fits(dtype, merge_adapters, since):
                with torch.inference_mode(False):  # steps write to what it makes
                    self._deltas = Deltas(self.module, self.optimizer, dtype, merge_adapters, self._deltas)
            return self._deltas.weights(bucket_bytes)
        return weights_of(self.module, self.optimizer, bucket_bytes, dtype, merge_adapters)

    def _follow_profiler(self) -> None:
        """Start to make named ranges when a profiler has started, and stop when it has ended."""
        self._timed = self.stopwatch.phases()
        if self._ranges is None:
            self._ranges = ProfilerRanges(self.optimizer)
            self._timed = {phase: ranged(phase, timed) for phase, timed in self._timed.items()}
        else:
            self._ranges.close()
            self._ranges = None

    # Metrics, signals and recordings --------------------------------------------------------------

    def metrics(self) -> Metrics:
        """Return numbers of this rank: loss, norms, rates, times, bytes held, sent and moved. See `Metrics`.

        Any rank may call this alone, at any time before `destroy`. The host waits for the device, to read the
        loss. Rates and times are means of the steps since the last call. The first call begins to note losses
        and to count steps, and returns neither, unless the configuration has log lines or monitors.
        """
        if self.optimizer.closed:
            raise RuntimeError("metrics after destroy, which freed this rank's shards. Call it earlier")
        if self._lap is None:
            self._lap = Lap(self._get_meter())
        return self._read_metrics(self._lap.end())

    def _get_meter(self) -> Meter:
        """Return the meter, which counts from its first use on."""
        if self._meter is None:
            self._meter = Meter(self.module, self.optimizer, self.stopwatch, self.world_size)
            if self.global_steps and not self.accumulation.micro_steps % self.accumulation.micro_batches:
                self._meter.begin()  # else time counts from the end of the first step
        return self._meter

    def _read_metrics(self, means: Means) -> Metrics:
        meter, last, scaler = self._get_meter(), self.optimizer.last, self.optimizer.scaler
        norm = None if last is None else last.grad_norm
        return Metrics(
            step=self.global_steps,
            samples=self.global_samples,
            skipped=self.skipped_steps,
            loss=meter.loss(),
            lr=meter.rates or rates_of(self.optimizer),
            grad_norm=norm,
            clipped_norm=clipped(norm, last.clip) if last and last.applied and norm is not None else None,
            loss_scale=scaler.scale if scaler.scales else None,
            step_seconds=means.step_seconds,
            samples_per_second=means.samples_per_second,
            tokens_per_second=means.tokens_per_second,
            phase_seconds=means.phase_seconds,
            held=meter.held(),
            sent=self.traffic(),
            moved=self.moved(),
            peak=peak_memory(self.device),
        )

    def on_signal(
        self,
        save_dir: str | Path,
        signals: Iterable[int] = SIGNALS,
        tag: str | None = None,
        client_state: ClientState | None = None,
    ) -> None:
        """Finish the step, save a checkpoint and exit with 0 on all ranks, if any rank gets a signal.

        Every rank must call this in the main thread of its process. Call it right after `load_checkpoint`:
        until then the previous handlers run.

        save_dir      the folder and
        tag           the tag for `save_checkpoint`
        signals       default: SIGTERM and SIGUSR1
        client_state  a mapping, read when the run is saved, or a function that returns one then

        `engine.step` finishes the step in which the ranks agree on the signal, waits until the checkpoint is
        complete and raises SystemExit(0). A step that is skipped because of an overflow counts. A further
        signal has no effect. SIGKILL ends the process at once, and the last complete checkpoint stays. A
        signal after the last step has no effect either: the script runs to its end.

        Previous handlers of these signals are not called until `destroy` restores them. A loop that ends
        itself, or does not call `engine.step`, uses `optimizer.watch_signals()` instead.
        """
        self.optimizer.check_open("on_signal")
        stopping = Stopping(self.optimizer, self.save_checkpoint, save_dir, tag, client_state)
        stopping.watch(signals)
        if self.stopping is None:
            self.optimizer.register_step_pre_hook(self._check_step_of_engine)
        self.stopping = stopping

    @property
    def stop_requested(self) -> bool:
        """Whether a watched signal has come to any rank. Equal on all ranks; a step updates it."""
        return self.optimizer.stop_requested

    def _check_step_of_engine(self, *step: Any) -> None:
        """Raise if the loop calls `optimizer.step()` although `on_signal` needs `engine.step()`."""
        if not self._stepping:
            raise RuntimeError(
                "optimizer.step() after on_signal: only engine.step() saves and exits. Call engine.step(). "
                "Or call optimizer.watch_signals() instead of on_signal, and read optimizer.stop_requested "
                "after each step"
            )

    def join_hook(self, **options: Any) -> None:
        """Raise: torch's `Join`, which calls this, is not supported."""
        raise RuntimeError(NO_JOIN)

    def record(self, path: str | Path, steps: int = STEPS) -> FlightRecorder:
        """Record collectives, passes and memory of the last `steps` steps. Call it on every rank.

        path   the file for the recording of all ranks. `python -m zero_full replay PATH` prints it, and the
               player on the site's page "One step, animated" shows it

        Each rank writes into a folder PATH.ID.parts until its recording ends: by `close` of the recorder that
        this returns, at the end of its `with` block, by `destroy`, with the process, or when a collective
        fails. The last rank to end merges the parts into the file.

        Ranks may call it at different moments, also in the middle of a step. Raises OSError if the folder
        cannot be written.
        """
        if steps < 1:
            raise ValueError(f"record: steps must be at least 1, not {steps!r}")
        if self.recorder is not None and not self.recorder.closed:
            raise RuntimeError(
                f"record: this engine already records into {self.recorder.path}. Close that recording first"
            )
        if self._ranges is not None:
            self._follow_profiler()  # the next forward makes ranges again, around the recorder
        about = {
            "stage": self.zero_optimization_stage(),
            "micro_batches": self.accumulation.micro_batches,
            "step": self.global_steps + 1,
        }
        self.recorder = FlightRecorder(path, self.optimizer, about, steps)
        self._recorded = self.recorder.during("forward")
        return self.recorder

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

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the engine, or of the module if only the module has it.

        Raises AttributeError for a value in the place of a method, which would have no effect.
        """
        if not self.is_made or name in vars(self):
            return super().__setattr__(name, value)
        if callable(getattr(type(self), name, None)) and not callable(value):
            raise AttributeError(
                f"engine.{name} is a method: to assign {value!r} to it would change nothing. Set it in the "
                f"configuration; an attribute of the module is engine.module.{name}"
            )
        is_modules = not hasattr(type(self), name) and hasattr(self.module, name)
        return setattr(self.module, name, value) if is_modules else super().__setattr__(name, value)

    # Memory --------------------------------------------------------------------------------------

    def offload_states(
        self,
        include: Collection[str] | None = None,
        device: str | torch.device = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move state off the device until `reload_states`: the kinds of `offload_states.KINDS`; None: all."""
        self.offloaded.offload(include, torch.device(device), pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move all state that `offload_states` has moved back to the device."""
        self.offloaded.reload()

    def empty_partition_cache(self) -> None:
        """Release gathered parameters, and return cached memory of torch's allocator to the device.

        Every rank must call this, because a pass that follows gathers the parameters again.
        """
        if self.optimizer.gatherer is not None:
            self.optimizer.on_every_rank("empty_partition_cache", model_parallel=False)
            self.optimizer.gatherer.release_all()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def destroy(self, gather: bool = False) -> None:
        """Remove the engine's hooks from the model, close its files and free this rank's shards.

        The model keeps its parameters. At stage 3 they stay released, unless every rank passes `gather`: then
        they become whole. In a process that was forked from the engine's this does nothing.
        """
        if os.getpid() != self.made_in:
            return
        if self.recorder is not None:
            self.recorder.close()
        if self.reporting is not None:
            self.reporting.close()
        self.offloaded.reload()
        self._forward_hooks.remove()
        self.optimizer.close(gather)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY)
