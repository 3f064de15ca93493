"""The stages of this rank as torch's pipelining runs them, and their common state during a batch.

[Note: a failing stage] A rank that raises in the middle of a schedule would leave the others waiting for its
activations. So an exception in a layer, the loss or backward is kept: until the end of the schedule the rank
sends zeros in place of results, and then all ranks raise together.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from zero_full._compat import accept_any_loss, discard_micro_batch
from zero_full.config import Config
from zero_full.nested import mapped
from zero_full.pipeline.handover import Handover, joined
from zero_full.pipeline.module import PipelineModule
from zero_full.precision.dtypes import NAMES
from zero_full.shard.passes.reduce import GradientReducer

Timed = Callable[[str], AbstractContextManager[Any]]
LOSS = Handover((), is_tuple=True)  # the last stage hands over nothing


class RunningBatch:
    """The micro-batches of one `train_batch` or `eval_batch`, with their losses and failures on this rank.

    inputs, labels  of each micro-batch; empty on ranks without the first or the last stage
    weigh           multiplies a micro-batch's loss before backward, such as by the loss scale
    losses          of the micro-batches, on the rank with the last stage
    failure         why this rank has stopped computing
    """

    def __init__(
        self,
        inputs: Sequence[Any] = (),
        labels: Sequence[Any] = (),
        weigh: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.inputs, self.labels, self.weigh = inputs, labels, weigh or as_is
        self.losses: list[Tensor] = []
        self.failure: Exception | None = None
        self.where = ""

    def fail(self, error: Exception, where: str) -> None:
        """Keep the first exception of this batch. torch's pipelining wraps some: keep the original."""
        while isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        if self.failure is None:
            self.failure, self.where = error, where

    @property
    def problem(self) -> str:
        """The message for all ranks; "" if nothing has failed here."""
        if self.failure is None:
            return ""
        return f"{self.where}: {type(self.failure).__name__}: {self.failure}"


