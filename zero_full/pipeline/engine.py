"""`PipelineEngine`: trains a `PipelineModule`, one batch of micro-batches at a time.

    train_batch   read micro-batches; run torch's schedule, whose backward passes leave gradients on this
                  rank; sum the gradients of tied layers; average over the ranks with the same stages; step
    the step      the engine's own: norm, clipping and overflow are of all stages

Besides the step, ranks exchange a few numbers twice in a batch: before the schedule, whether a rank has no
data or new shapes, and after it, the loss and whether a rank has failed.

[Note: averages of a batch] A rank averages its gradients when its own last backward pass has ended, while
earlier stages still compute. It does not know yet whether another rank has failed. So all ranks average, also
after a failure, and discard the gradients when they learn of it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from zero_full._compat import backend_of
from zero_full.comm.communicator import Communicator
from zero_full.comm.topology import Topology
from zero_full.engine.engine import STATES_OFFLOADED, Engine
from zero_full.engine.forward_hooks import ForwardHooks
from zero_full.engine.loader import RepeatingLoader
from zero_full.optim.one_bit import OneBitOptimizer
from zero_full.pipeline.data import MicroBatches, Signature, read_micro_batches
from zero_full.pipeline.handover import Handover
from zero_full.pipeline.module import PipelineModule
from zero_full.pipeline.schedules import make_schedule
from zero_full.pipeline.stage import (
    LOSS,
    RunningBatch,
    Stage,
    StageLayers,
    as_is,
    find_handover,
    precision_of,
)
from zero_full.pipeline.stage_options import DIFFERENT, StageOptions
from zero_full.pipeline.tied import Tie, sum_gradients
from zero_full.shard.step.agreement import are_equal, gather_messages, numbers_on

WHOLE_BATCHES = (
    "a PipelineEngine runs whole batches, not {call}: call train_batch(data_iter) or eval_batch(data_iter) "
    "on every rank"
)
PARTS = (
    "{call}: each rank has the layers of its own stages only. Save a checkpoint (save_checkpoint), and write "
    "its weights to one file by `python -m zero_full export`"
)


class PipelineEngine(Engine):
    """Trains a `PipelineModule`. `Engine` documents the common part: checkpoints, metrics, counters.

    module          the PipelineModule, with the layers of this rank's stages
    data_iterator   yields this rank's pairs (inputs, labels) if `train_batch` gets no iterator; None: none
    """

    module: PipelineModule

    def __init__(self, *engine: Any, topology: Topology, ties: list[Tie], **named: Any) -> None:
        """
        engine, named  the arguments of `Engine`
        topology       the groups of the optimizer
        ties           the tied modules that this rank shares with other places
        """
        super().__init__(*engine, **named)
        self.topology, module = topology, self.module
        if isinstance(self.basic_optimizer, OneBitOptimizer) and (keys := module.shared_keys()):
            name = type(self.basic_optimizer).__name__
            self.destroy()  # all ranks raise
            raise ValueError(
                f"{name} averages with compression, which would let the copies of tied layers on several "
                f"stages ({', '.join(keys)}) drift apart. Use another optimizer, or untie them"
            )
        assert topology.pipe is not None
        if self.device.type != "cpu" and backend_of(topology.pipe, self.device) == "gloo":
            self.destroy()
            raise ValueError(
                "gloo cannot send activations between accelerators. Start with nccl, and one device for each "
                "rank"
            )
        self._is_first_place = 0 in module.stages
        self._is_last_place = module.total_stages - 1 in module.stages
        self.data_iterator: Iterator[Any] | None = None
        if self.training_dataloader is not None:
            self.data_iterator = RepeatingLoader(self.training_dataloader)
        communicators = self.optimizer.communicators
        self._ties = [
            (tie, Communicator(tie.group, self.device, communicators.traffic, None, "tied layers", False))
            for tie in ties
        ]
        communicators.all.extend(communicator for _, communicator in self._ties)
        communicators.opened.extend(tie.group for tie in ties)
        self._chunks: list[StageLayers] = []
        self._schedule: Any = None
        self._built_for: tuple[Signature, int] | None = None  # shapes of inputs, number of micro-batches
        self._reads = False  # a data iterator is running
        self._options = StageOptions(module, self.basic_optimizer, lambda: self.lr_scheduler)
        self._learn_options()

    def _learn_options(self) -> None:
        """Note which options all stages have alike. Every rank must call this."""
        self._options.learn(self._add_up(self._options.numbers()))

    def _make_forward_hooks(self) -> ForwardHooks:
        return ForwardHooks(self.module, self.optimizer, scales_outputs=False)  # stages do it themselves

    def division_rule(self) -> str:
        """Return "": `train_batch` always divides the losses by the number of micro-batches."""
        return ""

    # Batches -------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on the next `micro_batches` micro-batches. Every rank must call this.

        data_iter  yields pairs (inputs, labels); only ranks with the first or the last stage read it, and
                   both must get the same data. None: the iterator of `set_dataiterator` or of `training_data`

        Returns the mean loss over micro-batches and data-parallel ranks, equal on every rank. Raises
        StopIteration on every rank if all iterators have ended. If a rank fails, all ranks raise, and
        no parameter has changed.
        """
        self._check_ready("train_batch")
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch inside torch.no_grad(). Call it outside")
        self.module.train()
        scaler, count = self.optimizer.scaler, self.micro_batches
        loss = self._run_batch(data_iter, lambda loss: scaler.times(loss / count), trains=True)
        self.accumulation.micro_steps += count - 1
        try:
            super().step()
        except Exception:
            self.optimizer.zero_grad()  # the next batch must not add to this one's gradients
            raise
        return loss

    def eval_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Return the mean loss of the next `micro_batches` micro-batches, in evaluation mode.

        Every rank must call this. See `train_batch`.
        """
        self._check_ready("eval_batch")
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                return self._run_batch(data_iter, as_is, trains=False)
        finally:
            self.module.train(was_training)

    def _run_batch(
        self, data_iter: Iterator[Any] | None, weigh: Callable[[Tensor], Tensor], trains: bool
    ) -> Tensor:
        """Run the schedule, and return the mean loss. Gradients stay on this rank."""
        count = self.micro_batches
        data = self.data_iterator if data_iter is None else data_iter
        # The position in `training_data` is to be equal on all ranks: a checkpoint has it once.
        is_own = data is self.data_iterator and self.training_dataloader is not None
        first, last = self._is_first_place, self._is_last_place
        self._reads = True
        read = read_micro_batches(data, count, self.device, first, last, is_own)
        self._reads = False
        is_new = self._compare(read, (read.signature, count), trains)
        batch = RunningBatch(read.inputs, read.labels, weigh)
        if trains and self._meter is not None:
            for inputs in read.inputs:
                self._meter.count_tokens((inputs,), {})
        numbers = torch.arange(count)
        self.accumulation.boundary = False  # gradients are averaged once, in the step
        try:
            if is_new:
                self._build(read, count)  # all ranks do
            schedule = self._schedule
            for chunk in self._chunks:
                chunk.batch = batch
            run = schedule.step if trains else schedule.eval
            run(
                *([numbers] if self._is_first_place else []),
                target=numbers if self._is_last_place else None,
                return_outputs=False,
            )
            is_trained = not trains or bool(self.optimizer.reducer.used)
            if trains:
                with self._time("backward"):
                    self._average()
            return self._end_batch(batch, trains, is_trained)
        except BaseException as error:
            self._memory_notes.explain(error, "train_batch" if trains else "eval_batch")
            self.optimizer.zero_grad()
            raise
        finally:
            self.accumulation.boundary = None
            for chunk in self._chunks:
                chunk.batch = RunningBatch()

    def _compare(self, read: MicroBatches, wanted: tuple[Signature, int], trains: bool) -> bool:
        """Raise on every rank if one cannot begin. Return whether any rank needs other shapes than before."""
        is_new, count = self._built_for != wanted, wanted[1] if trains else -wanted[1]
        numbers = [float(bool(read.problem)), float(read.ended), float(is_new), 1.0, count, count**2]
        told = self._add_up(numbers + self._options.numbers())
        if not are_equal(*told[3:6]):
            self._raise_together(
                f"{'train_batch' if trains else 'eval_batch'} with {wanted[1]} micro-batches, where another "
                "rank makes the other call, or has another number. Make the same calls on every rank",
                None,
            )
        if told[0]:
            readers = self._add_up([float(read.was_read)])[0]
            if told[1] == told[0] == readers:
                raise StopIteration
            self._raise_together(read.problem, read.error)
        if trains and (changed := self._options.changed(told[len(numbers) :])):
            self._raise_together(self._options.described(changed), None, DIFFERENT)
        return told[2] > 0

    def _average(self) -> None:
        """Average this rank's gradients. Its data ranks, and those of its ties, must call this.

        See [Note: averages of a batch].
        """
        reducer = self.optimizer.reducer
        for tie, communicator in self._ties:
            sum_gradients(tie, communicator, reducer)
        reducer.backward.is_boundary = True
        reducer.flush()

    def _end_batch(self, batch: RunningBatch, trains: bool, is_trained: bool) -> Tensor:
        """Return the mean loss; raise on every rank if one has failed.

        is_trained  whether a parameter of this rank has got a gradient
        """
        problem, own = batch.problem, 0.0
        if not problem and not is_trained:
            problem = (
                f"no parameter of stages {self.module.stages} got a gradient: the loss does not depend on "
                "them. Freeze nothing that a whole stage consists of, or use fewer stages"
            )
        losses = batch.losses
        if losses and not problem:
            mean = torch.stack([loss.float() for loss in losses]).double().mean()
            own = mean.item()
        told = self._add_up([float(bool(problem)), own])
        if told[0]:
            self._raise_together(problem, batch.failure)
        loss = torch.tensor(told[1] / self.world_size, dtype=torch.float32, device=self.device)
        if trains:
            if losses:
                for each in losses:
                    self.accumulation.add_loss(each / len(losses))
            elif torch.isfinite(loss):  # for `metrics` and log lines: this rank has no loss of its own
                self.accumulation.add_loss(loss)
        return loss

    def _add_up(self, numbers: list[float]) -> list[float]:
        """Return the sums of a few numbers over all ranks. Every rank must call this."""
        vector = numbers_on(self.device, numbers)
        for communicator in self.optimizer.communicators.everyone:
            communicator.sum_numbers(vector, "losses and failures of a batch")
        summed: list[float] = vector.tolist()
        return summed

    def _raise_together(self, problem: str, error: Exception | None, text: str = "{}") -> NoReturn:
        """Raise the problems of all ranks on every rank. `text`: around them."""
        mine = [f"rank {self.global_rank}: {problem}"] if problem else []
        told = gather_messages(self.optimizer.communicators, mine, "what went wrong in a batch")
        raise RuntimeError(
            f"the batch failed, and no parameter has changed. {text.format('; '.join(sorted(told)))}"
        ) from error

    def _check_ready(self, call: str) -> None:
        self.optimizer.check_open(call)
        if self.optimizer.offloaded.copies:
            raise RuntimeError(STATES_OFFLOADED % call)
        self._check_not_reading(call)
        self.optimizer.check_model_unchanged()

    def _check_not_reading(self, call: str) -> None:
        """Raise RuntimeError while a data iterator is running, which the ranks in the middle do not read."""
        if self._reads:
            raise RuntimeError(
                f"{call} inside the data iterator of a batch. Not all stages read it: call it between batches"
            )

    def save_checkpoint(self, *arguments: Any, **named: Any) -> bool:
        """Save a checkpoint of all stages: see `Engine.save_checkpoint`. Every rank must call this."""
        self._check_not_reading("save_checkpoint")
        return super().save_checkpoint(*arguments, **named)

    def load_checkpoint(self, *arguments: Any, **named: Any) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of all stages: see `Engine.load_checkpoint`. Every rank must call this."""
        self._check_not_reading("load_checkpoint")
        found = super().load_checkpoint(*arguments, **named)
        self._learn_options()
        return found

    def load_state_dict(self, *arguments: Any, **named: Any) -> None:
        """Restore this rank's part: see `Engine.load_state_dict`. Every rank must call this."""
        self._check_not_reading("load_state_dict")
        super().load_state_dict(*arguments, **named)
        self._learn_options()

    # The schedule --------------------------------------------------------------------------------

    def _build(self, read: MicroBatches, count: int) -> None:
        """Find the shapes between stages, and make torch's schedule for them. Every rank must call this."""
        module, pipe = self.module, self.topology.pipe
        assert pipe is not None
        self._built_for, self._schedule = None, None
        autocast, casts_to = precision_of(self.config, self.device)
        self._chunks, takes, inputs, problem = [], None, None, ""
        failure: Exception | None = None
        known = self.optimizer.communicators.pipe
        for stage in range(module.total_stages):  # in order: each one's output is the next one's input
            here: tuple[str, Handover] | None = None
            if stage in module.stages:
                chunk = StageLayers(module, stage, takes, LOSS, self.device, autocast, casts_to, self._time)
                self._chunks.append(chunk)
                try:
                    inputs = read.inputs[0] if takes is None else takes.example(self.device)
                    chunk.gives = find_handover(chunk, inputs)
                    here = "", chunk.gives
                except Exception as error:
                    what = f"rank {self.global_rank}: forward of stage {stage}, micro-batch 0"
                    here, failure = (f"{what}: {type(error).__name__}: {error}", LOSS), error
            found = [here] if known is None else known.gather_objects(here, f"the output of stage {stage}")
            problem, takes = next(each for each in found if each is not None)
            if problem:
                break
        told = gather_messages(
            self.optimizer.communicators, [problem] if problem else [], "shapes between stages"
        )
        if told:
            raise RuntimeError(
                f"the batch failed, and no parameter has changed. {'; '.join(sorted(told))}"
            ) from failure
        index = (torch.empty(1, dtype=torch.int64, device="meta"),)
        stages = [Stage(c, self.optimizer.reducer, pipe, module.total_stages, index) for c in self._chunks]
        self._schedule = make_schedule(self.config.pipeline.schedule, stages, count, _first_argument)
        self._built_for = read.signature, count

    def _time(self, phase: str) -> AbstractContextManager[Any]:
        return self._timed[phase]()

    # DeepSpeed's names ---------------------------------------------------------------------------

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a batch: `gradient_accumulation_steps`."""
        return self.accumulation.micro_batches

    @property
    def stage_id(self) -> int:
        """This rank's place in its pipeline."""
        return self.module.place

    @property
    def num_stages(self) -> int:
        """The ranks of one pipeline."""
        return self.module.num_stages

    def is_first_stage(self) -> bool:
        """Return whether this rank has the first stage, and so reads inputs."""
        return self._is_first_place

    def is_last_stage(self) -> bool:
        """Return whether this rank has the last stage, and so reads labels."""
        return self._is_last_place

    def is_pipe_parallel(self) -> bool:
        """Return whether a pipeline has several ranks."""
        return self.num_stages > 1

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Read batches from this iterator, if a call gets none."""
        self.data_iterator = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Read batches from this loader repeatedly, if a call gets no iterator."""
        self.training_dataloader = loader
        self.data_iterator = RepeatingLoader(loader)

    def forward(self, *inputs: Any, **named_inputs: Any) -> NoReturn:
        """Raise: a pipeline runs whole batches."""
        raise RuntimeError(WHOLE_BATCHES.format(call="forward"))

    def backward(self, *loss: Any, **options: Any) -> NoReturn:
        """Raise: a pipeline runs whole batches."""
        raise RuntimeError(WHOLE_BATCHES.format(call="backward"))

    def scale(self, loss: Tensor) -> NoReturn:
        """Raise: a pipeline runs whole batches."""
        raise RuntimeError(WHOLE_BATCHES.format(call="scale"))

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> NoReturn:
        """Raise: a pipeline runs whole batches."""
        raise RuntimeError(WHOLE_BATCHES.format(call="step"))

    # What needs the whole model on every rank ------------------------------------------------------

    def generation(self, *options: Any, **named: Any) -> NoReturn:
        """Raise: a rank has only its stages' layers."""
        raise RuntimeError(PARTS.format(call="generation"))

    def weights(self, *options: Any, **named: Any) -> NoReturn:
        """Raise: a rank has only its stages' layers."""
        raise RuntimeError(PARTS.format(call="weights"))

    def save_weights(self, directory: str | PathLike[str], *options: Any, **named: Any) -> NoReturn:
        """Raise: a rank has only its stages' layers."""
        raise RuntimeError(PARTS.format(call="save_weights"))

    def load_weights(self, path: str | PathLike[str], *options: Any, **named: Any) -> NoReturn:
        """Raise: a rank has only its stages' layers."""
        raise RuntimeError(PARTS.format(call="load_weights"))

    def save_16bit_model(self, save_dir: str | Path, *options: Any, **named: Any) -> NoReturn:
        """Raise: a rank has only its stages' layers."""
        raise RuntimeError(PARTS.format(call="save_16bit_model"))


def _first_argument(output: Tensor, number: Tensor) -> Tensor:
    """Return the output of the last stage, which is the loss already."""
    return output
