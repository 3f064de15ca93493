"""Read DeepSpeed checkpoints without ZeRO, whose optimizer state has no parameter names.

[Note: matching by shape] An optimizer's state dict has indices in place of names. The parameters of a group
are assumed to be in the model's order, as is usual. The shapes determine which parameter is in which group,
and which are left out because they are frozen. In 16-bit training the values determine it as well, as each
master weight rounds to its parameter. If two arrangements are possible, the reader raises an error.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zero_full.checkpoint.deepspeed.model import ModelStates, add_untrained, dynamic_scale
from zero_full.checkpoint.deepspeed.saved_source import (
    SavedSource,
    StoredRanges,
    numbers_of,
    options_of,
    states_of,
)
from zero_full.checkpoint.torch_file import SavedTensor
from zero_full.errors import CheckpointError
from zero_full.shard.contents.keys import PARAMETERS, STATE

COMPARED = 1024  # elements of a parameter that are compared with its master weights


class _ListedState:
    """One group's optimizer state, with an entry and, in 16-bit training, a master weight for each parameter.

    Positions from 0 to `end` are those where a parameter can begin: here the indices of the entries.
    """

    def __init__(self, states: list[dict[str, Any]], masters: list[SavedTensor] | None) -> None:
        self.states, self.masters = states, masters
        self.end = len(states)

    def position_after(self, position: int, value: SavedTensor) -> int | None:
        """Return the position after this parameter, or None if it does not match at this position."""
        if position == self.end:
            return None
        if self.masters is not None and not _rounds_to(self.masters[position], 0, value):
            return None
        shapes = {part.shape for _, part, _ in self.parts(position)}
        return position + 1 if shapes <= {value.shape} else None

    def state(self, position: int) -> Mapping[str, Any]:
        """Return the state of the parameter at this position."""
        return self.states[position]

    def parts(self, position: int) -> Iterator[tuple[str, SavedTensor, int]]:
        """Yield the tensors of the parameter at this position.

        Each has a key prefix ("parameters" or "state/ENTRY"), the stored tensor, and the first element in it.
        """
        if self.masters is not None:
            yield PARAMETERS, self.masters[position], 0
        for entry, part in self.states[position].items():
            if isinstance(part, SavedTensor) and part.shape:
                yield f"{STATE}/{entry}", part, 0


class _FlatState:
    """One group's optimizer state with one flat master buffer and one entry. Positions are elements."""

    def __init__(self, state: dict[str, Any], master: SavedTensor) -> None:
        self.common, self.master = state, master
        self.end = master.numel

    def position_after(self, position: int, value: SavedTensor) -> int | None:
        return position + value.numel if value.numel and _rounds_to(self.master, position, value) else None

    def state(self, position: int) -> Mapping[str, Any]:
        return self.common

    def parts(self, position: int) -> Iterator[tuple[str, SavedTensor, int]]:
        yield PARAMETERS, self.master, position
        for entry, part in self.common.items():
            if isinstance(part, SavedTensor) and part.shape == self.master.shape:
                yield f"{STATE}/{entry}", part, position


GroupState = _ListedState | _FlatState


def _rounds_to(master: SavedTensor, begin: int, value: SavedTensor) -> bool:
    count = min(value.numel, COMPARED)
    if begin + value.numel > master.numel:
        return False
    rounded = master.read(begin, begin + count).to(value.dtype)
    return torch.allclose(rounded, value.read(0, count), rtol=0, atol=0, equal_nan=True)


def assign_parameters(
    values: Mapping[str, SavedTensor], groups: list[GroupState]
) -> dict[str, tuple[GroupState, int]] | int:
    """Return each trained parameter's group and position; 0 if no arrangement matches, 2 if several do.

    See [Note: matching by shape]. Dynamic programming over the parameters: after each, `ways` has the
    reachable positions of all groups with the number of ways to reach them, and `steps` the predecessors.
    """
    ways = {(0,) * len(groups): 1}
    steps: list[dict[tuple[int, ...], tuple[tuple[int, ...], int | None]]] = []
    for value in values.values():
        here, ways = ways, {}
        steps.append({})
        for positions, count in here.items():
            for positions_after, group in _choices(positions, groups, value):
                ways[positions_after] = min(2, ways.get(positions_after, 0) + count)
                steps[-1][positions_after] = positions, group
    positions = tuple(group.end for group in groups)
    if ways.get(positions) != 1:
        return ways.get(positions, 0)
    found: dict[str, tuple[GroupState, int]] = {}
    for name, step in zip(reversed([*values]), reversed(steps), strict=True):
        positions, group = step[positions]
        if group is not None:
            found[name] = groups[group], positions[group]
    return dict(reversed(found.items()))


