"""What an engine is asked about its run and its configuration."""

import os
from typing import Any

from torch.optim import Optimizer

from zero_full.comm.topology import this_rank
from zero_full.config import Config
from zero_full.precision.scaler import DynamicScale
from zero_full.shard.step.optimizer import ZeroOptimizer


class DeepSpeedQueries:
    """The questions that DeepSpeed's engine answers, with its names."""

    config: Config
    optimizer: ZeroOptimizer
    world_size: int
    micro_steps: int
    _stepped: bool
    _micro_batches: int

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` moved the parameters; in the middle of a step it does not."""
        return self._stepped and self.optimizer.last is not None and self.optimizer.last.applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's averaged gradients, unscaled and before clipping.

        None before the first step, and in fp32 without clipping: nothing needs it there, and it costs a
        pass over the gradients. Set a large gradient_clipping to have it.
        """
        return None if self.optimizer.last is None else self.optimizer.last.grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The momentum, or Adam's betas, of every parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    @property
    def basic_optimizer(self) -> Optimizer:
        """The optimizer that is wrapped, for what only it knows, such as a Lamb's `get_lamb_coeffs`."""
        return self.optimizer.base

    def loss_scale(self) -> float:
        """The loss scale of the next backward."""
        return self.optimizer.scaler.scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts itself."""
        return isinstance(self.optimizer.scaler, DynamicScale)

    def traffic(self) -> dict[str, int]:
        """Bytes this rank has sent so far, by kind of collective."""
        return dict(self.optimizer.groups.traffic.sent)

    def moved(self) -> dict[str, int]:
        """Bytes moved so far for what waits on the host or a disk, by way: copied down, up, read, written."""
        flow, waiting = self.optimizer.parts.flow, self.optimizer.waiting
        copied = flow.copied.sent if flow is not None else {}
        return {**copied, **waiting.tier.moved(), **waiting.shelf.moved()}

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return this_rank()

    @property
    def local_rank(self) -> int:
        """This process's rank among those on its host."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def train_batch_size(self) -> int:
        """How many samples a step takes, over all ranks and micro-batches."""
        return self.train_micro_batch_size_per_gpu() * self._micro_batches * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """How many samples a rank takes in a micro-batch."""
        size = self.config.train_micro_batch_size_per_gpu
        if not size:
            raise RuntimeError(
                "the configuration has no batch size: set train_micro_batch_size_per_gpu or train_batch_size"
            )
        return size

    def gradient_accumulation_steps(self) -> int:
        """How many micro-batches a step takes."""
        return self._micro_batches

    def get_batch_info(self) -> tuple[int, int, int]:
        """(samples a step, samples a rank and micro-batch, micro-batches a step)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self._micro_batches

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Take so many samples a step from now on, by changing the number of micro-batches."""
        each = self.train_micro_batch_size_per_gpu() * self.world_size
        if self.micro_steps % self._micro_batches:
            raise RuntimeError("the batch size can change between steps, not inside one")
        if train_batch_size < 1 or train_batch_size % each:
            raise ValueError(
                f"train_batch_size {train_batch_size} is not a multiple of {each}, micro-batch x ranks"
            )
        self._micro_batches, self.micro_steps = train_batch_size // each, 0

    def zero_optimization_stage(self) -> int:
        """The stage: 0, 1, 2 or 3."""
        return self.optimizer.settings.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self.config.bf16.enabled

    def gradient_clipping(self) -> float:
        """The largest gradient norm that a step takes; 0 if any. By default 1.0, DeepSpeed's since 0.19.3."""
        return self.config.gradient_clipping
