"""`initialize` and `DeepSpeedEngine`: a module around zero_full's engine, for programs that know DeepSpeed's.

The facade adds what these programs expect of DeepSpeed's engine and zero_full's engine lacks: it is an
`nn.Module`, its `config` is a mapping, and it has a few private methods. Everything else is the engine's.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero_full
from zero_full.comm.topology import this_rank
from zero_full.config.json_parser import read
from zero_full.engine.engine import Engine
from zero_full.errors import ConfigError
from zero_full.migrate.name_table import ARGUMENTS
from zero_full.shard.access.gathered_parameters import copy_on_cpu, names_and_values
from zero_full.shard.step.optimizer import ZeroOptimizer

log = logging.getLogger("zero_full")
NO_DEFAULT = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
NO_DEFAULTS_IN = ("optimizer", "scheduler")
HELD = "zero_full_engine"  # attribute of a model
GATHER_16_BIT = ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")


class DeepSpeedEngine(nn.Module):
    """Facade: a module around zero_full's engine. Attributes other than `module` are the engine's."""

    module: nn.Module

    def __init__(self, engine: Engine, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._config = dict(config)
        self.module = engine.module
        self._engine = engine

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Run the model's forward, and return its outputs."""
        return self._engine.forward(*inputs, **named_inputs)

    def __getattr__(self, name: str) -> Any:
        engine = vars(self).get("_engine")
        if engine is not None and not name.startswith("__"):
            with suppress(AttributeError):
                return getattr(engine, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        engine = vars(self).get("_engine")
        is_own = name in vars(self) or hasattr(type(self), name)
        if engine is not None and not is_own and hasattr(engine, name):
            setattr(engine, name, value)  # such as lr_scheduler, which Lightning sets to None
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._engine.__reduce_ex__(protocol)  # raises: an engine cannot be copied

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as a dict, as it was passed."""
        return self._config

    def destroy(self, gather: bool = False) -> None:
        """End the engine. At stage 3 without `gather`, only the next `initialize` of the model ends it.

        Libraries call this, without `gather`, before they initialize the model again. At stage 3 the engine
        has the model's values, and gathering them could need too much memory for a model that is not used
        again.
        """
        held: Held = vars(self.module)[HELD]
        if self._engine.zero_optimization_stage() == 3 and not gather:
            held.is_over = True
        else:
            held.engine = None
            self._engine.destroy(gather)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. `step` does this already."""
        self._engine.zero_grad(set_to_none)

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the model in place."""
        options = dict(compile_kwargs or {})
        if backend is not None:
            options["backend"] = backend
        self.module.compile(**options)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return whether the configuration asks for whole weights at stage 3."""
        zero = self._config.get("zero_optimization", {})
        return any(bool(zero.get(key)) for key in GATHER_16_BIT)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """Return whole weights on rank 0, and None on other ranks. Every rank must call this.

        One group of parameters is gathered at a time, and only rank 0 keeps a copy.
        """
        keep = copy_on_cpu if this_rank() == 0 else _drop
        state = self._trained(keep) if exclude_frozen_parameters else self._engine.module_state_dict(keep)
        return state if this_rank() == 0 else None

    def _trained(self, keep: Callable[[Tensor], Any]) -> dict[str, Any]:
        """Return the state dict without frozen parameters, which are not gathered."""
        kept: dict[Tensor, Any] = {}
        for group in self._engine.optimizer.sharded.groups:
            trained = [member.param for member in group.members if member.param.requires_grad]
            if trained:
                with zero_full.GatheredParameters(trained):
                    kept |= {param: keep(param) for param in trained}
        state = names_and_values(self.module)
        frozen = {param for param in self.module.parameters() if not param.requires_grad}
        for value in state.values():
            if isinstance(value, Tensor) and value not in kept and value not in frozen:
                kept[value] = keep(value)  # a buffer
        return {
            name: kept[value] if isinstance(value, Tensor) else value
            for name, value in state.items()
            if not (isinstance(value, Tensor) and value in frozen)
        }

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """Return the result of `_zero3_consolidated_16bit_state_dict`."""
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)


def _drop(whole: Tensor) -> None:
    """Drop a gathered tensor, on ranks that keep none."""


