"""Master weights: the values of this rank's slice of a parameter group that the optimizer steps; its state.

    values        this rank's slice, in the dtype that is stepped. It shares the memory of the parameters'
                  slice if the dtypes are equal and neither state nor slice is offloaded
    pieces        windows into the values, one for each parameter of which this rank owns elements
    tier          the offload tier of the master and of the optimizer's state
    copy_threads  the host-device copies, if the master is on the host and the model on a device. Then `sent`
                  is the host's copy of the parameters' slice

[Note: writes to parameters] User code may write to parameters between steps, and the master adopts what was
written. Version counters tell of most writes, but not of those through `param.data` and NumPy, and to compare
each element with its rounded master costs more than a step of Adam. So a step notes `synced_sums`, the column
sums of this rank's slice. The next step begins with `compare`, which sums the slice again. The result,
`changed`, stays on the device, and ranks add it to the vector that they exchange before a step anyway. Only
if the slice of some rank has changed does each rank look which of its groups have, and compare elements.

The compiled operator of Adam reads the old parameters where it writes the new ones, and compares them itself.

Saving and loading are in `contents/state.py`.
"""

from collections import UserDict
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from zero_full._compat import version_of, without_overrides
from zero_full.comm.lane import Pending
from zero_full.errors import CopyError
from zero_full.kernels.load import compiled_for
from zero_full.kernels.reference import with_user_writes
from zero_full.offload import CopyThreads, Tier
from zero_full.optim.step import Piece
from zero_full.precision.dtypes import Dtypes
from zero_full.shard.group.changed_elements import ChangedElements
from zero_full.shard.group.checksum import column_sums
from zero_full.shard.group.gradients import FlatGradients
from zero_full.shard.group.parameters import FlatParameters, Member
from zero_full.shard.group.released import OFFLOADED


