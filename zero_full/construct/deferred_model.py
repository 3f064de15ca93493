"""Hand a recorded model over to `initialize`: every rank gets the first rank's initial values.

[Note: the first rank's values] Every rank replays its own recording, with the first rank's random number
state. Usually that gives equal values on all ranks, so nothing is sent. A constructor may behave differently
by rank: it may load weights on rank 0, or use NumPy's random numbers. Digests of all values show such
differences. (A value in a mapped file is described by its position there. It is read for a digest only if
the ranks' descriptions differ.) The first rank replays and broadcasts the tensors that differ. If another
rank was the last to change one in GatheredParameters(modifier_rank), that rank broadcasts it.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero_full.comm.topology import this_rank
from zero_full.construct.mapped_files import MappedFiles
from zero_full.construct.recorded_tensor import (
    UNRECORDED_ASSIGNMENT,
    Record,
    Recorded,
    dematerialize,
    is_empty_shell,
    materialize,
    twin_of,
)
from zero_full.construct.recording import NewestVersion, state_of
from zero_full.construct.session import Recorder, latest, local
from zero_full.nested import tensors_in
from zero_full.shard.deal.memory_overlap import Extent, check_no_overlap
from zero_full.shard.group.checksum import digest
from zero_full.shard.group.dtensors import local_of
from zero_full.shard.group.parameters import is_released, placeholder_scalar
from zero_full.shard.group.process_groups import Pair
from zero_full.shard.group.registry import opened

Assign = Callable[[Parameter, Tensor], None]  # sets a parameter's values
Deliver = Callable[[str, Tensor], None]  # receives a name and its values


class Deferred:
    """The parameters and buffers of a model: those that were only recorded at construction have no values.

    Creating this object moves the recorded ones to the device, where they take no memory. They stay the same
    objects, as an optimizer may hold them already. If `initialize` fails, this is undone.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.named = dict([*model.named_parameters(), *model.named_buffers()])
        for name, tensor in self.named.items():
            _check_constructed(name, tensor, device)
        check_no_overlap(_memory_ranges(self.named))
        # Shapes and dtypes of construction, which `initialize` has compared between ranks. Sharding may
        # change a parameter's dtype later.
        self.constructed_as = {name: (tensor.shape, tensor.dtype) for name, tensor in self.named.items()}
        self.weights = _weights_files(model, self.named)  # files to read in place of initial values
        recorded = {name: tensor for name, tensor in self.named.items() if isinstance(tensor, Recorded)}
        self.records = {name: tensor._record for name, tensor in recorded.items()}
        self.attributes = {tensor: tensor._record for tensor in _attributes(model, recorded.values())}
        # The recorders of the model's tensors, also if these tensors were replaced since.
        records = (*self.records.values(), *self.attributes.values())
        found = dict.fromkeys(cast(Recorder, record.recorder) for record in records)
        last = latest()
        if last is not None and last.has_constructed(model):
            found[last] = None
        self.recorders = list(found)
        self.parameters: set[Parameter] = set()  # parameters whose values `run_replay` sets
        self.real: dict[str, Tensor] = {}  # values of tensors that are not recorded
        local.undo.append(self._undo)
        for name, tensor in recorded.items():
            self.records[name].recorder.recording.names.given[name] = self.records[name].twin
            materialize(tensor, placeholder_scalar(tensor.dtype, device).expand(tensor.shape))

    def _undo(self) -> None:
        """Make the parameters and buffers recorded ones again, after a failed `initialize`."""
        for name, record in self.records.items():
            dematerialize(self.named[name], record)

    def check_optimizer_parameters(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise ValueError if an optimizer has recorded parameters that are not in the model."""
        for param in (p for group in groups for p in group["params"]):
            if isinstance(param, Recorded):
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(param.shape)} that zero_full.Init has "
                    "recorded and that is not in the model. Register it in one of the model's modules."
                )

    def exchange_random_states(self, pair: Pair) -> None:
        """Exchange the random states from which the ranks' recordings start. Collective.

        If the model is recorded on any rank, all ranks fill it.
        """
        self.source_ranks = SourceRanks(pair)
        states = pair.gather_objects([r.recording.rng_state_before for r in self.recorders], "random states")
        if any(states):
            self.first_states: list[Tensor] = states[0]
            self.parameters = {tensor for tensor in self.named.values() if isinstance(tensor, Parameter)}
            self.real = {name: t.detach() for name, t in self.named.items() if name not in self.records}

    # Values --------------------------------------------------------------------------------------

    def run_replay(self, assign: Assign) -> None:
        """Replay the recording, and call `assign` with every parameter and its values, one at a time."""
        self.values = ValueReport()
        are_compared = len(self.source_ranks.ranks) > 1
        # Only real tensors can be views of a mapped file: replay computes recorded ones in new memory.
        files = MappedFiles(only_unchanged=True) if are_compared and self.real else None

        def deliver(name: str, real: Tensor) -> None:
            if are_compared:
                self.values.add(name, real, None if files is None else files.identity(real))
            self._assign(name, real, assign)

        # Other tensors of the model may differ between ranks, as without Init.
        _play(self.recorders, self.attributes, materialize, to_the_end=False)
        for recorder, state in zip(self.recorders, self.first_states, strict=False):
            recorder.recording.rng_state_before = state
        self._deliver(list(self.named), deliver, to_the_end=True)

    def broadcast_differences(self, assign: Assign) -> None:
        """Broadcast the tensors that differ between ranks. Every rank must call this."""
        for name, record in self.records.items():
            newest = record.recorder.recording.newest_version(record.twin)
            if newest is not None:
                self.values.newest[name] = newest
        if not self.source_ranks.agree(self.values):
            self.values.read_files(self.real)
            for sender, names in self.source_ranks.senders(self.values).items():
                self._receive(sender, names, assign)
        for recorder in self.recorders:
            recorder.mark_replayed()

    def _deliver(self, names: list[str], deliver: Deliver, to_the_end: bool) -> None:
        for name in names:
            if name in self.real:
                deliver(name, self.real[name])
        records = {name: self.records[name] for name in names if name in self.records}
        remember = to_the_end and any(each.has_constructed_more(self.model) for each in self.recorders)
        _play(self.recorders, records, deliver, to_the_end, remember)

    def _receive(self, sender: int, names: list[str], assign: Assign) -> None:
        """Receive the tensors `names` from the rank `sender`, in the order of its replay."""
        source_ranks, device = self.source_ranks, self.device
        number = torch.empty(1, dtype=torch.int64, device=device)

        def send(name: str, real: Tensor) -> None:
            source_ranks.broadcast_from(sender, number.fill_(names.index(name)), "a name")
            source_ranks.broadcast_from(sender, real.to(device), name)
            self._assign(name, real, assign)  # again, as uninitialized memory differs between replays

        if source_ranks.here == sender:
            self._deliver(names, send, to_the_end=False)
            return
        for _ in names:
            name = names[int(source_ranks.broadcast_from(sender, number, "a name"))]
            shape, dtype = self.constructed_as[name]
            room = torch.empty(shape, dtype=dtype, device=device)
            self._assign(name, source_ranks.broadcast_from(sender, room, name), assign)

    @torch.no_grad()
    def _assign(self, name: str, real: Tensor, assign: Assign) -> None:
        target = self.named[name]
        if isinstance(target, Parameter):
            assign(target, real)
        elif name in self.records:
            target.data = (real.contiguous() if 0 in real.stride() else real).to(self.device)
        else:
            target.copy_(real)


def _play(
    recorders: list[Recorder],
    records: Mapping[Any, Record],
    deliver: Callable[[Any, Tensor], object],
    to_the_end: bool,
    remember: bool = False,
) -> None:
    """Replay the recordings, and call `deliver` with the key of each of `records` and its values."""
    key_of = {id(record.twin): key for key, record in records.items()}
    for recorder in recorders:
        twins = [record.twin for record in records.values() if record.recorder is recorder]
        recorder.recording.replay(
            lambda twin, real: deliver(key_of[id(twin)], real), twins, to_the_end, remember
        )


def _attributes(model: nn.Module, others: Iterable[Tensor]) -> Iterator[Recorded]:
    """Yield recorded tensors in attributes, also nested ones, that are neither parameters nor buffers."""
    usual, seen = vars(nn.Module()).keys(), set(map(id, others))
    for module in model.modules():
        for name, value in vars(module).items():
            for tensor in tensors_in(value) if name not in usual else ():
                if isinstance(tensor, Recorded) and id(tensor) not in seen:
                    yield tensor


# The rank that broadcasts a tensor ------------------------------------------------------------------


@dataclass
class ValueReport:
    """One rank's report of its initial values: a digest of each, and newer values on other ranks."""

    digests: dict[str, str | bytes] = field(default_factory=dict)  # str: the position in a mapped file
    newest: dict[str, NewestVersion] = field(default_factory=dict)

    def add(self, name: str, real: Tensor, position: str | None) -> None:
        """Add a tensor by its position in a mapped file, if it has one, or by its digest."""
        self.digests[name] = digest(real) if position is None else position

    def read_files(self, real: Mapping[str, Tensor]) -> None:
        """Replace positions in mapped files by digests. Copies of a file may be equal."""
        self.digests |= {
            name: digest(real[name]) for name, each in self.digests.items() if isinstance(each, str)
        }


class SourceRanks:
    """The ranks of a pair of process groups, which choose a sender for each tensor that differs.

    All of them must make the same calls.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.here = pair.replica_comm.rank * pair.shard_comm.size + pair.shard_comm.rank
        self.ranks: list[int] = pair.gather_objects(this_rank(), "ranks")

    def agree(self, mine: ValueReport) -> bool:
        """Return whether all ranks' reports are equal and without newer values. Equal on all ranks."""
        digest_of_all = hashlib.blake2b(repr(sorted(mine.digests.items())).encode()).digest()
        summaries = self.pair.gather_objects((digest_of_all, bool(mine.newest)), "values")
        return set(summaries) == {(digest_of_all, False)}

    def senders(self, mine: ValueReport) -> dict[int, list[str]]:
        """Return the names of the tensors that each rank must send, by its index. Equal on all ranks."""
        if self.agree(mine):
            return {}
        reports: list[ValueReport] = self.pair.gather_objects(mine, "values")
        senders: dict[int, list[str]] = {}
        for name in sorted(reports[0].digests):
            sender = _sender_of(name, self.ranks, reports)
            if any(each.digests[name] != reports[sender].digests[name] for each in reports):
                senders.setdefault(sender, []).append(name)
        return dict(sorted(senders.items()))

    def broadcast_from(self, sender: int, tensor: Tensor, what: str) -> Tensor:
        """Broadcast a tensor from the rank `sender`. Other ranks' tensors may be overwritten."""
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        if not raw.numel():
            return tensor
        if sender != self.here:
            raw.zero_()
        for communicator in (self.pair.shard_comm, self.pair.replica_comm):
            if sender == 0:
                communicator.broadcast(raw, what)
            else:
                communicator.sum_numbers(raw, what)
        return raw.view(tensor.dtype).view(tensor.shape)


def _sender_of(name: str, ranks: list[int], reports: list[ValueReport]) -> int:
    """Return the index of the rank with the newest values. Raises ValueError if it cannot send them."""
    newest = reports[0].newest.get(name)
    if newest is None:
        return 0
    if newest.rank not in ranks:
        raise ValueError(
            f"{name} was last changed in GatheredParameters(modifier_rank={newest.rank}), but only ranks "
            f"{ranks} hold it. Pass one of these as modifier_rank."
        )
    sender = ranks.index(newest.rank)
    if sender and reports[sender].newest.get(name) != newest:
        raise ValueError(
            f"{name} was changed in GatheredParameters(modifier_rank={newest.rank}), and then differently on "
            f"rank {ranks[0]} and rank {newest.rank}. Make later changes in such a context as well."
        )
    return sender


# Checks ----------------------------------------------------------------------------------------------


def _check_constructed(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor in opened:
        raise RuntimeError(f"{name} is inside GatheredParameters. Leave that context before initialize.")
    if isinstance(tensor, Recorded):
        return
    if is_empty_shell(tensor):
        raise ValueError(f"{name}: {UNRECORDED_ASSIGNMENT}")
    if tensor.is_meta and device.type != "meta":  # a memory plan is of a model without values
        raise ValueError(
            f"{name} is on the meta device, so its values are unknown. Construct the model inside "
            "zero_full.Init()."
        )


def _memory_ranges(named: Mapping[str, Tensor]) -> Iterator[Extent]:
    """Yield the memory ranges of all parameters that are real or recorded."""
    for name, tensor in named.items():
        twin = twin_of(tensor)
        # A later check raises on parameters that another engine has sharded.
        is_real = twin is None and tensor.requires_grad and not (tensor.is_meta or is_released(tensor))
        if isinstance(tensor, Parameter) and (twin is not None or is_real) and tensor.numel():
            memory = 0 if twin is None else id(twin.untyped_storage())
            here = local_of(tensor)
            start = here.data_ptr() if twin is None else int(twin.storage_offset()) * twin.itemsize
            yield Extent(memory, start, start + here.nbytes, name)


def _weights_files(model: nn.Module, named: Mapping[str, Tensor]) -> list[Any]:
    """Return the files of `Init(weights=...)` for this model.

    Raises ValueError if reading them would overwrite a change.
    """
    files: dict[Any, None] = {}
    covered: dict[nn.Module, dict[str, Tensor]] = {}
    for tensor in named.values():
        if isinstance(tensor, Recorded):
            recording = tensor._record.recorder.recording
            files[recording.file_of(tensor._record.twin)] = None
            covered |= recording.real_before_load.items()
    files.pop(None, None)
    for prefix, module in model.named_modules() if files else ():
        for name, tensor in state_of(module):
            was = covered.get(module, {}).get(name, torch.empty(0))
            if not isinstance(tensor, Recorded) and not torch.equal(was.to(tensor), tensor):
                name = f"{prefix}.{name}" if prefix else name
                raise ValueError(
                    f"{name} was made or changed outside Init(weights=...), whose file would undo that. "
                    "Construct it inside, or assign its values after initialize."
                )
    return list(files)