class Held:
    """Keeps the engine of a model alive as long as the model: at stage 3 it has the model's values.

    A copy of the model has no engine.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine
        self.is_over = False  # destroyed; the next engine of this model gathers its values

    def __deepcopy__(self, memo: Any) -> "Held":
        return Held()

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, ()


def _release(model: nn.Module | None) -> None:
    """End an earlier engine of this model that was destroyed; raise ValueError if it was not."""
    held: Held | None = vars(model).get(HELD) if isinstance(model, nn.Module) else None
    if held is None or held.engine is None:
        return
    if not held.is_over:
        raise ValueError(
            f"this {type(model).__name__} has an engine already, and two would train the same parameters. "
            "End the first one on every rank: trainer.accelerator.free_memory(), or engine.destroy()"
        )
    held.engine.destroy(gather=True)
    held.engine = None


class GenerationHooks:
    """Stand-in for DeepSpeed's `optimizer.parameter_offload` at stage 3. TRL removes its hooks to generate.

    zero_full's hooks can stay: inside GatheredParameters they find everything gathered and send nothing. So
    the lists of hooks are empty, and adding them again does nothing.
    """

    def __init__(self) -> None:
        self.module = _NoParameters()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Do nothing: no hook was removed."""


def _parameter_offload(optimizer: ZeroOptimizer) -> GenerationHooks:
    if optimizer.settings.stage != 3:
        raise AttributeError("this optimizer has no attribute 'parameter_offload': its stage is not 3")
    return GenerationHooks()


def add_parameter_offload() -> None:
    """Add the attribute `parameter_offload` to `ZeroOptimizer`, for programs that look for it at stage 3."""
    setattr(ZeroOptimizer, "parameter_offload", property(_parameter_offload))  # noqa: B010


class _NoParameters(nn.Module):
    """A module without parameters, because TRL clears an attribute of DeepSpeed's on every parameter."""

    def ds_external_parameters(self) -> Iterable[Any]:
        """Return nothing."""
        return ()


# The configuration ---------------------------------------------------------------------------------------


def _as_dict(config: Any) -> dict[str, Any]:
    """Return a copy of the configuration; of the contents, if it is a file."""
    if isinstance(config, str | Path):
        config = read(Path(config)).value
    if not isinstance(config, Mapping):
        raise ConfigError(f"the configuration must be an object (a dict), not {type(config).__name__}")
    return deepcopy(dict(config))


def filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without keys that DeepSpeed ignores, and log these on rank 0.

    A value "auto" that no library has replaced takes DeepSpeed's default. Batch sizes and the parameters of
    optimizer and schedule have none, so there zero_full's own error remains. Top-level keys with a dot, which
    TRL writes, are unknown to DeepSpeed.
    """
    dotted = [key for key in config if "." in key]
    left, dropped = {}, list[str]()
    for key, value in config.items():
        if key in dotted:
            continue
        if key in NO_DEFAULT or key in NO_DEFAULTS_IN:
            left[key] = value
        elif value == "auto":
            dropped.append(key)
        else:
            left[key] = _without_auto(value, f"{key}.", dropped)
    if this_rank() == 0:
        if dropped:
            log.info('"auto" takes its default: %s', ", ".join(dropped))
        if dotted:
            log.info("dropped, because DeepSpeed has no key with a dot: %s", ", ".join(dotted))
    return left


def _without_auto(value: Any, prefix: str, dropped: list[str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    left = {}
    for key, inner in value.items():
        if inner == "auto":
            dropped.append(f"{prefix}{key}")
        else:
            left[key] = _without_auto(inner, f"{prefix}{key}.", dropped)
    return left


# initialize ----------------------------------------------------------------------------------------------


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, ZeroOptimizer, Any, Any]:
    """Wrap the model as `zero_full.initialize` does. The arguments are DeepSpeed's, in its order."""
    if mesh_param is not None:
        raise TypeError(f"deepspeed.initialize(mesh_param=...): instead, {ARGUMENTS['mesh_param']}")
    if isinstance(model, DeepSpeedEngine):
        raise TypeError("the model is an engine already. Pass the module itself, engine.module")
    if dist_init_required is not False:
        zero_full.init_distributed(distributed_port=distributed_port)
    _release(model)
    given = config if config is not None else config_params
    given = given if given is not None else getattr(args, "deepspeed_config", None)
    whole = None if given is None else _as_dict(given)
    used = None if whole is None else filled(whole)
    listed = None if model_parameters is None else list(model_parameters)
    engine, wrapped, loader, schedule = zero_full.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=listed or None,  # Lightning passes [] for a model that is not trained
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        dist_init_required=False,
        collate_fn=collate_fn,
        config=given if used == whole else used,  # of a file, errors have lines
    )
    setattr(engine.module, HELD, Held(engine))
    return DeepSpeedEngine(engine, whole or {}), wrapped, loader, schedule