class StageLayers(nn.Module):
    """The layers of one stage, with the loss behind the last one. Called by torch's pipelining.

    number   the current micro-batch
    repeats  whether a module is called twice, or several layers share a parameter
    takes    what it gets from the stage before; None: it is the first stage
    gives    what the next stage gets
    """

    def __init__(
        self,
        module: PipelineModule,
        stage: int,
        takes: Handover | None,
        gives: Handover,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]],
        casts_to: torch.dtype | None,
        timed: Timed,
    ) -> None:
        super().__init__()
        self.stage, self.is_last = stage, stage == module.total_stages - 1
        # torch asks for this stage's parameters, which are those of its layers.
        layers = module.modules_of(stage)
        self.held = nn.ModuleList({id(m): m for m in layers}.values())
        of_layers = Counter(parameter for layer in layers for parameter in layer.parameters())
        self.repeats = any(count > 1 for count in of_layers.values())
        self.whole: list[PipelineModule] = [module]  # a list: not a submodule
        self.takes, self.gives, self.device = takes, gives, device
        self.autocast, self.casts_to, self.timed = autocast, casts_to, timed
        self.batch = RunningBatch()
        self.number = 0

    def forward(self, *sent: Tensor) -> Any:
        """Return the tensors for the next stage, or the weighed loss. Never raises."""
        if self.batch.failure is None:
            try:
                with self.timed("forward"):
                    return self._outputs(sent)
            except Exception as error:
                self.batch.fail(error, f"forward of stage {self.stage}, micro-batch {self.number}")
        # The next stage waits for this one's tensors. It gets zeros, and all ranks raise after the batch.
        if self.is_last:
            return torch.zeros((), device=self.device, requires_grad=True)
        return tuple(t.zero_() for t in self.gives.carriers(self.device))

    def _outputs(self, sent: tuple[Tensor, ...]) -> Any:
        inputs = self.batch.inputs[self.number] if self.takes is None else self.takes.unpack(sent)
        outputs = self.compute(inputs)
        slots = () if self.takes is None else self.takes.slots
        received = [tensor for tensor, slot in zip(sent, slots, strict=False) if not slot.differentiable]
        if not self.is_last:
            return joined(self.gives.pack(outputs, self.stage), received)
        loss = self.loss_of(outputs, self.batch.labels[self.number])
        self.batch.losses.append(loss.detach())
        return joined((self.batch.weigh(loss),), received)[0]

    def compute(self, inputs: Any) -> Any:
        """Return the outputs of the stage's layers."""
        if self.casts_to is not None and self.takes is None:
            inputs = mapped(self._cast, inputs)
        with self.autocast():
            return self.whole[0].run(self.stage, inputs)

    def loss_of(self, outputs: Any, labels: Any) -> Tensor:
        """Return the loss of a micro-batch."""
        function = self.whole[0].loss_fn
        with self.autocast():
            loss = outputs if function is None else function(outputs, labels)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            kind = (
                f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            what = "the last layer returns" if function is None else "loss_fn returns"
            raise ValueError(f"{what} {kind}, but the loss must be a scalar. Take its mean, for example")
        return loss

    def _cast(self, value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.casts_to) if floating else value


class Stage(PipelineStage):
    """A stage of torch's pipelining. Its backward passes go through the reducer that shards gradients."""

    def __init__(
        self,
        chunk: StageLayers,
        reducer: GradientReducer,
        group: torch.distributed.ProcessGroup,
        total: int,
        index: tuple[Tensor, ...],
    ) -> None:
        """`index` is the first stage's input for torch: the micro-batch's number in place of its data."""
        takes = index if chunk.takes is None else chunk.takes.carriers("meta", requires_grad=True)
        gives = torch.empty((), device="meta") if chunk.is_last else chunk.gives.carriers("meta", True)
        super().__init__(chunk, chunk.stage, total, chunk.device, takes, gives, group=group)
        self.chunk, self.reducer = chunk, reducer
        if chunk.is_last:
            accept_any_loss(self)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run forward of one micro-batch."""
        self.chunk.number = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run backward of one micro-batch, or its part for the inputs only.

        torch's two parts are wrong for a module that is called twice in one stage: there the first part is
        all of it.
        """
        if not self.has_backward:
            return
        if self.chunk.repeats and kwargs.get("full_backward") is False:
            kwargs["full_backward"] = True
            self.dw_runner[bwd_chunk_id] = _nothing  # the part for weights
        self._pass(partial(super().backward_one_chunk, bwd_chunk_id, *args, **kwargs), bwd_chunk_id)
        if self.chunk.batch.failure is not None:
            discard_micro_batch(self, bwd_chunk_id)
            self.bwd_cache[bwd_chunk_id] = (None,) * (1 if self.chunk.takes is None else 0)
            self.dw_runner[bwd_chunk_id] = _nothing
        if self.chunk.takes is not None:  # the stage before expects a gradient of each tensor
            sent, made = self.chunk.takes.carriers(self.device), self.bwd_cache[bwd_chunk_id]
            made = made or (None,) * len(sent)
            self.bwd_cache[bwd_chunk_id] = tuple(
                like.zero_() if grad is None else grad.contiguous()
                for like, grad in zip(sent, made, strict=True)
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the part of a backward pass that makes the gradients of weights."""
        if self.has_backward and self.chunk.batch.failure is None and not self.chunk.repeats:
            self._pass(
                partial(super().backward_weight_one_chunk, bwd_chunk_id, *args, **kwargs), bwd_chunk_id
            )
        self.dw_runner.pop(bwd_chunk_id, None)
        self.backward_state.pop(bwd_chunk_id, None)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradients for the stage before, on this rank; () in evaluation."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradients of the next stage, on this rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _pass(self, act: Callable[[], Any], number: int) -> None:
        """Run `act` as a backward pass of the reducer. Gradients stay on this rank until the step."""
        batch, reducer = self.chunk.batch, self.reducer
        if batch.failure is not None:
            return
        with self.chunk.timed("backward"):
            reducer.begin(divided=True, scaled=True)
            try:
                act()
                self._take_weights()
            except Exception as error:
                reducer.backward.fail()
                batch.fail(error, f"backward of stage {self.stage_index}, micro-batch {number}")
                return
            reducer.finish()

    def _take_weights(self) -> None:
        """Hand gradients to the reducer that torch has put into `param.grad` without autograd's hooks."""
        for param in self.chunk.parameters():
            if param.grad is not None and param in self.reducer.group_and_member:
                self.reducer.arrived(param)
        self.reducer.not_arrived = None


def _nothing() -> None:
    """Do nothing, in place of the backward of weights after a failure."""


def find_handover(chunk: StageLayers, inputs: Any) -> Handover:
    """Run a stage's layers once, without keeping anything, to find the form of their output.

    Notes whether it `repeats` modules. Random numbers and buffers are as before at the end.
    """
    module = chunk.whole[0]
    buffers = [(b, b.clone()) for m in chunk.held for b in m.buffers()]
    devices = [] if chunk.device.type == "cpu" else [chunk.device]
    rng = (
        torch.random.fork_rng(devices, device_type=devices[0].type) if devices else torch.random.fork_rng([])
    )
    calls = Counter[nn.Module]()
    hooks = [
        each.register_forward_pre_hook(lambda called, _: calls.update([called]))
        for each in chunk.held.modules()
        if any(True for _ in each.parameters(recurse=False))
    ]
    try:
        with rng, torch.enable_grad():
            outputs = chunk.compute(inputs)
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    chunk.repeats = chunk.repeats or any(count > 1 for count in calls.values())
    return LOSS if chunk.stage == module.total_stages - 1 else Handover.of(outputs, chunk.stage)


def precision_of(
    config: Config, device: torch.device
) -> tuple[Callable[[], AbstractContextManager[Any]], torch.dtype | None]:
    """Return the context of forward, and the dtype to which the first stage casts its inputs; None: none."""
    section = config.torch_autocast
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    if section.enabled:
        autocast = partial(torch.autocast, device.type, NAMES[section.dtype or "bf16"])
    return autocast, torch.float16 if config.fp16.auto_cast else None


def as_is(loss: Tensor) -> Tensor:
    """Return the loss unscaled: in evaluation no backward pass follows."""
    return loss
