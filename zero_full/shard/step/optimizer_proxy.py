"""What an optimizer that stands in another's place shows of it: groups, state and defaults."""

from typing import Any

import torch

from zero_full.shard.group.optimizer_state import StateByParameter

NO_COPY = "this optimizer cannot be copied or pickled: it belongs to a model. Save its state_dict() instead"


class InItsPlace(torch.optim.Optimizer):
    """The part of an optimizer that is the wrapped one's."""

    base: torch.optim.Optimizer
    own_state: StateByParameter

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the wrapped optimizer, which list the model's parameters."""
        return self.base.param_groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state: what this rank keeps, by parameter."""
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        """Forget it, if `state` is empty."""
        self.base.state = state
        self._take_back_state()

    def _take_back_state(self) -> None:
        """What was put in the place of the state resets it, if it is empty."""
        if self.base.state is not self.own_state:
            given, self.base.state = self.base.state, self.own_state  # type: ignore[assignment]
            self.own_state.settled()
            if given:
                raise RuntimeError("set optimizer state with zero_full.safe_set_full_optimizer_state")
            self.own_state.clear()

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default options of the wrapped optimizer."""
        return self.base.defaults

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the layout is made once."""
        raise RuntimeError(
            "parameter groups cannot be added after initialize, because slices are already dealt: pass all "
            "of them to initialize (those that should wait may be frozen until then)"
        )
