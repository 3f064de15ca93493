"""The state of an optimizer that steps pieces, as its user sees it: by parameter."""

from collections import UserDict
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor
from torch.nn import Parameter

OFFLOADED = "states are offloaded: call engine.reload_states() first"


class StateByParameter(UserDict[Any, dict[str, Any]]):
    """An optimizer's state by parameter, as far as this rank keeps it; a piece stands for its parameter.

    So the optimizer, which steps pieces, finds the same state as a user, who knows parameters. As in torch,
    it appears when it is first asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[Tensor, Parameter] = {}  # by piece; and each parameter of which there is a piece
        self.is_away = False  # see `offload_states.py`
        self.settled: Callable[[], None] = lambda: None  # returns when nobody writes to it

    def add(self, piece: Tensor, param: Parameter) -> None:
        """From now on `piece` stands for `param`."""
        self.owners[piece] = self.owners[param] = param

    def know(self, param: Parameter) -> None:
        """There is such a parameter, of which this rank may own nothing: its state is empty then."""
        self.owners[param] = param

    def forget(self, params: Collection[Parameter]) -> None:
        """Nothing stands for these any more, and nothing is known of them."""
        self.data = {param: state for param, state in self.data.items() if param not in params}
        self.owners = {key: owner for key, owner in self.owners.items() if owner not in params}

    def _owner(self, key: Any) -> Parameter:
        if not isinstance(key, Tensor) or key not in self.owners:
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise KeyError(f"this rank keeps no optimizer state of {what}")
        return self.owners[key]

    def __getitem__(self, key: Any) -> dict[str, Any]:
        if self.is_away:
            raise RuntimeError(OFFLOADED)
        self.settled()
        return self.data.setdefault(self._owner(key), {})

    def __setitem__(self, key: Any, state: dict[str, Any]) -> None:
        if self._owner(key) is key:
            raise RuntimeError(
                "set optimizer state with zero_full.safe_set_full_optimizer_state(param, value, key)"
            )
        self.data[self._owner(key)] = state

    def __delitem__(self, key: Any) -> None:
        del self.data[self._owner(key)]

    def __contains__(self, key: Any) -> bool:
        return isinstance(key, Tensor) and key in self.owners and self.owners[key] in self.data

    def values(self) -> Any:
        """All of it, also while it is away."""
        self.settled()
        return self.data.values()

    def get(self, key: Any, default: Any = None) -> Any:
        """The state, if there is any; nothing appears."""
        self.settled()
        return self.data[self._owner(key)] if key in self else default

    def pop(self, key: Any, *default: Any) -> Any:
        """The state, which is kept no more."""
        return self.data.pop(self._owner(key)) if key in self or not default else default[0]
