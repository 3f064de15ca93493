"""Whole tensors of a sharded model, one bucket after the other, for an inference server.

`WeightIterator` has the shape that vLLM's trainer-side `trainer_send_weights` and the weight updates of TRL
and verl take: an iterator over (name, tensor). Every rank gets every tensor: a rank may have an inference
engine of its own beside it, and the all-gather brings the tensors to all ranks anyway. A rank that sends
nothing iterates and drops them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zero_full.checkpoint.weights import select
from zero_full.comm.communicator import Communicator
from zero_full.generation.adapters import (
    Adapters,
    Bases,
    active,
    active_adapters,
    adapters_in_use,
    merged_adapters,
    renaming,
)
from zero_full.generation.buckets import (
    BucketPart,
    FlatSource,
    Item,
    SplitTensor,
    WholeTensor,
    assembled,
    communicates,
    in_buckets,
    runs_of,
)
from zero_full.shard.access.gathered_parameters import whole_groups
from zero_full.shard.group.dtensors import local_of
from zero_full.shard.group.parameter_group import TrainedGroup
from zero_full.shard.group.parameters import FlatParameters, Member
from zero_full.shard.group.released import OFFLOADED
from zero_full.shard.step.agreement import raise_on_all_ranks
from zero_full.shard.step.optimizer import ZeroOptimizer


class WeightIterator(Iterator[tuple[Any, ...]]):
    """Iterator over (name, whole tensor), or with `delta` over (name, indices, values). Every rank iterates.

    names, dtypes, shapes   of all tensors, in the order of the iteration, known before it begins
    base                    with `delta`: the version that the receiver must have; 0: everything comes
    version                 with `delta`: the version that the receiver has afterwards
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[torch.dtype, torch.Size]],
        items: Iterator[tuple[Any, ...]],
        base: int = 0,
        version: int = 0,
    ) -> None:
        self.names = list(tensors)
        self.dtypes = [dtype for dtype, _ in tensors.values()]
        self.shapes = [shape for _, shape in tensors.values()]
        self.base, self.version, self._items = base, version, items

    @torch.inference_mode(False)  # the changes that it begins to note are written by steps
    def __next__(self) -> tuple[Any, ...]:
        return next(self._items)


def weights_of(
    module: nn.Module,
    optimizer: ZeroOptimizer,
    bucket_bytes: int,
    dtype: torch.dtype | None,
    merge_adapters: bool,
) -> WeightIterator:
    """Return the iterator of `engine.weights` without `delta`."""
    rename, bases = base_weights(module, optimizer, merge_adapters)
    sources, others = sources_of(module, optimizer, dtype, rename)
    call = f"engine.weights(bucket_bytes={bucket_bytes}, dtype={dtype}, merge_adapters={merge_adapters})"
    if bases:
        call += f" with adapters {active_adapters(bases)}"
    iteration = Iteration(module, optimizer, call, merge_adapters)
    items = _whole(iteration, sources, others, bucket_bytes, dtype)
    tensors = described(sources, others, dtype, bases)
    return WeightIterator(tensors, chain(items, _merged(iteration, bases, dtype)))


def base_weights(
    module: nn.Module, optimizer: ZeroOptimizer, merge_adapters: bool
) -> tuple[Callable[[str], str | None] | None, Bases]:
    """Return the names of the other tensors, and the layers with adapters, if these are to be merged."""
    if not merge_adapters:
        return None, []
    if optimizer.contents.has_dtensors:
        raise ValueError(
            "engine.weights(merge_adapters=True): tensor parallelism has cut this model, and adapters are "
            "merged into whole weights. Leave it out, and merge where the weights are received"
        )
    return renaming(module)


