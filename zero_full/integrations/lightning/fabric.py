"""`ZeroFabricStrategy`: a strategy of Lightning Fabric that trains with engines of zero_full."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _Sharded
from torch import Tensor, nn

import zero_full
from zero_full.engine.engine import Engine
from zero_full.integrations.lightning import folder
from zero_full.integrations.lightning.arguments import Arguments
from zero_full.integrations.lightning.configuration import engine_config
from zero_full.integrations.lightning.engines import make_engines, without_sync
from zero_full.integrations.lightning.precision import ZeroFabricPrecision, check_clipping, name_of
from zero_full.shard.step.optimizer import ZeroOptimizer


class ZeroFabricStrategy(Arguments, DDPStrategy, _Sharded):
    """Trains the model and optimizer of `fabric.setup` with ZeRO: `Fabric(strategy=ZeroFabricStrategy(3))`.

    stage    0, 1, 2 or 3; None: the configuration's, or 3
    config   a dict, or the path of a JSON file, with DeepSpeed's keys; without those that Fabric decides
    others   accelerator, parallel_devices, cluster_environment, process_group_backend, timeout and precision
             as in Fabric's DDPStrategy

    engines  those of all calls of `setup`, one for each optimizer
    """

    precision_argument = "precision"

    def __init__(
        self, stage: int | None = None, config: Mapping[str, Any] | str | Path | None = None, **others: Any
    ) -> None:
        super().__init__(stage, config, **others)
        self.engines: list[Engine] = []
        self._of_module: dict[int, list[Engine]] = {}  # by the id of what `setup` returned
        self._backward_sync_control = _SyncControl(self)

    @property
    def precision(self) -> ZeroFabricPrecision:
        """The engines' precision, by the name that Fabric got."""
        return self._precision if self._precision is not None else ZeroFabricPrecision("32-true")

    @precision.setter
    def precision(self, plugin: Any) -> None:
        same = plugin is None or isinstance(plugin, ZeroFabricPrecision)
        self._precision = plugin if same else ZeroFabricPrecision(name_of(plugin))

    # Set up --------------------------------------------------------------------------------------

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[Any, list[Any], Any]:
        """Make an engine for each optimizer. Returns the engine or module, optimizers and scheduler."""
        engine_or_module, sharded = self._make_engines(module, optimizers)
        return engine_or_module, sharded, scheduler

    def setup_module(self, module: nn.Module) -> Any:
        """Make an engine without an optimizer, for inference."""
        return self._make_engines(module, [])[0]

    def _make_engines(self, module: nn.Module, optimizers: list[Any]) -> tuple[Any, list[Any]]:
        config = engine_config(self.stage, self.config, self.precision.precision)
        engines, sharded = make_engines(module, optimizers, config)
        self.engines += engines
        result = engines[0] if len(engines) == 1 else module
        self._of_module[id(result)] = engines
        return result, sharded

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Raise: an engine needs the model and its optimizers together."""
        raise NotImplementedError(
            "zero_full shards a model and its optimizers together. Call fabric.setup(model, optimizer), not "
            "setup_module and setup_optimizers"
        )

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Make modules of `fabric.init_module()` without memory at stage 3; the engine fills its shards."""
        if self.stage < 3:
            context: AbstractContextManager[Any] = super().module_init_context(empty_init)
            return context
        stack = ExitStack()
        stack.enter_context(self.precision.module_init_context())
        stack.enter_context(self.module_sharded_context())
        return stack

    def module_sharded_context(self) -> AbstractContextManager[Any]:
        """Make modules without memory at stage 3; the engine fills its shards."""
        return zero_full.Init(enabled=self.stage == 3)

    # Steps ---------------------------------------------------------------------------------------

    def engines_of(self, module: Any) -> Sequence[Engine]:
        """Return the engines of a module that `setup` returned; None: all of them."""
        return self.engines if module is None else self._of_module.get(id(module), [])

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward, with the loss scale."""
        engines = self.engines_of(module)
        scaled = [engine for engine in engines if engine.optimizer.scaler.scales]
        if len(scaled) > 1:
            raise ValueError(
                "several engines scale the loss (precision 16-mixed). Pass the model: fabric.backward(loss, "
                "model=model)"
            )
        if scaled or len(engines) == 1:
            tensor = (scaled or engines)[0].scale(tensor)
        super().backward(tensor, module, *args, **kwargs)

    def clip_gradients_norm(
        self,
        module: Any,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Let the next step clip the gradients to `max_norm`, and return their norm before clipping.

        After an earlier call for the same step that is the norm that they will have after its clipping.
        """
        if float(norm_type) != 2.0:
            raise ValueError(f"norm_type {norm_type} is not supported with zero_full, which clips the 2-norm")
        chosen = optimizer.reducer.state.next_clip
        optimizer.clip_next_step(float(max_norm))
        norm = optimizer.grad_norm()
        if chosen and isfinite(norm):
            norm = min(norm, chosen)
        if error_if_nonfinite and not isfinite(norm):
            raise RuntimeError(
                f"the norm of the gradients is {norm}, so they cannot be clipped. Pass "
                "error_if_nonfinite=False to skip such steps"
            )
        return torch.tensor(norm, device=self.root_device)

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        """Raise: only the norm is clipped."""
        check_clipping("value")

    # Checkpoints ---------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a folder with the engines of the model in `state`, and its other values of the first rank."""
        if storage_options is not None or filter:
            name = "filter" if filter else "storage_options"
            raise TypeError(f"fabric.save({name}=...) is not supported with zero_full. Remove it")
        engines, others = self._split_state(state)
        if not engines:
            raise ValueError("fabric.save: the state has no model that fabric.setup returned. Add it")
        path = self.broadcast(str(path))
        plain = {
            key: value.state_dict() if hasattr(value, "state_dict") else value
            for key, value in others.items()
        }
        folder.save(engines, path, plain)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder, or a file of another strategy. Returns the values that are not in `state`."""
        if isinstance(state, (Engine, nn.Module)):  # fabric.load_raw
            state = {None: state}
        engines, others = self._split_state(state or {})
        if not engines:
            raise ValueError("fabric.load: pass the model that fabric.setup returned, in state")
        if folder.is_folder(path):
            states = any(isinstance(value, ZeroOptimizer) for value in state.values())
            found = folder.load(engines, path, states=states, strict=strict, weights_only=weights_only)
        else:
            found = self._load_file(path, state, engines, strict, weights_only)
        for key, value in others.items():
            if key not in found:
                if strict:
                    raise KeyError(f"{path} has no {key!r}. Pass strict=False to leave it as it is")
                continue
            saved = found.pop(key)
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(saved)
            else:
                state[key] = saved
        return found

    def _load_file(
        self, path: Any, state: Mapping[Any, Any], engines: Sequence[Engine], strict: bool, weights_only: Any
    ) -> dict[str, Any]:
        """Load whole parameters of a file; return its other values."""
        if any(isinstance(value, ZeroOptimizer) for value in state.values()):
            raise NotImplementedError(
                f"{path} is a file of another strategy: its optimizer state can be loaded into the torch "
                "optimizer before fabric.setup, which keeps it. Leave the optimizer out of state"
            )
        found: dict[Any, Any] = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        if None in state:
            found = {None: found}
        for key, value in state.items():
            for engine in self._of_module.get(id(value), ()):
                engine.load_module_state_dict(found.pop(key), strict)
        return found

    def _split_state(self, state: Mapping[Any, Any]) -> tuple[list[Engine], dict[Any, Any]]:
        """Return the engines of the models in `state`, and its values that are no models or optimizers."""
        engines = [engine for value in state.values() for engine in self._of_module.get(id(value), ())]
        others = {
            key: value
            for key, value in state.items()
            if id(value) not in self._of_module and not isinstance(value, ZeroOptimizer)
        }
        return engines, others

    def get_module_state_dict(self, module: Any) -> dict[str, Any]:
        """Return whole parameters and buffers. Every rank must call this."""
        engines = self.engines_of(module)
        return {key: value for engine in engines for key, value in engine.module_state_dict().items()}


class _SyncControl(_BackwardSyncControl):
    """Skips the averaging of gradients in `fabric.no_backward_sync`."""

    def __init__(self, strategy: ZeroFabricStrategy) -> None:
        self.strategy = strategy

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[Any]:
        """Leave gradients on this rank, at stages that keep whole gradients anyway."""
        return without_sync(self.strategy.engines_of(module) if enabled else (), self.strategy.stage)
