"""DeepSpeed's getters: methods that only read an engine's state and configuration."""

import os
from typing import Any

from torch.optim import Optimizer

from zero_full.comm.topology import this_rank
from zero_full.config import Config
from zero_full.precision.scaler import DynamicScale
from zero_full.shard.passes.backward import Accumulation
from zero_full.shard.step.optimizer import ZeroOptimizer


class DeepSpeedQueries:
    """The getters of DeepSpeed's engine, under their names. `Engine` sets the attributes they read."""

    config: Config
    optimizer: ZeroOptimizer
    world_size: int  # data-parallel ranks
    _stepped: bool  # the last call of `step` was at a gradient accumulation boundary
    accumulation: Accumulation

    def was_step_applied(self) -> bool:
        """Return whether the last call of `step` updated the parameters: at a boundary, no overflow."""
        return self._stepped and self.optimizer.last is not None and self.optimizer.last.applied

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's averaged gradients, unscaled and before clipping.

        None before the first step, and in fp32 without clipping, where no step needs the norm: it costs a
        pass over the gradients. Set a large gradient_clipping to have it computed.
        """
        return None if self.optimizer.last is None else self.optimizer.last.grad_norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of every parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Return the momentum, or Adam's betas, of every parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    @property
    def basic_optimizer(self) -> Optimizer:
        """The wrapped optimizer, for methods of its own such as Lamb's `get_lamb_coeffs`."""
        return self.optimizer.base

    def loss_scale(self) -> float:
        """Return the loss scale of the next backward pass."""
        return self.optimizer.scaler.scale

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic."""
        return isinstance(self.optimizer.scaler, DynamicScale)

    def traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has sent so far, by kind of collective."""
        return dict(self.optimizer.communicators.traffic.sent)

    def moved(self) -> dict[str, int]:
        """Return the bytes that offload has moved, by direction: down to the host, up, read, written."""
        sharded = self.optimizer.sharded
        copied = sharded.copy_threads.copied.sent if sharded.copy_threads is not None else {}
        return {**copied, **self.optimizer.settings.tier.moved(), **sharded.param_store.moved()}

    @property
    def global_rank(self) -> int:
        """This process's rank in the world."""
        return this_rank()

    @property
    def local_rank(self) -> int:
        """This process's rank on its host."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def train_batch_size(self) -> int:
        """Return the samples of a step, over all ranks and micro-batches."""
        return self.train_micro_batch_size_per_gpu() * self.accumulation.micro_batches * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of one rank's micro-batch."""
        size = self.config.train_micro_batch_size_per_gpu
        if not size:
            raise RuntimeError(
                "the configuration has no batch size: set train_micro_batch_size_per_gpu or train_batch_size"
            )
        return size

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches in a step."""
        return self.accumulation.micro_batches

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (samples in a step, samples in a rank's micro-batch, micro-batches in a step)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.accumulation.micro_batches

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage: 0, 1, 2 or 3."""
        return self.optimizer.settings.stage

    def zero_optimization(self) -> bool:
        """Return whether optimizer state is sharded: stage 1 or higher."""
        return self.zero_optimization_stage() > 0

    def fp16_enabled(self) -> bool:
        """Return whether parameters are fp16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Return whether parameters are bf16."""
        return self.config.bf16.enabled

    def gradient_clipping(self) -> float:
        """Return the norm to which gradients are clipped; 0: never. Default 1.0, DeepSpeed's since 0.19.3."""
        return self.config.gradient_clipping
