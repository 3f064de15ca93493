"""Read universal checkpoints, which `ds_to_universal` converts from others: a folder for each parameter.

    zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt    full tensors; flattened if converted from stage 3
    zero/NAME/step.pt                               a number; from stage 3 it is in optimizer_state.pt
    zero/optimizer_state.pt                         the other optimizer state, of the first rank
    *model_states.pt                                copies of the original files

If some parameters are not in the optimizer, these and the buffers also have a folder each, converted to fp32.
They are read from the copied files instead.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from zero_full.checkpoint.deepspeed.model import ModelStates, add_scaler, add_untrained
from zero_full.checkpoint.deepspeed.saved_source import SavedSource, StoredRanges, numbers_of
from zero_full.checkpoint.disk import is_file_name
from zero_full.checkpoint.torch_file import SavedTensor
from zero_full.checkpoint.unpickle import load_saved
from zero_full.errors import CheckpointError
from zero_full.shard.contents.keys import PARAMETERS, STATE, STEP


class UniversalSource(SavedSource):
    """A universal checkpoint of a model without tensor parallelism."""

    def __init__(self, path: Path, models: list[ModelStates]) -> None:
        super().__init__(path, "DeepSpeed, universal")
        self.models = models
        self.common: Mapping[str, Any] = load_saved(path / "zero" / "optimizer_state.pt")
        stage = int(self.common.get("zero_stage", 1))
        groups = models[0].trained
        if groups is None:
            raise CheckpointError(
                f"{models[0].path} does not name the trained parameters (param_shapes). Load the original "
                "checkpoint"
            )
        self.shared = models[0].shared(stage, models[0].world)
        self.add_groups(self.common["param_groups"], groups)
        self._check_round_robin(stage, groups)
        for group, named in enumerate(groups):
            common = self._numbers(stage, group)
            for name, shape in named.items():
                self._add_parameter(name, shape, common)
        add_untrained(self, models, stage)
        add_scaler(self, self.common.get("loss_scaler"))

    def _check_round_robin(self, stage: int, groups: list[Mapping[str, tuple[int, ...]]]) -> None:
        """Raise CheckpointError if DeepSpeed's converter has mixed up parameters.

        `round_robin_gradients` changes the parameters' order in the flat buffer. The converter ignores that,
        unless there is padding between them. With at most as many parameters as ranks the order is the same.
        """
        model, paddings = self.models[0], self.common.get("param_alignment_paddings") or [[]] * len(groups)
        zero = model.config.get("zero_optimization") or {}
        if stage == 3 or not zero.get("round_robin_gradients"):
            return
        for named, padding in zip(groups, paddings, strict=True):
            if model.world > 1 and len(named) > model.world and not any(padding):
                raise CheckpointError(
                    f"{self.path} was converted from a run with round_robin_gradients, whose parameters "
                    "DeepSpeed's converter mixes up. Load the original checkpoint, which is read correctly"
                )

    def _numbers(self, stage: int, group: int) -> dict[str, Any]:
        """Return state that the optimizer keeps per group, or at stage 3 per sub-group."""
        if stage == 3:
            base = self.common["optimizer_state_dict"]
            places = [place for each in base["param_groups"] for place in each["params"]]
            return numbers_of(base["state"].get(places[group], {}))
        options = self.common["param_groups"][group]
        return numbers_of({STEP: options[STEP]}) if STEP in options else {}

    def _add_parameter(self, name: str, shape: tuple[int, ...], numbers: dict[str, Any]) -> None:
        folder = self.path / "zero" / name
        if not is_file_name(name) or not (folder / "fp32.pt").is_file():
            raise CheckpointError(
                f"{folder / 'fp32.pt'} does not exist: the conversion was interrupted, or is an old one. "
                "Convert again, or load the original checkpoint"
            )
        found = {path.stem: load_saved(path) for path in sorted(folder.glob("*.pt"))}
        if STEP in found:
            numbers = {**numbers, **numbers_of({STEP: found.pop(STEP)})}
        for entry, content in found.items():
            values = self._values(folder / f"{entry}.pt", content, shape)
            key = f"{PARAMETERS}/{name}" if entry == "fp32" else f"{STATE}/{entry}/{name}"
            self.add(key, StoredRanges.whole(shape), [values])
        if numbers and len(found) > 1:
            self.numbers[f"{PARAMETERS}/{name}"] = dict(numbers)

    def _values(self, path: Path, content: Any, shape: tuple[int, ...]) -> SavedTensor:
        """Return the tensor in a file: the content itself, or an entry beside the merge options."""
        merged = content if isinstance(content, Mapping) else {"param": content}
        unknown = merged.keys() - {"param", "cat_dim"}
        if unknown or merged.get("cat_dim", 0) != 0:
            raise CheckpointError(
                f"{path} was merged from tensor-parallel ranks or experts, as it has "
                f"{', '.join(sorted(unknown)) or 'a cat_dim'}. Only tensors that were whole on each rank are "
                "supported"
            )
        values = merged["param"]
        if not isinstance(values, SavedTensor) or values.numel != prod(shape):
            raise CheckpointError(
                f"{path} is not a tensor of shape {shape}, as {self.models[0].path.name} requires. "
                "Convert again, or load the original checkpoint"
            )
        return values
