"""Read DeepSpeed's model state files: the module's state dict, parameter shapes and training counters."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from zero_full.checkpoint.deepspeed.saved_source import SavedSource, StoredRanges, with_values
from zero_full.checkpoint.torch_file import SavedTensor
from zero_full.checkpoint.unpickle import SavedDynamicScaler, SavedStaticScaler, load_saved
from zero_full.errors import CheckpointError
from zero_full.shard.contents.keys import BUFFERS, PARAMETERS

Shapes = Mapping[str, tuple[int, ...]]  # parameter shapes by name, in the order of the flat buffer

UNNAMED = "(whose names DeepSpeed has not saved)"  # stands for frozen parameters that were left out
# All other keys belong to client_state: DeepSpeed stores both in one dict.
OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
    *("global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
    *("ds_version", "universal_checkpoint_info", "num_experts", "ds_autoep_layers", "autoep_layers"),
    *("folding", "sparse_tensor_module_names", "csr_tensor_module_names"),
}


class ModelStates:
    """The content of one model state file.

    Raises CheckpointError if it is another file, or if the model has experts or is split across ranks by
    tensor or pipeline parallelism.
    """

    def __init__(self, path: Path) -> None:
        content = load_saved(path)
        if not isinstance(content, Mapping) or not {"module", "dp_world_size"} <= content.keys():
            raise CheckpointError(
                f"{path} is not a model state file of DeepSpeed. Copy it again, or load another tag"
            )
        sizes = content.get("checkpoint_parallel_dimensions") or {}
        if content.get("mp_world_size", 1) != 1 or any(size != 1 for size in sizes.values()):
            raise CheckpointError(
                f"{path}: the model was sharded by tensor or pipeline parallelism, which is not supported. "
                "Convert it with the tools of the framework that has sharded it"
            )
        if not isinstance(content["module"], Mapping):
            raise CheckpointError(
                f"{path} holds no module, but layers of pipeline parallelism, which are not supported. "
                "Convert it with the tools of the framework that has saved it"
            )
        experts = content.get("num_experts") or []
        if content.get("ds_autoep_layers") or any(experts if isinstance(experts, list) else [experts]):
            raise CheckpointError(
                f"{path} is of a model with experts, whose files are not supported. Load it with DeepSpeed, "
                "save the weights as safetensors, and read these with load_weights"
            )
        config = content.get("ds_config")
        self.path, self.content = path, content
        # The module's state dict. At stage 3 most of its parameters are empty.
        self.module: Mapping[str, Any] = content["module"]
        # Shapes of the optimizer's parameters, by group, at stage 3 by sub-group; None without ZeRO.
        self.trained: list[Shapes] | None = content.get("param_shapes")
        self.trained_names = frozenset(name for shapes in self.trained or [] for name in shapes)
        # From stage 2 on: shapes of frozen parameters; at stage 3: this rank's shards of them.
        self.frozen: Shapes = content.get("frozen_param_shapes") or {}
        self.fragments: Mapping[str, SavedTensor] = content.get("frozen_param_fragments") or {}
        # DeepSpeed's configuration; empty if it was given as a file.
        self.config: Mapping[str, Any] = config if isinstance(config, Mapping) else {}
        self.world = int(content["dp_world_size"])  # data-parallel ranks of the run

    def shared(self, stage: int, world: int) -> dict[str, Any]:
        """Return the data that are equal on all ranks, except the optimizer's."""
        content = self.content
        found = {
            "counters": self._counters(world),
            "client_state": with_values({k: v for k, v in content.items() if k not in OWN_KEYS}),
            "about": {
                "world_size": world,
                "stage": stage,
                "step": content.get("global_steps"),
                "deepspeed": content.get("ds_version"),
            },
        }
        if content.get("lr_scheduler") is not None:
            found["lr_scheduler"] = with_values(content["lr_scheduler"])
        return found

    def _counters(self, world: int) -> dict[str, int]:
        """Return the training counters. DeepSpeed does not save `micro_steps`: compute it from the config."""
        names = ("global_steps", "global_samples", "skipped_steps")
        counters = {name: int(self.content[name]) for name in names if self.content.get(name) is not None}
        accumulated = _accumulation_steps(self.config, world)
        if accumulated is not None and "global_steps" in counters:
            counters["micro_steps"] = counters["global_steps"] * accumulated
        return counters