def _merged(iteration: "Iteration", bases: Bases, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield base weights with their adapters merged, one layer after the other.

    At stage 3 the units of a layer are gathered, and released before its tensors are yielded.
    """
    for number, (layer, names) in enumerate(bases):
        with iteration.whole_layer(layer, number):
            items = [*merged_weights(iteration.optimizer, layer, names, dtype).items()]
        while items:
            yield items.pop(0)


def merged_weights(
    optimizer: ZeroOptimizer, layer: Any, names: Mapping[str, str], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return copies of a layer's base weights with its adapters merged, by name in the model without them."""
    with merged_adapters([layer], optimizer):
        base = dict(layer.get_base_layer().named_parameters())
        return {
            full: base[name].detach().to(wanted(base[name].dtype, dtype), copy=True).contiguous()
            for name, full in names.items()
        }


def check_options(bucket_bytes: int, dtype: torch.dtype | None, delta: bool, since: int | None) -> None:
    """Raise ValueError for options of `engine.weights` that make no sense."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be a number of bytes above 0, not {bucket_bytes!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point dtype or None, not {dtype}")
    if since is not None and (not delta or since < 0):
        raise ValueError(
            f"since={since!r} must be a version of delta=True, 0 or None. Pass the `version` of an iterator"
        )


def described(
    sources: list[FlatSource], others: Mapping[str, Tensor], dtype: torch.dtype | None, bases: Bases
) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return dtype and shape of every tensor, in the order of the iteration."""
    found = {
        source.names[member]: (source.dtype, member.param.shape)
        for source in sources
        for member in source.flat.members
        if member in source.names
    }
    found |= {name: (wanted(tensor.dtype, dtype), tensor.shape) for name, tensor in others.items()}
    for layer, names in bases:
        params = dict(layer.get_base_layer().named_parameters())
        found |= {full: (wanted(params[n].dtype, dtype), params[n].shape) for n, full in names.items()}
    return found


def wanted(dtype: torch.dtype, given: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor is handed over: integers keep theirs."""
    return given if given is not None and dtype.is_floating_point else dtype


def sources_of(
    module: nn.Module,
    optimizer: ZeroOptimizer,
    dtype: torch.dtype | None,
    rename: Callable[[str], str | None] | None = None,
) -> tuple[list[FlatSource], dict[str, Tensor]]:
    """Return the flat buffers, and the tensors outside of them by name. A tied tensor has its first name."""
    selection = select(module, optimizer, rename)
    names: dict[Any, str] = selection.first_names()
    trained = {group.parameters: group for group in optimizer.trained}
    sources = []
    for flat in optimizer.sharded.flats:
        members: dict[Member, str] = {m: names.pop(m.param) for m in flat.members if m.param in names}
        if members:
            tensor_ranks = optimizer.communicators.tensor if flat.kind.is_dtensor else None
            sources.append(_source(flat, trained.get(flat), wanted(flat.dtype, dtype), members, tensor_ranks))
    return sources, {name: tensor for tensor, name in names.items()}


def _source(
    flat: FlatParameters,
    group: TrainedGroup | None,
    dtype: torch.dtype,
    names: dict[Member, str],
    tensor_ranks: Communicator | None,
) -> FlatSource:
    """Return the source of a flat buffer: the masters if they are more exact and another dtype is wanted."""
    if group is not None and group.master.hands_over(dtype):
        return FlatSource(flat, dtype, lambda: group.master.values, False, names, tensor_ranks)
    return FlatSource(flat, dtype, lambda: flat.shard, not flat.released_at_rest, names, tensor_ranks)


def _whole(
    iteration: "Iteration",
    sources: list[FlatSource],
    others: Mapping[str, Tensor],
    bucket_bytes: int,
    dtype: torch.dtype | None,
) -> Iterator[tuple[Any, ...]]:
    """Yield (name, whole tensor)."""
    iteration.begin()
    parts = [run for source in sources for run in runs_of(source, bucket_bytes)]
    parts += [present(iteration.optimizer, name, tensor, dtype) for name, tensor in others.items()]
    yield from iteration.assemble(in_buckets(parts, bucket_bytes), _name_and_tensor)


def present(optimizer: ZeroOptimizer, name: str, tensor: Tensor, dtype: torch.dtype | None) -> BucketPart:
    """Return the bucket part of a tensor outside of flat buffers, which every rank has."""
    given, comm = wanted(tensor.dtype, dtype), optimizer.communicators.dense.shard_comm
    part = WholeTensor(0, comm, name=name, tensor=local_of(tensor), dtype=given)
    tensor_ranks = optimizer.communicators.tensor
    return part if tensor_ranks is None else SplitTensor.of(tensor, name, given, part, tensor_ranks)


def _name_and_tensor(item: Item) -> tuple[str, Tensor]:
    name, _, values = item
    return name, values


class Iteration:
    """One iteration over the weights. Raises if a step or a load changes them before its end."""

    def __init__(self, module: nn.Module, optimizer: ZeroOptimizer, call: str, merges_adapters: bool) -> None:
        """`call`: the user's call that has made the iterator."""
        self.module, self.optimizer, self.call = module, optimizer, call
        self.adapters = adapters_in_use(module) if merges_adapters else None
        self.changes = -1  # the optimizer's `changes` when the iteration began

    @torch.no_grad()
    def begin(self) -> None:
        """Wait for all ranks, and adopt writes by user code. If one rank cannot, every rank raises."""
        optimizer, call = self.optimizer, self.call
        if optimizer.reducer.backward.running:  # its reductions are on their way: no collective now
            problem = f"{call} inside a backward pass. Call it between passes"
            optimizer.announce_call(f"{call}, which raised: {problem}")
            raise RuntimeError(problem)
        self._check_open()
        optimizer.on_every_rank(call)
        problem = ""
        try:
            optimizer.check_ranks_equal(call)
            optimizer.catch_up()
            if self.adapters is not None:
                self._check_adapters(adapters_in_use(self.module), self.adapters)
        except RuntimeError as error:
            problem = str(error)
        raise_on_all_ranks(optimizer.communicators, problem)
        self.changes = optimizer.changes

    def check(self) -> None:
        """Raise RuntimeError if the values may be others than those that the iteration began with."""
        self._check_open()
        if self.optimizer.states_offloaded:
            raise RuntimeError(f"{self.call}: {OFFLOADED}")
        if self.optimizer.changes != self.changes:
            raise RuntimeError(
                f"a step or a load while {self.call} is iterated: its tensors would be those of two steps. "
                "Iterate to the end before the next step"
            )

    def _check_open(self) -> None:
        if self.optimizer.closed:
            raise RuntimeError(f"{self.call} is iterated after destroy. Iterate to the end before it")

    def _check_adapters(self, now: Adapters, before: Adapters) -> None:
        if now != before:
            raise RuntimeError(
                f"{self.call}: other adapters have become active since (set_adapter, disable_adapter). Make "
                "the iterator and iterate it to its end while the same adapters are active"
            )

    @contextmanager
    def whole_layer(self, layer: nn.Module, number: int) -> Iterator[None]:
        """Gather the parameters of a layer with adapters within the context. Every rank must enter it."""
        self.check()
        assert self.adapters is not None
        self._check_adapters({layer: active(layer)}, {layer: self.adapters[layer]})
        places = (self.optimizer.sharded.places.get(param, (None, None))[0] for param in layer.parameters())
        groups = [group for group in dict.fromkeys(places) if group and group.parameters.released_at_rest]
        if groups:
            self.optimizer.on_every_rank(f"adapters of layer {number + 1} of {self.call}")
        with torch.no_grad(), whole_groups(self.optimizer, groups):
            yield

    def assemble(
        self, buckets: Iterable[list[BucketPart]], shape: Callable[[Item], tuple[Any, ...]] = tuple
    ) -> Iterator[tuple[Any, ...]]:
        """Assemble one bucket after the other, and yield its items, each converted by `shape`.

        The bucket before is dropped first: no variable of a generator may hold one of its tensors.
        """
        optimizer = self.optimizer
        for number, bucket in enumerate(buckets):
            self.check()
            if communicates(bucket):  # a rank that has stopped iterating is not waited for in a collective
                optimizer.on_every_rank(f"bucket {number + 1} of {self.call}")
            with torch.no_grad():
                items = assembled(bucket, optimizer.communicators.device)
            if optimizer.gatherer is not None:
                optimizer.gatherer.check_reads()
            while items:
                self.check()  # a parameter itself has the values of now
                yield shape(items.pop(0))
