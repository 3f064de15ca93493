"""The `state` of an optimizer that steps pieces, indexed by parameter or by piece."""

from collections import UserDict
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor
from torch.nn import Parameter

OFFLOADED = "states are offloaded. Call engine.reload_states() first"


class StateByParameter(UserDict[Any, dict[str, Any]]):
    """This rank's optimizer state, a dict that accepts a parameter or its piece as the key.

    So the optimizer, which steps pieces, and user code, which has parameters, find the same state. As in
    torch, an entry is created when it is first read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[Tensor, Parameter] = {}  # piece -> parameter, and parameter -> itself
        self.is_offloaded = False  # see `offload_states.py`
        self.settled: Callable[[], None] | None = None  # waits for a delayed update that writes the state

    def add(self, piece: Tensor, param: Parameter) -> None:
        """Make `piece` a key for the state of `param`."""
        self.owners[piece] = self.owners[param] = param

    def know(self, param: Parameter) -> None:
        """Make `param` a key. Its state is empty if this rank owns none of it."""
        self.owners[param] = param

    def forget(self, params: Collection[Parameter]) -> None:
        """Remove the keys and state of these parameters."""
        self.data = {param: state for param, state in self.data.items() if param not in params}
        self.owners = {key: owner for key, owner in self.owners.items() if owner not in params}

    def _owner(self, key: Any) -> Parameter:
        if not isinstance(key, Tensor) or key not in self.owners:
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise KeyError(f"this rank has no optimizer state for {what}")
        return self.owners[key]

    def __getitem__(self, key: Any) -> dict[str, Any]:
        if self.is_offloaded:
            raise RuntimeError(OFFLOADED)
        if self.settled is not None:
            self.settled()
        owner = self.owners[key] if isinstance(key, Tensor) and key in self.owners else self._owner(key)
        return self.data.setdefault(owner, {})

    def __setitem__(self, key: Any, state: dict[str, Any]) -> None:
        if self._owner(key) is key:
            raise RuntimeError(
                "optimizer state of a parameter cannot be replaced as a whole. Set single entries with "
                "zero_full.safe_set_full_optimizer_state(param, value, key)"
            )
        self.data[self._owner(key)] = state

    def __delitem__(self, key: Any) -> None:
        del self.data[self._owner(key)]

    def __contains__(self, key: Any) -> bool:
        return isinstance(key, Tensor) and key in self.owners and self.owners[key] in self.data

    def values(self) -> Any:
        """Return the state of all parameters, also while it is offloaded."""
        if self.settled is not None:
            self.settled()
        return self.data.values()

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter or piece, without creating it."""
        if self.settled is not None:
            self.settled()
        return self.data[self._owner(key)] if key in self else default

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove the state of a parameter or piece, and return it."""
        return self.data.pop(self._owner(key)) if key in self or not default else default[0]