class Master:
    """Master weights of one rank's slice of a parameter group, in pieces of parameters."""

    def __init__(
        self,
        parameters: FlatParameters,
        gradients: FlatGradients,
        dtypes: Dtypes,
        tier: Tier,
        copy_threads: CopyThreads | None = None,
    ) -> None:
        self.parameters, self.gradients, self.tier = parameters, gradients, tier
        # An offloaded slice is copied when it is gathered.
        self.copy_threads = None if parameters.slice.is_offloaded else copy_threads
        self.dtype = dtypes.master_of(parameters.dtype)
        self.sending: Pending | None = None  # pending copy of the parameters' slice to the device
        # See [Note: writes to parameters].
        # Column sums of the slice when it last equalled the master; None: unknown.
        self.synced_sums: Tensor | None = None
        self.changed: Tensor | None = None  # bool on the device: the slice differs; None: not compared
        self.adopts = False  # the stepper compares parameters with their masters itself
        self.compiled_for: Callable[[torch.device], bool] = compiled_for
        self.copies: Tensor | None = None  # rounded copies that the stepper writes; during a step only
        # Flat views that user code may have kept, each with the master or state that it is a view of.
        self.shown: list[tuple[ReferenceType[Tensor], Tensor]] = []
        self.is_updating = False  # a delayed update is writing the master: see `delayed_update.py`
        self.changes: ChangedElements | None = None  # of the slice that is handed over; None: not noted
        values = parameters.take_unrounded()
        self._set_values(parameters.shard if parameters.kind.asleep else self._master_of(values))

    def _master_of(self, values: Tensor) -> Tensor:
        if self.dtype == self.parameters.dtype and not (
            self.tier.is_offloaded or self.parameters.slice.is_offloaded
        ):
            return self.parameters.shard
        return self.tier.allocate(values.numel(), self.dtype, self.parameters.kind.device).copy_(values)

    def _set_values(self, master: Tensor) -> None:
        """Install a tensor as the master: cut it into pieces, and allocate host memory for its copies."""
        self.values, self.pieces = master, dict[Member, Piece]()
        self.is_separate = master is not self.parameters.shard  # memory of its own, beside the parameters
        self.has_copies = self.is_separate and self.parameters.dtype != self.dtype  # rounded parameters
        for fragment in self.parameters.fragments.values():
            member = self.parameters.members[fragment.index]
            mine = self.parameters.piece_of(master, member)
            assert mine is not None
            self.pieces[member] = Piece(member.name, member.shape, fragment.param_range, member.group, mine)
        self.sent, self.synced_sums, self.changed = master, None, None
        self.staging: list[Tensor] = []  # host memory of slices that are copied to and from the device
        if self.copy_threads is not None and self.is_separate:
            # Without rounding the master itself is sent, unless it is in a file.
            if self.has_copies or self.tier.moves:
                self.sent = self.copy_threads.allocate(
                    master.numel(), self.parameters.dtype, self.parameters.shard.device
                )
                self.staging.append(self.sent)
            if self.gradients.host_slice is not None:
                self.staging.append(self.gradients.host_slice.memory)
        if self.is_separate:
            self._note_published()
        self.note_versions()

    def leave(self) -> None:
        """Drop references to the tier's memory at the end of the run."""
        self.values = self.sent = self.values[:0].clone()
        self.pieces, self.staging, self.shown = {}, [], []

    def wake(self) -> None:
        """Make the master of a group that was asleep: see [Note: asleep] in `gradients.py`."""
        self._set_values(self._master_of(self.parameters.shard))
        if self.changes is not None:
            self.changes.count_all()

    # A step --------------------------------------------------------------------------------------

    def fetch(
        self, used: Container[Member], fuses: bool, adopts: bool = False, marks_changes: bool = False
    ) -> list[Piece]:
        """Return the pieces of the `used` parameters with their gradients, on the device that steps them.

        `fuses`: the stepper takes gradients of any dtype. `adopts`: it compares the parameters' rounded
        copies with their masters itself. `marks_changes`: on a CPU it sets the bits of changed elements.
        """
        parameters = self.parameters
        if fuses and self.gradients.uses_param_grad:
            self.gradients.check_dense()
        self.copies = None
        if fuses and self.has_copies and self.writes_copies():
            self.copies = (
                self.sent if self.copy_threads is not None else parameters.slice.fetch(self.values.device)
            )
        marked = None if self.changes is None else self._begin_changes(self.changes, marks_changes)
        self.adopts = adopts and self.copies is not None
        # With host-device copies writes were adopted before the step, and released parameters have none.
        is_current = self.synced_sums is not None or self.adopts or parameters.released_at_rest
        if self.is_separate and self.copy_threads is None and not is_current:
            self._adopt_slice()
        gradients = None  # None: they are in `param.grad`
        if not self.gradients.uses_param_grad:
            gradients = self.gradients.averaged_slice()
            assert gradients is not None
            if self.tier.is_offloaded and not self.gradients.is_on_host:
                gradients = self.tier.fetch(gradients)
            if not fuses:
                gradients = gradients.to(self.dtype)
        pieces = []
        for member, piece in self.pieces.items():
            if member not in used:
                continue
            if gradients is not None:
                piece.gradient = parameters.piece_of(gradients, member)
            else:
                with without_overrides():
                    grad = member.param.grad
                if grad is None:
                    continue  # cleared by user code
                piece.gradient = self.tier.fetch(grad)
            piece.copy = None if self.copies is None else parameters.piece_of(self.copies, member)
            if marked is not None:
                piece.changed = marked.bits_of(*parameters.place_in_slice(member))
            pieces.append(piece)
        return pieces

    def writes_copies(self) -> bool:
        """Return whether steppers write rounded parameters as well, as compiled operators do."""
        return self.compiled_for(self.values.device)

    def read_ahead(self, fuses: bool) -> bool:
        """Begin to read the slice that `fetch` will need. Returns False if no buffer is free."""
        writes = fuses and self.has_copies and self.writes_copies()
        return not writes or self.parameters.slice.start_read(optional=True)

    def put_away(self) -> None:
        """Copy the new values to this rank's slice of the parameters, after a step."""
        for piece in self.pieces.values():
            piece.gradient = piece.copy = piece.changed = None
        self.parameters.node_copy = None  # it has the old values
        if self.changes is not None:
            self._end_changes(self.changes)
        if self.copy_threads is not None:
            self._send(self.copy_threads)
        elif self.is_separate:
            self.parameters.slice.update(self.values if self.copies is None else self.copies)
            self._note_published()
        self.copies = None

    def hands_over(self, dtype: torch.dtype) -> bool:
        """Return whether to hand over the master, not the parameters, in this dtype: it is more precise."""
        return self.has_copies and dtype != self.parameters.dtype

    def observed(self, dtype: torch.dtype) -> Tensor:
        """Return the slice that is handed over in this dtype: the parameters', or the master."""
        if self.hands_over(dtype):
            return self.values
        return self.parameters.shard if self.copy_threads is None else self.sent

    # Changes, for runs that ask for them: see `changed_elements.py` --------------------------------

    def note_changes(self, dtype: torch.dtype) -> None:
        """Note from now on which elements change. They are rounded to this dtype to be compared."""
        slice_ = self.observed(dtype)
        self.changes = ChangedElements(slice_.numel(), dtype, slice_.device)

    def take_changes(self) -> None:
        """Take the changes so far, those between steps included, and note later ones from now on."""
        assert self.changes is not None
        watched = self.values if self._observes_master(self.changes) else None
        if watched is not None:
            self.changes.look(watched)
        self.changes.take(watched)

    def _observes_master(self, changes: ChangedElements) -> bool:
        """Whether the observed slice is the master itself, in which user code may write unseen."""
        in_place = not self.is_separate or (self.copy_threads is not None and self.sent is self.values)
        return in_place or self.hands_over(changes.dtype)

    def _begin_changes(self, changes: ChangedElements, marks: bool) -> ChangedElements | None:
        """Return `changes` if the stepper marks changed elements; else keep the old values, return None."""
        observes_master = self._observes_master(changes)
        if marks and self.copies is not None and self.copies.is_cpu and not observes_master:
            changes.is_marked = True
            return changes
        if observes_master:
            changes.look(self.values)
        changes.keep(self.values if observes_master else self.copies)
        return None

    def _end_changes(self, changes: ChangedElements) -> None:
        """Compare the observed slice after a step with the one before it, while both are in memory."""
        if self._observes_master(changes):
            changes.compare(None, self.values)
            changes.note_sums(self.values)
        elif changes.is_marked or self.copies is not None:
            changes.compare(None, self.copies)
        else:
            changes.compare(self.observed(changes.dtype), self.values.to(self.parameters.dtype))

    # What is shown -------------------------------------------------------------------------------

    def show(self, source: Tensor) -> Tensor:
        """Return the master or its state as a flat view for user code, which may keep it and write to it."""
        row = source.detach().reshape(-1)
        if self.tier.moves:  # such a tier replaces the memory in a step: see `show_again`
            self.shown = [(kept, of) for kept, of in self.shown if kept() is not None]
            self.shown.append((ref(row), source))
        return row

    def show_again(self) -> None:
        """Point views that user code has kept to the memory of masters and state after a step."""
        for kept, source in self.shown:
            row = kept()
            if row is not None:
                row.data = source.detach().reshape(-1)

    # On the way to the device and back -----------------------------------------------------------

    def _send(self, copy_threads: CopyThreads) -> None:
        """Begin to copy the parameters' slice to the device. `wait_for_copy` waits for it."""
        if not self.is_separate:
            return
        if self.sent is not self.values and self.copies is None:  # else the stepper has written `sent`
            self.sent.copy_(self.values)
        self.synced_sums, self.sending = None, copy_threads.send_up(self.parameters.shard, self.sent)

    def wait_for_copy(self) -> None:
        """Wait for the pending copy to the device. Its error is raised each time, until the next copy."""
        if self.sending is not None:
            try:
                self.sending.wait()
            except Exception as error:
                raise CopyError(
                    f"the copy of parameters {self.parameters.name} from the host to "
                    f"{self.parameters.shard.device} after a step failed: {error}. The model on the device "
                    "is not the trained one. Load a checkpoint"
                ) from error
            self.sending, self.synced_sums = None, column_sums(self.parameters.shard)

    # Writes of user code: see [Note: writes to parameters] ---------------------------------------

    def _note_published(self) -> None:
        """Note that the slice equals the master: sum it, unless another place compares its values."""
        elsewhere = self.copy_threads is not None or self.adopts or self.parameters.released_at_rest
        self.synced_sums = None if elsewhere else column_sums(self.parameters.shard)

    def _differs(self, synced_sums: Tensor) -> Tensor:
        """Return whether the slice has changed, as a bool on the device."""
        return (column_sums(self.parameters.shard) != synced_sums).any()

    def compare(self) -> None:
        """Compare this rank's slice with `synced_sums`, without waiting: see `changed`."""
        self.changed = None
        if not self.is_separate or self.parameters.shard.is_meta:
            return
        if self.copy_threads is not None:
            self.wait_for_copy()
        released = self.parameters.released_at_rest
        if not released and list(map(version_of, self.parameters.params)) != self.param_versions:
            self.synced_sums = None  # written for certain: `fetch` compares elements
        if self.copy_threads is not None and self.synced_sums is None:
            self.adopt_device_writes()
        if self.synced_sums is not None:
            self.changed = self._differs(self.synced_sums)

    def adopt_device_writes(self) -> None:
        """Copy writes of user code to the device's slice since the last copy to the master."""
        copy_threads = self.copy_threads
        if copy_threads is None or not self.is_separate:
            return
        self.wait_for_copy()
        if self.synced_sums is not None and not bool(self._differs(self.synced_sums)):
            return
        copy_threads.fetch(self.sent, self.parameters.shard)
        if self.changes is not None:
            self.changes.look_for_writes(self.sent, self.values)
        if self.has_copies and not _rounds_to(self.values, self.sent):
            self.values.copy_(with_user_writes(self.values, self.sent))
        elif self.sent is not self.values and not self.has_copies:
            self.values.copy_(self.sent)
        self.synced_sums = column_sums(self.parameters.shard)
        self.note_versions()

    def _adopt_slice(self) -> None:
        """Copy elements that user code wrote to the slice into the master."""
        slice_, master = self.parameters.shard.to(self.values.device), self.values
        if self.changes is not None:
            self.changes.look_for_writes(slice_, master)
        if slice_.dtype == master.dtype:
            master.copy_(slice_)
        elif not _rounds_to(master, slice_):  # elements that were not written keep the master's low bits
            master.copy_(with_user_writes(master, slice_))
        self.note_versions()

    # Values --------------------------------------------------------------------------------------

    def copy_master(self) -> None:
        """Copy the master to this rank's slice of the parameters.

        `node_copy` is kept. All ranks must drop theirs together, or only some would gather within the node.
        """
        if self.changes is not None:
            self.changes.count_all()
        if self.copy_threads is not None:
            self._send(self.copy_threads)
            self.wait_for_copy()
        elif self.is_separate:
            self.parameters.shard.copy_(self.values)
            self._note_published()
        self.note_versions()

    def note_versions(self) -> None:
        """Note that master and parameters are equal now, so that later version counters are user writes."""
        self.version, self.parameters.adopted = version_of(self.values), False
        if not self.parameters.released_at_rest:  # released parameters cannot be written
            self.param_versions = list(map(version_of, self.parameters.params))

    def master_was_written(self) -> bool:
        """Return whether user code has written to the master, by its version counter."""
        return not self.is_updating and version_of(self.values) != self.version

    @torch.no_grad()
    def follow_master(self, parameters_count: bool = False) -> bool:
        """Copy the master to this rank's slice of the parameters if user code wrote to it; return whether.

        `parameters_count`: assume that the parameters were also written, without a version counter.
        """
        if not self.is_separate or not self.master_was_written():
            return False
        parameters_count |= self.parameters.adopted
        if not self.parameters.released_at_rest:
            parameters_count |= list(map(version_of, self.parameters.params)) != self.param_versions
        if parameters_count:
            raise RuntimeError(
                f"{self.parameters.name}: both parameters and their fp32 master weights, or those of "
                "neighbours (safe_get_local_fp32_param), were written. Between two steps, write either "
                "parameters or master weights"
            )
        self.copy_master()
        return True

    @torch.no_grad()
    def follow_parameters(self, released: bool = False) -> None:
        """Copy user code's writes to this rank's parameters to the master, or those to the master back.

        `released`: also for groups that are gathered for use, which only `GatheredParameters` can write.
        """
        if self.follow_master(parameters_count=released):
            return
        if not self.is_separate or self.is_updating or (self.parameters.released_at_rest and not released):
            return
        if self.copy_threads is not None:
            return self.adopt_device_writes()
        if self.synced_sums is None or bool(self._differs(self.synced_sums)):
            self._adopt_slice()
            self.synced_sums = None

    def fill(self, member: Member, value: Tensor) -> None:
        """Set the values of a parameter and its master. Every rank must do the same."""
        self.follow_master()
        self.parameters.fill(member, value)
        if self.is_separate:
            self.parameters.write(self.values, member, value)
            self._note_published()
        if self.changes is not None:
            self.changes.count_all()
        self.note_versions()


