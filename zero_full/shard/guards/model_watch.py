"""Guards on the user's model and optimizer after parameters were laid out in flat buffers.

User code may write values at any time. But a parameter that is added or replaced later is in no flat buffer,
so no step would train it. Neither would a step train an unfrozen parameter that is in no optimizer group.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from zero_full._compat import parameters_and_children, version_of
from zero_full.formatting import listed
from zero_full.shard.group.checksum import digest_of
from zero_full.shard.group.parameter_group import ParameterGroup
from zero_full.shard.group.parameters import Member
from zero_full.shard.guards.guard import Guard

NUMBERS = ("lr", "weight_decay", "betas", "momentum", "eps")  # options that must be finite


class ModelWatch(Guard):
    """Guard against parameters that user code adds, replaces, moves or unfreezes after initialize."""

    def __init__(self, model: nn.Module, trained: Collection[Parameter], gathers: bool) -> None:
        self.model, self.trained, self.gathers = model, set(trained), gathers
        self.frozen = [p for p in model.parameters() if p not in self.trained and not p.requires_grad]
        self.names: dict[Parameter, str] = {}  # all parameters ever seen: user code may re-insert a module
        self._remember()
        self.first = self.slots

    def _remember(self) -> None:
        self.names |= {p: name for name, p in self.model.named_parameters()}
        self.slots = list(self._slots())
        self.sizes = [
            (held, len(held)) for module in self.model.modules() for held in parameters_and_children(module)
        ]

    def _slots(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        for module in self.model.modules():
            for held in parameters_and_children(module):
                yield from ((held, key, value) for key, value in held.items())

    def check(self) -> None:
        """Raise RuntimeError if a step would not train a parameter that the user expects to be trained."""
        # Before every forward: compare identities and sizes of the modules' dicts, and walk the model only
        # after a difference.
        for held, key, value in self.slots:
            if held.get(key) is not value:
                self._look_again()
                break
        else:
            for held, size in self.sizes:
                if len(held) != size:
                    self._look_again()
                    break
        for param in self.frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"{self.names[param]} was frozen at initialize and is in no parameter group, so no step "
                    "trains it. Freeze it again, or list it in model_parameters or in the optimizer. Frozen "
                    "parameters may be listed, too"
                )

    def _look_again(self) -> None:
        self._check_parameters()
        self._remember()

    def _check_parameters(self) -> None:
        """Raise RuntimeError for new trainable parameters and, at stage 3, for those in another module."""
        now = {p: name for name, p in self.model.named_parameters()}
        new = [name for p, name in now.items() if p not in self.names and p.requires_grad]
        if new:
            raise RuntimeError(
                f"{', '.join(new)} came into the model after initialize (by an assignment, a new module or "
                "load_state_dict(assign=True)), so no step trains it. Change the model before initialize. "
                "Load values with engine.load_module_state_dict(...) or without assign"
            )
        if self.gathers:
            known = {(id(held), key): value for held, key, value in self.first}
            moved = [
                self.names[value]
                for held, key, value in self._slots()
                if isinstance(value, Parameter)
                and known.get((id(held), key)) is not value
                and value in self.names
            ]
            if moved:
                raise RuntimeError(
                    f"{', '.join(moved)} was assigned to another module after initialize, which does not "
                    "gather it. Tie weights and rearrange modules before initialize"
                )


class ParameterWrites(Guard):
    """Detects writes to parameters that are always whole, by version counters and memory addresses."""

    def __init__(self, groups: Iterable[ParameterGroup]) -> None:
        self.flats = [group.parameters for group in groups if not group.parameters.released_at_rest]
        self.members = [member for flat in self.flats for member in flat.members]
        self.params = [member.param for member in self.members]
        self.windows = [window for flat in self.flats for window in flat.windows]  # never replaced
        plain = [flat for flat in self.flats if not flat.kind.is_dtensor]
        self.places = [place for flat in plain for place in zip(flat.params, flat.windows, strict=True)]
        self.of_dtensors = [flat for flat in self.flats if flat.kind.is_dtensor]
        self.moved: set[Member] = set()  # parameters that user code gave other memory
        self.forget()

    def check(self) -> None:
        """Copy parameters that user code gave other memory back to the buffer, with their new values."""
        for flat in self.of_dtensors:
            self.moved.update(flat.adopt_assigned())
        for param, window in self.places:
            if param.data_ptr() != window.data_ptr() or param.dtype != window.dtype:
                for flat in self.flats:
                    self.moved.update(flat.adopt_assigned())
                return

    def forget(self) -> None:
        """Note the version counters: writes until now were adopted."""
        self.versions = list(map(version_of, self.params))
        self.moved.clear()

    def forget_of(self, members: Collection[Member]) -> None:
        """Note the version counters of these parameters only."""
        pairs = zip(self.members, self.versions, strict=True)
        self.versions = [version_of(m.param) if m in members else old for m, old in pairs]
        self.moved -= set(members)

    def _written(self) -> list[Member]:
        pairs = zip(self.members, self.versions, strict=True)
        return [m for m, old in pairs if version_of(m.param) != old or m in self.moved]

    def names(self) -> list[str]:
        """Return the names of parameters that were written since `forget`."""
        return [member.name for member in self._written()]

    def repeated_digest(self) -> str:
        """Return names and a digest of written parameters that all tensor-parallel ranks have whole."""
        here = {member for flat in self.flats if not flat.kind.is_split for member in flat.members}
        window_of = dict(zip(self.members, self.windows, strict=True))
        written = [(member.name, window_of[member]) for member in self._written() if member in here]
        return f"{listed([name for name, _ in written])}, {digest_of(written)}" if written else ""

    def digest(self) -> str:
        """Return a digest of the values written since `forget`, or "".

        It does not call `forget`. So a step that raised because ranks differ raises again when repeated.
        """
        if not self.moved and list(map(version_of, self.params)) == self.versions:
            return ""
        window_of = dict(zip(self.members, self.windows, strict=True))
        return digest_of((member.name, window_of[member]) for member in self._written())


class ParamGroups(Guard):
    """Guard against parameters that enter or leave groups, and options that are not finite."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.listed = base, [list(map(id, group["params"])) for group in base.param_groups]

    def check(self) -> None:
        """Raise RuntimeError if groups changed since initialize, or if an option is no finite number."""
        groups = self.base.param_groups
        same = len(groups) == len(self.listed)
        for group, params in zip(groups, self.listed, strict=False):
            same = same and list(map(id, group["params"])) == params
        if not same:
            raise RuntimeError(
                "parameters were added to the optimizer's groups or removed from them after initialize, "
                "where the shards are laid out. Freeze a parameter with requires_grad_(False), or pass it "
                "frozen to initialize"
            )
        if problem := invalid_option(groups):
            raise RuntimeError(problem)


def invalid_option(param_groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the message about the first option that is no finite number, or ""."""
    for number, group in enumerate(param_groups):
        for key in NUMBERS:
            value = group.get(key, 0.0)
            for each in value if isinstance(value, (tuple, list)) else (value,):
                if isfinite(each) if type(each) is float else _is_usable(each):
                    continue
                return f"{key} of the optimizer's parameter group {number} is {value!r}, not a finite number"
    return ""


def _is_usable(value: Any) -> bool:
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()  # on an accelerator it would wait for the device, so it is not checked
    if value is None:  # torch's Adafactor: the smallest number of the dtype
        return True
    return isinstance(value, Tensor) or (isinstance(value, (int, float)) and isfinite(value))
