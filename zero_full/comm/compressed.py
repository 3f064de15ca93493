"""Compressed average: one bit per element in each direction, with error feedback.

[Note: one bit] Rank r is the server of the r-th chunk of the buffer. Every rank (worker) adds its worker
error to its values, and sends each server the signs of that chunk and the scales of the tensors in it: one
all-to-all. Each server adds its server error to the mean of the received values, and sends signs and scales
of the sum to all ranks: one all-gather. An error becomes the exact values minus the compressed ones. So over
all calls, element by element,

    sum of the results + mean of the worker errors + server error = sum of the exact averages

and compression delays values but loses none. All ranks unpack the same bytes, so results have the same bits.

A scale is the root mean square of a tensor's values, or with `l1` their mean absolute value: of the whole
tensor at a worker, of its part in the chunk at a server. The mean absolute value gives the smallest error in
one call. But it is the smaller scale, so large values arrive later, and errors are larger after many calls.
All optimizers here use the root mean square (`tests/bench/scales.py` has measured both). Elements in no
tensor, and elements that a mask excludes, are not sent and have no errors: their average is zero.

A single rank sends nothing: its average is an exact copy, and it has no errors.

[Note: all or nothing] A value that is not finite makes the scale of its tensor not finite, and then the
server's scale, which all ranks receive: all ranks detect it in the same call. Elements that are not sent must
be finite as well: each message begins with a number that is NaN if one is not. Until all ranks know, they
work on copies. So if `NotFiniteError` is raised, or a rank dies during the call, errors and `out` are
unchanged.

Memory of a call: 4 bytes for each element that is sent, 4 for each element of this rank's chunk; and if not
all elements are sent, a copy of those that are, before and after the average.
"""

import ctypes
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from zero_full.comm.chunks import Chunks
from zero_full.comm.communicator import Communicator
from zero_full.errors import DisagreementError, NotFiniteError
from zero_full.kernels.load import operators

KINDS = (torch.float32, torch.bfloat16, torch.float16)  # types that can be averaged
Range = tuple[int, int]


class MadeFor(NamedTuple):
    """Identity of compression errors: the rank and the buffer that they belong to."""

    elements: int  # that are sent
    ranks: int
    rank: int
    places: int  # checksum of the mask of elements that are sent; 0 if these are the first ones

    def __str__(self) -> str:
        where = f", of a buffer with the checksum {self.places:08x}" if self.places else ""
        return f"rank {self.rank} of {self.ranks}, {self.elements} elements{where}"


@dataclass(frozen=True, eq=False)
class Errors:
    """Error feedback in fp32: made by `CompressedReduce.new_errors`, kept by its caller.

    Both tensors are empty on a single rank.
    """

    worker: Tensor  # error of what was sent to the servers, for each element that is sent
    server: Tensor  # error of what this server sent, for each element of this rank's chunk
    made_for: MadeFor

    def zero_(self) -> None:
        """Set both errors to zero, before another quantity is averaged."""
        self.worker.zero_()
        self.server.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the errors of this rank, not copied, and the rank and buffer that they belong to."""
        return {"worker": self.worker, "server": self.server, "made_for": torch.tensor(self.made_for)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that the same rank has saved, at the same world size."""
        theirs = MadeFor(*state["made_for"].tolist())
        if theirs != self.made_for:
            raise ValueError(
                f"compression errors saved by {theirs}, cannot be used by {self.made_for}. Load them on the "
                "rank that saved them. Or zero them, which loses the values that were not sent yet."
            )
        self.worker.copy_(state["worker"])
        self.server.copy_(state["server"])


