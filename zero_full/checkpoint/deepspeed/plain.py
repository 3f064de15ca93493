"""Read DeepSpeed checkpoints without ZeRO, whose optimizer state has no parameter names.

[Note: which is whose] An optimizer's state dict has indices in place of names. The parameters of a group are
assumed to be in the model's order, as is usual. The shapes determine which parameter is in which group, and
which are left out because they are frozen. In 16-bit training the values determine it as well, as each master
weight rounds to its parameter. If two arrangements are possible, the reader raises an error.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zero_full.checkpoint.deepspeed.model import ModelStates, add_untrained, dynamic_scale
from zero_full.checkpoint.deepspeed.ranges import Cuts, SavedSource, numbers_of, options_of, states_of
from zero_full.checkpoint.torch_file import SavedTensor
from zero_full.errors import CheckpointError
from zero_full.shard.contents.state import PARAMETERS, STATE

COMPARED = 1024  # elements of a parameter that are compared with its master weights


class Row(ABC):
    """One parameter group's optimizer state: positions from 0 to `end`, where a parameter can begin."""

    end: int

    @abstractmethod
    def after(self, position: int, value: SavedTensor) -> int | None:
        """Return the position after this parameter, or None if it does not match at this position."""

    @abstractmethod
    def state(self, position: int) -> Mapping[str, Any]:
        """Return the state of the parameter at this position."""

    @abstractmethod
    def parts(self, position: int) -> Iterator[tuple[str, SavedTensor, int]]:
        """Yield the tensors of the parameter at this position.

        Each has a key prefix ("parameters" or "state/ENTRY"), the stored tensor, and the first element in it.
        """


class ListedRow(Row):
    """A group with a state and, in 16-bit training, a master weight for each parameter."""

    def __init__(self, states: list[dict[str, Any]], masters: list[SavedTensor] | None) -> None:
        self.states, self.masters = states, masters
        self.end = len(states)

    def after(self, position: int, value: SavedTensor) -> int | None:
        """Implement `Row`."""
        if position == self.end:
            return None
        if self.masters is not None and not _rounds_to(self.masters[position], 0, value):
            return None
        shapes = {part.shape for _, part, _ in self.parts(position)}
        return position + 1 if shapes <= {value.shape} else None

    def state(self, position: int) -> Mapping[str, Any]:
        """Implement `Row`."""
        return self.states[position]

    def parts(self, position: int) -> Iterator[tuple[str, SavedTensor, int]]:
        """Implement `Row`."""
        if self.masters is not None:
            yield PARAMETERS, self.masters[position], 0
        for entry, part in self.states[position].items():
            if isinstance(part, SavedTensor) and part.shape:
                yield f"{STATE}/{entry}", part, 0


class FlatRow(Row):
    """A group with one flat master buffer and one state for all parameters. Positions are elements."""

    def __init__(self, state: dict[str, Any], master: SavedTensor) -> None:
        self.common, self.master = state, master
        self.end = master.numel

    def after(self, position: int, value: SavedTensor) -> int | None:
        """Implement `Row`."""
        return position + value.numel if value.numel and _rounds_to(self.master, position, value) else None

    def state(self, position: int) -> Mapping[str, Any]:
        """Implement `Row`."""
        return self.common

    def parts(self, position: int) -> Iterator[tuple[str, SavedTensor, int]]:
        """Implement `Row`."""
        yield PARAMETERS, self.master, position
        for entry, part in self.common.items():
            if isinstance(part, SavedTensor) and part.shape == self.master.shape:
                yield f"{STATE}/{entry}", part, position


def _rounds_to(master: SavedTensor, begin: int, value: SavedTensor) -> bool:
    count = min(value.numel, COMPARED)
    if begin + value.numel > master.numel:
        return False
    rounded = master.read(begin, begin + count).to(value.dtype)
    return torch.allclose(rounded, value.read(0, count), rtol=0, atol=0, equal_nan=True)


def arranged(values: Mapping[str, SavedTensor], rows: list[Row]) -> dict[str, tuple[Row, int]] | int:
    """Return each trained parameter's row and position; 0 if no arrangement matches, 2 if several do.

    See [Note: which is whose]. Dynamic programming over the parameters: after each, `ways` has the reachable
    positions of all rows with the number of ways to reach them, and `steps` the predecessors.
    """
    ways = {(0,) * len(rows): 1}
    steps: list[dict[tuple[int, ...], tuple[tuple[int, ...], int | None]]] = []
    for value in values.values():
        here, ways = ways, {}
        steps.append({})
        for positions, count in here.items():
            for positions_after, row in _choices(positions, rows, value):
                ways[positions_after] = min(2, ways.get(positions_after, 0) + count)
                steps[-1][positions_after] = positions, row
    positions = tuple(row.end for row in rows)
    if ways.get(positions) != 1:
        return ways.get(positions, 0)
    found: dict[str, tuple[Row, int]] = {}
    for name, step in zip(reversed([*values]), reversed(steps), strict=True):
        positions, row = step[positions]
        if row is not None:
            found[name] = rows[row], positions[row]
    return dict(reversed(found.items()))


def _choices(
    positions: tuple[int, ...], rows: list[Row], value: SavedTensor
) -> Iterator[tuple[tuple[int, ...], int | None]]:
    yield positions, None
    for number, row in enumerate(rows):
        after = row.after(positions[number], value)
        if after is not None:
            yield (*positions[:number], after, *positions[number + 1 :]), number


class PlainSource(SavedSource):
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
        rows = _rows(base, optimizer)
        found = arranged(values, rows)
        if isinstance(found, int):
            problem = (
                "does not fit to the parameters" if found == 0 else "fits to the parameters in several ways"
            )
            raise CheckpointError(
                f"{self.model.path}: without ZeRO the optimizer's state has no names, and it {problem}. "
                "Save with DeepSpeed at stage 1; or load the weights alone, with "
                f"engine.load_module_state_dict(torch.load({self.model.path.name!r})['module'])"
            )
        for name, (row, position) in found.items():
            value = values[name]
            for place, part, begin in row.parts(position):
                self.add(f"{place}/{name}", Cuts.whole(value.shape, begin), [part])
            if f"{PARAMETERS}/{name}" not in self.tensors:
                self.add(f"{PARAMETERS}/{name}", Cuts.whole(value.shape), [value])
            if numbers := numbers_of(row.state(position)):
                self.numbers[f"{PARAMETERS}/{name}"] = numbers
        self.shared["groups"] = options_of(base["param_groups"])
        self.shared["members"] = [[n for n, (r, _) in found.items() if r is row] for row in rows]
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


def _rows(base: Mapping[str, Any], optimizer: Mapping[str, Any]) -> list[Row]:
    """Return the parameter groups of one of the three optimizers that DeepSpeed has without ZeRO."""
    states = states_of(base)
    if "fp32_groups_flat" in optimizer:
        masters = optimizer["fp32_groups_flat"]
        return [FlatRow(state[0], master) for state, master in zip(states, masters, strict=True)]
    masters = optimizer.get("fp32_groups", [None] * len(states))
    return [ListedRow(each, master) for each, master in zip(states, masters, strict=True)]
