"""Notices what is done to a model after its parameters were laid out, before a step would train less of it.

Values may be written at any time. But a parameter that appears later, or takes the place of another one, is
known to no buffer: nothing would train it. And one that was frozen and is in no group would stay as it is.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn import Parameter

from zero_full._compat import held_by, version_of
from zero_full.shard.group.checksum import digest_of
from zero_full.shard.group.parameters import Member


class ModelWatch:
    """A model as it was when its parameters were laid out."""

    def __init__(self, model: nn.Module, trained: Collection[Parameter], gathers: bool) -> None:
        self.model, self.trained, self.gathers = model, set(trained), gathers
        self.frozen = [p for p in model.parameters() if p not in self.trained and not p.requires_grad]
        self.names: dict[Parameter, str] = {}  # of all that were ever there: a module may be out for a while
        self._remember()
        self.first = self.slots

    def _remember(self) -> None:
        self.names |= {p: name for name, p in self.model.named_parameters()}
        self.slots = list(self._slots())
        self.sizes = [(held, len(held)) for module in self.model.modules() for held in held_by(module)]

    def _slots(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        for module in self.model.modules():
            for held in held_by(module):
                yield from ((held, key, value) for key, value in held.items())

    def check(self) -> None:
        """Raise if a step would leave something alone that its user believes to be trained."""
        same = all(held.get(key) is value for held, key, value in self.slots)
        if not same or any(len(held) != size for held, size in self.sizes):
            self._check_parameters()
            self._remember()
        for param in self.frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"{self.names[param]} was frozen at initialize and is in no parameter group, so nothing "
                    "trains it: list it in model_parameters or in the optimizer (a frozen parameter may be "
                    "listed), or freeze it again"
                )

    def _check_parameters(self) -> None:
        now = {p: name for name, p in self.model.named_parameters()}
        new = [name for p, name in now.items() if p not in self.names and p.requires_grad]
        if new:
            raise RuntimeError(
                f"{', '.join(new)} came into the model after initialize (an assignment, a new module, "
                "load_state_dict(assign=True), ...), so nothing trains it: change the model before "
                "initialize; load values with engine.load_module_state_dict(...) or without assign"
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
                    f"{', '.join(moved)} has got another module after initialize, which does not gather "
                    "it: tie weights and rearrange modules before initialize"
                )


class ParameterWrites:
    """Notices writes to parameters that are always whole, as far as torch counts them."""

    def __init__(self, members: Iterable[Member]) -> None:
        self.members = list(members)
        self.forget()

    def forget(self) -> None:
        """Note that all writes until now are known."""
        self.versions = [version_of(member.param) for member in self.members]
        self.moved: set[Member] = set()  # that were given other memory

    def forget_of(self, members: Collection[Member]) -> None:
        """The same of these alone."""
        pairs = zip(self.members, self.versions, strict=True)
        self.versions = [version_of(m.param) if m in members else old for m, old in pairs]
        self.moved -= set(members)

    def names(self) -> list[str]:
        """Of what was written since `forget`."""
        pairs = zip(self.members, self.versions, strict=True)
        return [m.name for m, old in pairs if version_of(m.param) != old or m in self.moved]

    def digest(self) -> str:
        """A digest of the values written since `forget`; "" if there are none.

        Ranks that differ are not forgotten: a step that has raised raises again when it is repeated.
        """
        pairs = zip(self.members, self.versions, strict=True)
        written = [(m.name, m.param) for m, old in pairs if version_of(m.param) != old or m in self.moved]
        return digest_of(written) if written else ""