class CompressedReduce:
    """Averages a flat buffer of `numel` elements over the ranks. See [Note: one bit].

    `tensors`: ranges of the buffer, ascending, each with a scale of its own. None: one range for the whole
    buffer, as in DeepSpeed. `mask`: bool, False where an element must stay zero; kept, at a byte per element.
    `l1`: scales are mean absolute values instead of root mean squares. All ranks must pass equal arguments.
    """

    def __init__(
        self,
        comm: Communicator,
        numel: int,
        tensors: Sequence[Range] | None = None,
        mask: Tensor | None = None,
        l1: bool = False,
    ) -> None:
        self.comm, self.numel, self.l1 = comm, numel, l1
        self.ranges = [(0, numel)] if tensors is None else [(start, stop) for start, stop in tensors]
        sizes, live = _sent_elements(numel, self.ranges, mask)
        self.chunks = Chunks(tuple(accumulate(sizes)), comm.size)
        places = 0 if live is None else mask_checksum(live)
        self.made_for = MadeFor(self.chunks.numel, comm.size, comm.rank, places)
        self.sent = self.chunks.sent  # bytes, for one average
        self._check_layouts()
        self.live = None if live is None else live.to(comm.device)  # None: the first `chunks.numel` are sent
        self._place_scales()

    def _check_layouts(self) -> None:
        """Raise DisagreementError on every rank if layouts differ: bits would be read as other elements'."""
        sizes = f"{self.numel} elements, {len(self.ranges)} tensors, {self.made_for.elements} elements sent"
        mine = (sizes, zlib.crc32(repr(self.ranges).encode()), self.made_for.places, self.l1)
        answers = self.comm.gather_objects(mine, "the layout of a compressed average")
        if any(answer != mine for answer in answers):
            lines = [
                f"rank {rank}: {text} (checksums: ranges {ranges:08x}, mask {places:08x}; l1 {l1})"
                for rank, (text, ranges, places, l1) in zip(self.comm.ranks, answers, strict=True)
            ]
            raise DisagreementError("\n  ".join(["the ranks average buffers of different layouts:", *lines]))

    def _place_scales(self) -> None:
        """Make index tensors for the kernels: where tensors end, and where messages have their scales."""
        chunks = self.chunks
        low, _ = chunks.range_of(self.comm.rank)
        cuts = [cut for of_one in chunks.cuts for cut in of_one]
        places = [
            rank * chunks.numbers + 1 + i for rank, of in enumerate(chunks.cuts) for i in range(len(of))
        ]

        def indices(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=self.comm.device)

        self.ends = indices(chunks.ends)
        self.own_ends = indices([cut.end - low for cut in chunks.cuts[self.comm.rank]])
        self.cut_ends = indices([cut.end for cut in cuts])
        self.cut_tensors = indices([cut.tensor for cut in cuts])
        self.scale_places = indices(places)

    def new_errors(self) -> Errors:
        """Return errors of zero, for a new quantity."""
        low, high = self.chunks.range_of(self.comm.rank)
        sizes = (0, 0) if self.comm.size == 1 else (self.chunks.numel, high - low)
        worker, server = (torch.zeros(n, dtype=torch.float32, device=self.comm.device) for n in sizes)
        return Errors(worker, server, self.made_for)

    @torch.no_grad()
    def average(self, x: Tensor, out: Tensor, errors: Errors, what: str) -> None:
        """Write the average of all ranks' `x` into `out`, in fp32. `out` may be `x`. The host waits.

        Raises NotFiniteError on all ranks or on none. See [Note: all or nothing].
        """
        self._check(x, out, errors)
        if not self.numel:
            return
        if self.comm.size == 1:
            self._copy(x, out, what)
            return
        message, worker = self._worker_messages(x, errors)
        received = torch.empty_like(message)
        self.comm.all_to_all(message.view(-1), received.view(-1), what)
        answers, server = self._server_answers(received, errors)
        self.comm.all_gather(answers.view(-1), what)
        numbers, bits = self._parsed(answers)
        # All ranks have the same answers here, so all raise or none. The host reads nothing before.
        if not numbers.is_meta and not (finite := numbers.isfinite()).all():
            wrong = ~finite.view(-1)[self.scale_places]
            raise NotFiniteError(what, sorted(set(self.cut_tensors[wrong].tolist())))
        self._unpack(numbers, bits, out)
        # Only now: an average that has raised can be repeated with the old errors.
        errors.worker.copy_(worker)
        errors.server.copy_(server)

    def _check(self, x: Tensor, out: Tensor, errors: Errors) -> None:
        """Raise ValueError for tensors or errors that do not fit this layout."""
        for name, tensor, kinds in (("x", x, KINDS), ("out", out, KINDS[:1])):
            if tensor.shape != (self.numel,) or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be a contiguous tensor of {self.numel} elements, not of shape "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()}"
                )
            if tensor.dtype not in kinds:
                raise ValueError(f"{name} is {tensor.dtype}: it can be {', '.join(map(str, kinds))}")
        if errors.made_for != self.made_for:
            raise ValueError(
                f"these errors belong to {errors.made_for}, not to {self.made_for}. Pass those of "
                "new_errors()"
            )

    def _copy(self, x: Tensor, out: Tensor, what: str) -> None:
        """Average over a single rank: copy exactly."""
        if not x.is_meta and bool(_nan_if_not_finite(x).isnan()):
            seen = x if self.live is None else x.masked_fill(~self.live, 0)
            raise NotFiniteError(
                what, [i for i, (a, b) in enumerate(self.ranges) if _nan_if_not_finite(seen[a:b]).isnan()]
            )
        out.copy_(x)
        if self.live is None:
            out[self.chunks.numel :].zero_()
        else:
            out.masked_fill_(~self.live, 0)

    def _worker_messages(self, x: Tensor, errors: Errors) -> tuple[Tensor, Tensor]:
        """Return the messages to all servers, one per row, and the new worker error."""
        chunks = self.chunks
        if self.live is None:
            going, aside = x[: chunks.numel], x[chunks.numel :]
        else:  # the meta device cannot count elements: their number comes from the layout
            going, aside = x.new_empty(chunks.numel) if x.is_meta else x[self.live], x
        wanted = going + errors.worker
        packed, scales = self._pack(wanted, self.ends)
        numbers = wanted.new_zeros(chunks.ranks * chunks.numbers)
        numbers.index_copy_(0, self.scale_places, scales.index_select(0, self.cut_tensors))
        rows = numbers.view(chunks.ranks, chunks.numbers)
        rows[:, 0] = _nan_if_not_finite(aside)  # tells all ranks of values that are not sent
        message = torch.zeros(chunks.ranks, chunks.message, dtype=torch.uint8, device=x.device)
        self._write(message, rows, packed)
        return message, wanted

    def _server_answers(self, received: Tensor, errors: Errors) -> tuple[Tensor, Tensor]:
        """Return the buffer for all servers' answers, with this one's, and the new server error."""
        rank, parts = self.comm.rank, len(self.own_ends)
        numbers, bits = self._parsed(received)
        mean = errors.server.clone()
        if len(mean):
            rows = bits[:, : -(-len(mean) // 8)].contiguous(), numbers[:, 1 : 1 + parts].contiguous()
            operators(mean.device).sign_unpack_mean(*rows, self.own_ends, mean, True)
        packed, scales = self._pack(mean, self.own_ends)
        row = numbers.new_zeros(1, self.chunks.numbers)
        row[:, 0] = numbers[:, 0].sum()  # NaN if a worker's is
        row[:, 1 : 1 + parts] = scales
        answers = torch.zeros_like(received)
        self._write(answers[rank : rank + 1], row, packed)
        return answers, mean

    def _unpack(self, numbers: Tensor, bits: Tensor, out: Tensor) -> None:
        """Unpack all servers' answers into `out`."""
        numel = self.chunks.numel
        result = out[:numel] if self.live is None else out.new_empty(numel)
        if numel:
            scales = numbers.view(-1).index_select(0, self.scale_places)
            packed = bits.flatten().contiguous()[: -(-numel // 8)]  # rows of one byte flatten to a view
            operators(out.device).sign_unpack_mean(packed[None], scales[None], self.cut_ends, result, False)
        if self.live is None:
            out[numel:].zero_()
        else:
            out.zero_().masked_scatter_(self.live, result)

    # Messages ------------------------------------------------------------------------------------

    def _pack(self, wanted: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Compress `wanted` to bits and scales, in place: afterwards it holds the compression error."""
        if not len(wanted):
            return wanted.new_empty(0, dtype=torch.uint8), wanted.new_zeros(len(ends))
        packed, scales = operators(wanted.device).sign_pack(None, wanted, ends, self.l1)
        return packed, scales

    def _write(self, messages: Tensor, numbers: Tensor, packed: Tensor) -> None:
        """Write numbers and bits into messages, one per row. The last rows may have fewer bits."""
        start, width = 4 * self.chunks.numbers, self.chunks.chunk // 8
        messages[:, :start].view(torch.float32).copy_(numbers)
        room = messages[:, start : start + width]
        room.copy_(torch.nn.functional.pad(packed, (0, room.numel() - len(packed))).view(room.shape))

    def _parsed(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers and bits of messages, one message per row."""
        start, width = 4 * self.chunks.numbers, self.chunks.chunk // 8
        numbers = messages[:, :start].view(torch.float32).contiguous()
        return numbers, messages[:, start : start + width]


def _nan_if_not_finite(numbers: Tensor) -> Tensor:
    """Return 0, or NaN if a number is not finite, on the device, so that the host does not wait."""
    if not numbers.numel():
        return torch.zeros((), device=numbers.device)
    low, high = torch.aminmax(numbers)
    return (low * 0 + high * 0).float()


def _sent_elements(
    numel: int, ranges: Sequence[Range], mask: Tensor | None
) -> tuple[list[int], Tensor | None]:
    """Return the number of elements of each tensor to send, and their mask (None: the first ones)."""
    ends = [0, *(stop for _, stop in ranges)]
    if not all(before <= start <= stop <= numel for before, (start, stop) in zip(ends, ranges, strict=False)):
        raise ValueError(
            f"tensors must be (start, stop) ranges within {numel} elements, ascending and without overlap, "
            f"not {list(ranges)}"
        )
    if mask is None and all(before == start for before, (start, _) in zip(ends, ranges, strict=False)):
        return [stop - start for start, stop in ranges], None
    live = torch.zeros(numel, dtype=torch.bool)
    for start, stop in ranges:
        live[start:stop] = True
    if mask is not None:
        if mask.shape != live.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"mask must be a bool tensor of {numel} elements, not {mask.dtype} of shape "
                f"{tuple(mask.shape)}"
            )
        live &= mask.cpu()
    sizes = [int(live[start:stop].sum()) for start, stop in ranges]
    return sizes, None if bool(live[: sum(sizes)].all()) else live


def mask_checksum(mask: Tensor, start: int = 0) -> int:
    """Return the checksum of a contiguous bool tensor, continued from `start`. It does not need NumPy."""
    on_cpu = mask.cpu()
    return zlib.crc32((ctypes.c_char * on_cpu.numel()).from_address(on_cpu.data_ptr()), start)
