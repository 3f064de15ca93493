"""What all ranks that share a model's state decide together, before they have it."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from zero_full.comm.communicator import Communicator
from zero_full.comm.topology import this_rank
from zero_full.construct.deferred import Elsewhere

Result = TypeVar("Result")


@dataclass(frozen=True)
class Told:
    """What a rank says of its values."""

    digests: dict[str, bytes]
    elsewhere: dict[str, Elsewhere]


class Everyone:
    """The ranks of `shard` and, for each, those of `across`. All of them must make the same calls."""

    def __init__(self, shard: Communicator, across: Communicator) -> None:
        self.groups = shard, across
        self.here = across.rank * shard.size + shard.rank
        self.ranks: list[int] = self.ask(this_rank(), "ranks")

    def ask(self, mine: Any, what: str) -> list[Any]:
        """Everyone's small object."""
        shard, across = self.groups
        rows: list[list[Any]] = across.gather_objects(shard.gather_objects(mine, what), what)
        return [answer for row in rows for answer in row]

    def agree(self, mine: Any, what: str) -> bool:
        """Whether everyone has the same, which may be large. (Its text is compared.)"""
        short = hashlib.blake2b(repr(mine).encode()).digest()
        return len(set(self.ask(short, what))) == 1

    def together(self, work: Callable[[], Result], what: str) -> Result:
        """Everyone does this by itself. If one fails, all stop, and say why."""
        try:
            result, problem = work(), None
        except Exception as error:
            problem = error
        told = self.ask(None if problem is None else f"{type(problem).__name__}: {problem}", what)
        if problem is not None:
            raise problem
        for rank, text in zip(self.ranks, told, strict=True):
            if text is not None:
                raise RuntimeError(f"rank {rank} failed while {what}: {text}")
        return result

    def hear(self, speaker: int, tensor: Tensor, what: str) -> Tensor:
        """What this tensor is where the speaker is. Here it may be written over."""
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        if not raw.numel():
            return tensor
        if speaker != self.here:
            raw.zero_()
        for group in self.groups:
            if speaker == 0:
                group.broadcast(raw, what)
            else:
                group.sum_numbers(raw, what)
        return raw.view(tensor.dtype).view(tensor.shape)


def agree_on_the_model(everyone: Everyone, mine: dict[str, Any]) -> None:
    """All have parameters and buffers of the same names, shapes and types, in the same order."""
    if everyone.agree(list(mine.items()), "models"):
        return
    told = everyone.ask(mine, "models")
    unlike = [
        text
        for rank, other in zip(everyone.ranks, told, strict=True)
        for text in _unlike(rank, told[0], other)
    ]
    raise ValueError(
        f"the ranks have different models: {'; '.join(unlike) or 'the same parameters in another order'}. "
        "Every rank must construct the same parameters and buffers (values may differ: the first's count)"
    )


def _unlike(rank: int, first: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    for verb, names in (("lacks", first.keys() - other.keys()), ("alone has", other.keys() - first.keys())):
        if names:
            yield f"rank {rank} {verb} {', '.join(sorted(names))}"
    for name in first:
        if name in other and other[name] != first[name]:
            yield f"{name} is {first[name]}, but on rank {rank} {other[name]}"


def who_speaks(everyone: Everyone, mine: Told) -> dict[int, list[str]]:
    """Whose values are to be sent: places among everyone, and names in an order that all agree on."""
    if everyone.agree(sorted(mine.digests.items()), "values") and not any(
        everyone.ask(bool(mine.elsewhere), "changes")
    ):
        return {}
    told: list[Told] = everyone.ask(mine, "values")
    speaking: dict[int, list[str]] = {}
    for name in sorted(told[0].digests):
        speaker = _speaker(name, everyone.ranks, told)
        if any(each.digests[name] != told[speaker].digests[name] for each in told):
            speaking.setdefault(speaker, []).append(name)
    return dict(sorted(speaking.items()))


def _speaker(name: str, ranks: list[int], told: list[Told]) -> int:
    newest = told[0].elsewhere.get(name)
    if newest is None:
        return 0
    if newest.rank not in ranks:
        raise ValueError(
            f"{name} was last changed in GatheredParameters(modifier_rank={newest.rank}), but that rank is "
            f"none of {ranks}, which share it"
        )
    speaker = ranks.index(newest.rank)
    if speaker and told[speaker].elsewhere.get(name) != newest:
        raise ValueError(
            f"{name} was changed in GatheredParameters(modifier_rank={newest.rank}), and then differently on "
            f"rank {ranks[0]} and rank {newest.rank}: make later changes in such a context, too"
        )
    return speaker