def _accumulation_steps(config: Mapping[str, Any], world: int) -> int | None:
    """Return the gradient accumulation steps by DeepSpeed's rule, or None if they cannot be computed."""
    given = config.get("gradient_accumulation_steps")
    whole, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if isinstance(given, int):
        return given
    if isinstance(whole, int) and isinstance(micro, int) and micro > 0:
        return whole // (micro * world) or None
    return 1 if config and not {given, whole, micro} & {"auto"} else None


# Tensors that are not in the optimizer -----------------------------------------------------------


def add_untrained(source: SavedSource, models: list[ModelStates], stage: int) -> None:
    """Add frozen and empty parameters, buffers, and the other names of tied parameters.

    `models` are the ranks' files: a single one at stages 0 to 2, whose state dict is complete.
    """
    first = models[0]
    frozen = dict(_frozen_at_3(source, models) if stage == 3 else _frozen_before_3(source, first))
    for name, value in first.module.items():
        if isinstance(value, SavedTensor) and _is_buffer(first, name):
            source.add(f"{BUFFERS}/{name}", StoredRanges.whole(value.shape), [value])
    source.shared["frozen"] = sorted(name for name, numel in frozen.items() if numel)
    if stage >= 2 and first.content.get("frozen_param_shapes", {}) is None:
        source.shared["excluded"] = [UNNAMED]
    for name, stored in (first.content.get("shared_params") or {}).items():
        if f"{PARAMETERS}/{name}" not in source.tensors and f"{PARAMETERS}/{stored}" in source.tensors:
            source.aliases[name] = stored


def _is_buffer(model: ModelStates, name: str) -> bool:
    return name in model.content["buffer_names"] or name.endswith("_extra_state")


def _frozen_before_3(source: SavedSource, model: ModelStates) -> dict[str, int]:
    tied, frozen = model.content.get("shared_params") or {}, {}
    for name, value in model.module.items():
        known = (
            name in model.trained_names or f"{PARAMETERS}/{name}" in source.tensors or name in source.aliases
        )
        if not isinstance(value, SavedTensor) or known or _is_buffer(model, name):
            continue
        if name not in tied or not value.numel:  # DeepSpeed considers all empty tensors tied
            source.add(f"{PARAMETERS}/{name}", StoredRanges.whole(value.shape), [value])
            frozen[name] = value.numel
    return frozen


def _frozen_at_3(source: SavedSource, models: list[ModelStates]) -> dict[str, int]:
    sizes = {}
    for name, shape in models[0].frozen.items():
        missing = [model.path.name for model in models if name not in model.fragments]
        if missing:
            raise CheckpointError(
                f"{source.path / missing[0]} lacks its shard of {name}: the files are of different runs. "
                "Copy all files of one run here"
            )
        parts = [model.fragments[name] for model in models]
        sizes[name] = prod(shape)
        source.add(f"{PARAMETERS}/{name}", StoredRanges.even(shape, len(parts), 0), parts)
    return sizes


# The loss scale ------------------------------------------------------------------------------------


def add_scaler(source: SavedSource, saved: object) -> None:
    """Add the saved loss scale of DeepSpeed to `source`, if zero_full has a loss scaler of that kind."""
    if isinstance(saved, SavedStaticScaler):
        source.shared["scaler"] = {"scale": float(saved.attributes["cur_scale"])}
    elif isinstance(saved, SavedDynamicScaler) and saved.attributes["scale_factor"] == 2:
        of = saved.attributes
        source.shared["scaler"] = dynamic_scale(
            of, of["min_scale"], of["delayed_shift"], of["cur_hysteresis"], of["consecutive_hysteresis"]
        )


def dynamic_scale(
    of: Mapping[str, Any], minimum: float, hysteresis: int, lives: int, consecutive: bool
) -> dict[str, Any]:
    """Return the state of a dynamic loss scale, under the names of `precision.scaler`."""
    return {
        "scale": float(of["cur_scale"]),
        "window": of["scale_window"],
        "minimum": float(minimum),
        "hysteresis": hysteresis,
        "consecutive_hysteresis": consecutive,
        "lives": lives,
        "steps": of["cur_iter"],
        "last_overflow": of["last_overflow_iter"],
    }
