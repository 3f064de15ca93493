"""Select and rename the parameters and buffers of a module that a weights file holds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from zero_full.shard.access.gathered_parameters import names_and_values
from zero_full.shard.step.optimizer import ZeroOptimizer

Renaming = Callable[[str], str | None]  # the name in the file; None: not in the file


@dataclass
class Selection:
    """The contents of a weights file, by name in the file, in the module's order.

    The parameters may be sharded, without values.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)  # tied tensors appear under every name
    others: dict[str, Any] = field(default_factory=dict)  # values that are no tensors (`get_extra_state`)

    def first_names(self) -> dict[Tensor, str]:
        """Return every tensor once, with its first name."""
        first: dict[Tensor, str] = {}
        for name, tensor in self.tensors.items():
            first.setdefault(tensor, name)
        return first

    def aliases(self) -> dict[str, str]:
        """Return each later name of a tied tensor, with the tensor's first name."""
        first = self.first_names()
        return {name: first[tensor] for name, tensor in self.tensors.items() if first[tensor] != name}


def select(module: nn.Module, names: Renaming | None = None) -> Selection:
    """Select the entries of the module's state dict, renamed by `names` if given."""
    selection, origin = Selection(), dict[str, str]()
    for name, value in names_and_values(module).items():
        renamed = name if names is None else names(name)
        if renamed is None:
            continue
        if renamed in origin:
            raise ValueError(
                f"names maps {origin[renamed]} and {name} to the same name in the file, {renamed}"
            )
        origin[renamed] = name
        place = selection.tensors if isinstance(value, Tensor) else selection.others
        place[renamed] = value
    return selection


def check_unique_names(optimizer: ZeroOptimizer) -> None:
    """Raise ValueError if ranks have different parameters of the same name, which one file cannot hold.

    Raises RuntimeError during local steps of 0/1 Adam, and after an interrupted step.
    """
    optimizer.check_ranks_equal("saving or loading weights")
    groups = optimizer.groups
    if groups.expert is not None or (groups.model is not None and groups.model.size > 1):
        raise ValueError(
            "with experts or tensor-parallel layers, parameters of the same name differ between ranks. Use "
            "engine.module_state_dict() and engine.load_module_state_dict(...), with a file for each part"
        )