def _choices(
    positions: tuple[int, ...], groups: list[GroupState], value: SavedTensor
) -> Iterator[tuple[tuple[int, ...], int | None]]:
    yield positions, None
    for number, group in enumerate(groups):
        after = group.position_after(positions[number], value)
        if after is not None:
            yield (*positions[:number], after, *positions[number + 1 :]), number


class Stage0Source(SavedSource):
    """A DeepSpeed checkpoint without ZeRO: one file with the optimizer state in it."""

    def __init__(self, path: Path, model: ModelStates) -> None:
        super().__init__(path, "DeepSpeed, without ZeRO")
        self.model = model
        self.shared = model.shared(0, model.world)
        values = self._parameters()
        optimizer = model.content.get("optimizer")
        if optimizer:
            self._add_trained(values, optimizer)
        add_untrained(self, [model], 0)
        if not optimizer:
            del self.shared["frozen"]  # unknown without an optimizer

    def _parameters(self) -> dict[str, SavedTensor]:
        """Return the parameters by their first names, and add their other names as aliases."""
        found: dict[str, SavedTensor] = {}
        first: dict[object, str] = {}
        for name, value in self.model.module.items():
            if not isinstance(value, SavedTensor) or name in self.model.content["buffer_names"]:
                continue
            stored = first.setdefault(value.place, name) if value.numel else name
            if stored == name:
                found[name] = value
            else:
                self.aliases[name] = stored
        return found

    def _add_trained(self, values: dict[str, SavedTensor], optimizer: Mapping[str, Any]) -> None:
        base = optimizer.get("optimizer_state_dict", optimizer)
        groups = _group_states(base, optimizer)
        found = assign_parameters(values, groups)
        if isinstance(found, int):
            problem = "does not match" if found == 0 else "matches in several ways"
            raise CheckpointError(
                f"{self.model.path}: without ZeRO the optimizer state has no names, and it {problem} the "
                "parameters' shapes and values. Save with DeepSpeed at stage 1, or load only the weights: "
                f"engine.load_module_state_dict(torch.load({self.model.path.name!r})['module'])"
            )
        for name, (group, position) in found.items():
            value = values[name]
            for place, part, begin in group.parts(position):
                self.add(f"{place}/{name}", StoredRanges.whole(value.shape, begin), [part])
            if f"{PARAMETERS}/{name}" not in self.tensors:
                self.add(f"{PARAMETERS}/{name}", StoredRanges.whole(value.shape), [value])
            if numbers := numbers_of(group.state(position)):
                self.numbers[f"{PARAMETERS}/{name}"] = numbers
        self.shared["groups"] = options_of(base["param_groups"])
        self.shared["members"] = [[n for n, (r, _) in found.items() if r is group] for group in groups]
        scaler = self._scaler(optimizer)
        if scaler is not None:
            self.shared["scaler"] = scaler

    def _scaler(self, optimizer: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the loss scaler's state, or None. Without ZeRO, DeepSpeed saves only a part of it.

        The rest comes from its configuration. The remaining hysteresis is assumed to be the full one.
        """
        if "cur_scale" not in optimizer:
            return None
        if not optimizer["dynamic_loss_scale"]:
            return {"scale": float(optimizer["cur_scale"])}
        given = self.model.config.get("fp16") or {}
        if optimizer["scale_factor"] != 2:
            return None
        lives, consecutive = given.get("hysteresis", 2), given.get("consecutive_hysteresis", False)
        return dynamic_scale(optimizer, given.get("min_loss_scale", 1), lives, lives, consecutive)


def _group_states(base: Mapping[str, Any], optimizer: Mapping[str, Any]) -> list[GroupState]:
    """Return the parameter groups of one of the three optimizers that DeepSpeed has without ZeRO."""
    states = states_of(base)
    if "fp32_groups_flat" in optimizer:
        masters = optimizer["fp32_groups_flat"]
        return [_FlatState(state[0], master) for state, master in zip(states, masters, strict=True)]
    masters = optimizer.get("fp32_groups", [None] * len(states))
    return [_ListedState(each, master) for each, master in zip(states, masters, strict=True)]