def adopt_changed(masters: Sequence[Master]) -> None:
    """Adopt the writes of user code to the slices that have `changed`, before a step. The host reads once."""
    compared = {master: master.changed for master in masters if master.changed is not None}
    flags = torch.stack([*compared.values()]).tolist() if compared else []
    for master, is_changed in zip(compared, flags, strict=True):
        if is_changed:
            master.synced_sums = None  # so `fetch` compares elements, or, with host-device copies:
            master.adopt_device_writes()


def _rounds_to(master: Tensor, slice_: Tensor) -> bool:
    """Return True if the slice equals the rounded master; False on accelerators, to avoid a wait."""
    if slice_.device.type != "cpu":
        return False
    return torch.equal(master.to(slice_.dtype).view(torch.int16), slice_.view(torch.int16))


class StateByParameter(UserDict[Any, dict[str, Any]]):
    """This rank's optimizer state, a dict that accepts a parameter or its piece as the key.

    So the optimizer, which steps pieces, and user code, which has parameters, find the same state. As in
    torch, an entry is created when it is first read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[Tensor, Parameter] = {}  # piece -> parameter, and parameter -> itself
        self.awaits_reload = False  # after `engine.offload_states()`, until `engine.reload_states()`
        self.wait_for_update: Callable[[], None] | None = None  # of a delayed update that writes the state

    def add(self, piece: Tensor, param: Parameter) -> None:
        """Make `piece` a key for the state of `param`."""
        self.owners[piece] = self.owners[param] = param

    def know(self, param: Parameter) -> None:
        """Make `param` a key, with an empty state if this rank owns no element of it."""
        self.owners[param] = param

    def forget(self, params: Collection[Parameter]) -> None:
        """Remove the keys and state of these parameters."""
        self.data = {param: state for param, state in self.data.items() if param not in params}
        self.owners = {key: owner for key, owner in self.owners.items() if owner not in params}

    def _owner(self, key: Any) -> Parameter:
        if not isinstance(key, Tensor) or key not in self.owners:
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise KeyError(f"this rank has no optimizer state for {what}")
        return self.owners[key]

    def __getitem__(self, key: Any) -> dict[str, Any]:
        if self.awaits_reload:
            raise RuntimeError(OFFLOADED)
        if self.wait_for_update is not None:
            self.wait_for_update()
        owner = self.owners.get(key) if isinstance(key, Tensor) else None
        return self.data.setdefault(self._owner(key) if owner is None else owner, {})

    def __setitem__(self, key: Any, state: dict[str, Any]) -> None:
        if self._owner(key) is key:
            raise RuntimeError(
                "optimizer state of a parameter cannot be replaced as a whole. Set single entries with "
                "zero_full.safe_set_full_optimizer_state(param, value, key)"
            )
        self.data[self._owner(key)] = state

    def __delitem__(self, key: Any) -> None:
        del self.data[self._owner(key)]

    def __contains__(self, key: Any) -> bool:
        return isinstance(key, Tensor) and key in self.owners and self.owners[key] in self.data

    def values(self) -> Any:
        """Return the state of all parameters, also while it is offloaded."""
        if self.wait_for_update is not None:
            self.wait_for_update()
        return self.data.values()

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter or piece, without creating it."""
        if self.wait_for_update is not None:
            self.wait_for_update()
        return self.data[self._owner(key)] if key in self else default

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove the state of a parameter or piece, and return it."""
        return self.data.pop(self._owner(key)) if key in self or not default else default[0]
