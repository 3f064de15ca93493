"""Hand a recorded model over to `initialize`: every rank gets the first rank's initial values.

[Note: the first rank's values] Every rank replays its own recording, with the first rank's random number
state. Usually that gives equal values on all ranks, so nothing is sent. A constructor may behave differently
by rank: it may load weights on rank 0, or use NumPy's random numbers. Digests of all values show such
differences. The first rank replays and broadcasts the tensors that differ. If another rank was the last to
change one in GatheredParameters(modifier_rank), that rank broadcasts it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero_full.construct.agreement import Everyone, Told
from zero_full.construct.deferred import saved_in
from zero_full.construct.recorded import NOT_TOLD, Record, Recorded, conceal, is_empty_shell, reveal, twin_of
from zero_full.construct.recorder import Recorder, here, latest
from zero_full.nested import tensors_in
from zero_full.shard.deal.memory_overlap import Extent, check_no_overlap
from zero_full.shard.group.checksum import digest
from zero_full.shard.group.parameters import is_released, placeholder_scalar
from zero_full.shard.group.process_groups import Pair
from zero_full.shard.group.registry import opened

Put = Callable[[Parameter, Tensor], None]  # sets a parameter's values
Deliver = Callable[[str, Tensor], None]  # receives a name and its values


class Deferred:
    """The parameters and buffers of a model of which some may have no values yet.

    Creating this object moves the recorded ones to the device, where they take no memory. They stay the same
    objects, as an optimizer may hold them already. If `initialize` fails, this is undone.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.named = dict([*model.named_parameters(), *model.named_buffers()])
        for name, tensor in self.named.items():
            _refuse_unfit(name, tensor, device)
        check_no_overlap(_extents(self.named))
        # Shapes and dtypes of construction, which `initialize` has compared between ranks. Sharding may
        # change a parameter's dtype later.
        self.made_as = {name: (tensor.shape, tensor.dtype) for name, tensor in self.named.items()}
        self.weights = _files(model, self.named)  # files to read in place of initial values
        recorded = {name: tensor for name, tensor in self.named.items() if isinstance(tensor, Recorded)}
        self.records = {name: tensor._record for name, tensor in recorded.items()}
        self.attributes = {tensor: tensor._record for tensor in _attributes(model, recorded.values())}
        self.recorders = self._recorders()
        self.parameters: set[Parameter] = set()  # parameters whose values `fill` sets
        self.real: dict[str, Tensor] = {}  # values of tensors that are not recorded
        here.undo.append(self._take_back)
        for name, tensor in recorded.items():
            self.records[name].keeper.recording.names.given[name] = self.records[name].twin
            reveal(tensor, placeholder_scalar(tensor.dtype, device).expand(tensor.shape))

    def _recorders(self) -> list[Recorder]:
        """Return the recorders of the model's tensors, also if these tensors were replaced since."""
        records = (*self.records.values(), *self.attributes.values())
        found = dict.fromkeys(cast(Recorder, record.keeper) for record in records)
        last = latest()
        if last is not None and last.has_made(self.model):
            found[last] = None
        return list(found)

    def _take_back(self) -> None:
        for name, record in self.records.items():
            conceal(self.named[name], record)

    def refuse_strangers(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raise ValueError if an optimizer has recorded parameters that are not in the model."""
        for param in (p for group in groups for p in group["params"]):
            if isinstance(param, Recorded):
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(param.shape)} that zero_full.Init has "
                    "recorded and that is not in the model: register it in one of the model's modules"
                )

    def meet(self, pair: Pair) -> None:
        """Exchange random states. If the model is recorded on any rank, all ranks fill it. Collective."""
        self.everyone = Everyone(pair)
        states = pair.gather_objects([r.recording.rng_state_before for r in self.recorders], "random states")
        if any(states):
            self.first_states: list[Tensor] = states[0]
            self.parameters = {tensor for tensor in self.named.values() if isinstance(tensor, Parameter)}
            self.real = {name: t.detach() for name, t in self.named.items() if name not in self.records}

    # Values --------------------------------------------------------------------------------------

    def fill(self, put: Put) -> None:
        """Replay the recording, and call `put` with every parameter and its values, one at a time."""
        self.digests: dict[str, bytes] = {}

        def deliver(name: str, real: Tensor) -> None:
            self.digests[name] = digest(real) if len(self.everyone.ranks) > 1 else b""
            self._put(name, real, put)

        # Other tensors of the model may differ between ranks, as without Init.
        _play(self.recorders, self.attributes, _reveal, to_the_end=False)
        for recorder, state in zip(self.recorders, self.first_states, strict=False):
            recorder.recording.rng_state_before = state
        self._deliver(list(self.named), deliver, to_the_end=True)

    def share(self, put: Put) -> None:
        """Broadcast the tensors that differ between ranks. Every rank must call this."""
        for speaker, names in self.everyone.who_speaks(Told(self.digests, self._elsewhere())).items():
            self._hear(speaker, names, put)
        for recorder in self.recorders:
            recorder.has_played()

    def _deliver(self, names: list[str], deliver: Deliver, to_the_end: bool) -> None:
        for name in names:
            if name in self.real:
                deliver(name, self.real[name])
        records = {name: self.records[name] for name in names if name in self.records}
        remember = to_the_end and any(recorder.has_made_more(self.model) for recorder in self.recorders)
        _play(self.recorders, records, deliver, to_the_end, remember)

    def _hear(self, speaker: int, names: list[str], put: Put) -> None:
        """Receive the tensors `names` from the rank `speaker`, in the order of its replay."""
        everyone, device = self.everyone, self.device
        number = torch.empty(1, dtype=torch.int64, device=device)

        def say(name: str, real: Tensor) -> None:
            everyone.hear(speaker, number.fill_(names.index(name)), "a name")
            everyone.hear(speaker, real.to(device), name)
            self._put(name, real, put)  # again, as uninitialized memory differs between replays

        if everyone.here == speaker:
            self._deliver(names, say, to_the_end=False)
            return
        for _ in names:
            name = names[int(everyone.hear(speaker, number, "a name"))]
            shape, dtype = self.made_as[name]
            room = torch.empty(shape, dtype=dtype, device=device)
            self._put(name, everyone.hear(speaker, room, name), put)

    @torch.no_grad()
    def _put(self, name: str, real: Tensor, put: Put) -> None:
        target = self.named[name]
        if isinstance(target, Parameter):
            put(target, real)
        elif name in self.records:
            target.data = (real.contiguous() if 0 in real.stride() else real).to(self.device)
        else:
            target.copy_(real)

    def _elsewhere(self) -> dict[str, Any]:
        newest = {name: r.keeper.recording.newest_of(r.twin) for name, r in self.records.items()}
        return {name: rank for name, rank in newest.items() if rank is not None}


def _play(
    recorders: list[Recorder],
    records: Mapping[Any, Record],
    deliver: Callable[[Any, Tensor], None],
    to_the_end: bool,
    remember: bool = False,
) -> None:
    behind = {id(record.twin): key for key, record in records.items()}
    for recorder in recorders:
        twins = [record.twin for record in records.values() if record.keeper is recorder]
        recorder.recording.replay(
            lambda twin, real: deliver(behind[id(twin)], real), twins, to_the_end, remember
        )


def _reveal(tensor: Recorded, real: Tensor) -> None:
    reveal(tensor, real)


def _attributes(model: nn.Module, others: Iterable[Tensor]) -> Iterator[Recorded]:
    """Yield recorded tensors in attributes, also nested ones, that are neither parameters nor buffers."""
    usual, seen = vars(nn.Module()).keys(), set(map(id, others))
    for module in model.modules():
        for name, value in vars(module).items():
            for tensor in tensors_in(value) if name not in usual else ():
                if isinstance(tensor, Recorded) and id(tensor) not in seen:
                    yield tensor


# Checks ----------------------------------------------------------------------------------------------


def _refuse_unfit(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor in opened:
        raise RuntimeError(f"{name} is inside GatheredParameters: leave that before initialize")
    if isinstance(tensor, Recorded):
        return
    if is_empty_shell(tensor):
        raise ValueError(f"{name}: {NOT_TOLD}")
    if tensor.is_meta and device.type != "meta":  # a memory plan is of a model without values
        raise ValueError(
            f"{name} is on the meta device, and nothing is known of its values: construct the model inside "
            "zero_full.Init()"
        )


def _extents(named: Mapping[str, Tensor]) -> Iterator[Extent]:
    """Yield the memory ranges of all parameters that are real or recorded."""
    for name, tensor in named.items():
        twin = twin_of(tensor)
        # A later check raises on parameters that another engine has sharded.
        is_real = twin is None and tensor.requires_grad and not (tensor.is_meta or is_released(tensor))
        if isinstance(tensor, Parameter) and (twin is not None or is_real) and tensor.numel():
            memory = 0 if twin is None else id(twin.untyped_storage())
            start = tensor.data_ptr() if twin is None else int(twin.storage_offset()) * twin.itemsize
            yield Extent(memory, start, start + tensor.nbytes, name)


def _files(model: nn.Module, named: Mapping[str, Tensor]) -> list[Any]:
    """Return the files of `Init(weights=...)` for this model.

    Raises ValueError if reading them would overwrite a change.
    """
    files: dict[Any, None] = {}
    covered: dict[nn.Module, dict[str, Tensor]] = {}
    for tensor in named.values():
        if isinstance(tensor, Recorded):
            recording = tensor._record.keeper.recording
            files[recording.file_of(tensor._record.twin)] = None
            covered |= recording.beside_files.items()
    files.pop(None, None)
    for prefix, module in model.named_modules() if files else ():
        for name, tensor in saved_in(module):
            was = covered.get(module, {}).get(name, torch.empty(0))
            if not isinstance(tensor, Recorded) and not torch.equal(was.to(tensor), tensor):
                name = f"{prefix}.{name}" if prefix else name
                raise ValueError(
                    f"{name} was made or changed outside Init(weights=...), whose file would undo that: "
                    "construct it inside, or give it its values after initialize"
                )
    return list(files)
