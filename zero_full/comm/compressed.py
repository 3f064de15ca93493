"""The average over the ranks at one bit an element each way; what the bits get wrong is kept for next time.

[Note: one bit] Rank r serves the r-th chunk of the buffer. Everyone adds its worker error to what it has, and
sends every server the signs of that chunk and the scales of the tensors in it: one all-to-all. A server adds
its server error to the mean of what came, and sends signs and scales of that to all: one all-gather. Each
error becomes what was wanted minus what was said. So for all calls together, element by element,

    sum of the results + mean of the worker errors + server error = sum of the averages asked for

and nothing is lost, it only comes late. All ranks unpack the same bytes, so results have the same bits.

A scale is the root of the mean square of what was wanted of a tensor, and with `l1` its mean size: for all
of it at a rank, for its part in the chunk at a server. The mean size leaves least unsaid of one call. But it
is the smaller one, so what is large comes later, and after many calls there is more to say: all optimizers
here take the root (`tests/bench/scales.py` has measured both). Elements in no tensor, and those that a mask
leaves out, do not travel, do not count, and have no errors: their average is zero.

A rank that is alone has nothing to send, hence nothing to lose: its average is an exact copy, and there are
no errors to keep.

[Note: all or nothing] A number that is not finite makes its scale so, and then the server's, which everyone
gets: all ranks see it in the same call. What does not travel must be finite, too: each message begins with a
number that is NaN if it is not. Until it is known everyone works on copies. So where `NotFiniteError` is
raised, and where a rank dies on the way, errors and the place of the result are as they were before.

A call takes 4 bytes for each element that travels, 4 for each of this rank's chunk, and where not all
elements travel room for those that do, as given and as averaged.
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

KINDS = (torch.float32, torch.bfloat16, torch.float16)  # of what can be averaged
Range = tuple[int, int]


class MadeFor(NamedTuple):
    """Where errors belong: elsewhere they would not be what somebody was not told."""

    elements: int  # that travel
    ranks: int
    rank: int
    places: int  # a checksum of which elements travel

    def __str__(self) -> str:
        where = f", of a buffer with the checksum {self.places:08x}" if self.places else ""
        return f"rank {self.rank} of {self.ranks}, {self.elements} elements{where}"


@dataclass(frozen=True, eq=False)
class Errors:
    """What was wanted and not said yet, in fp32. A `CompressedReduce` makes it and its caller keeps it.

    Both are empty for a rank that is alone.
    """

    worker: Tensor  # not said to the servers: one number for each element that travels
    server: Tensor  # not said by this server: one for each element of this rank's chunk
    made_for: MadeFor

    def zero_(self) -> None:
        """Forget. What was not said of one quantity must not be added to another."""
        self.worker.zero_()
        self.server.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's: the tensors themselves, and where they belong."""
        return {"worker": self.worker, "server": self.server, "made_for": torch.tensor(self.made_for)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` has returned on the same rank of as many."""
        theirs = MadeFor(*state["made_for"].tolist())
        if theirs != self.made_for:
            raise ValueError(
                f"errors of a compressed average, saved by {theirs}, mean nothing to {self.made_for}. "
                "Load them where they were saved; or zero them, and lose what had not been delivered"
            )
        self.worker.copy_(state["worker"])
        self.server.copy_(state["server"])


class CompressedReduce:
    """Averages a flat buffer of `numel` elements over the ranks. See [Note: one bit].

    `tensors`: their ranges in it, ascending; each has a scale of its own. None: all of it is one, as in
    DeepSpeed. `mask`: bool, False where an element must stay zero; it is kept, a byte for each element.
    `l1`: scales are mean sizes, and not roots of mean squares. All ranks make one with the same of all.
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
        sizes, live = _what_travels(numel, self.ranges, mask)
        self.chunks = Chunks(tuple(accumulate(sizes)), comm.size)
        places = 0 if live is None else zlib.crc32(_bytes_of(live))
        self.made_for = MadeFor(self.chunks.numel, comm.size, comm.rank, places)
        self.sent = self.chunks.sent  # bytes, for one average
        self._agree()
        self.live = None if live is None else live.to(comm.device)  # None: the first `chunks.numel` travel
        self._place_scales()

    def _agree(self) -> None:
        """Raise on every rank if one has another buffer: its bits would pass for those of other elements."""
        told = f"{self.numel} elements, {len(self.ranges)} tensors, {self.made_for.elements} elements travel"
        mine = (told, zlib.crc32(repr(self.ranges).encode()), self.made_for.places, self.l1)
        answers = self.comm.gather_objects(mine, "the layout of a compressed average")
        if any(answer != mine for answer in answers):
            lines = [
                f"rank {rank}: {text} (checksums: ranges {ranges:08x}, mask {places:08x}; l1 {l1})"
                for rank, (text, ranges, places, l1) in zip(self.comm.ranks, answers, strict=True)
            ]
            raise DisagreementError("\n  ".join(["ranks would not average the same:", *lines]))

    def _place_scales(self) -> None:
        """Where tensors end, in all and in this rank's chunk; and where in a round of messages scales are."""
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
        """Everything that was wanted so far has been said."""
        low, high = self.chunks.range_of(self.comm.rank)
        sizes = (0, 0) if self.comm.size == 1 else (self.chunks.numel, high - low)
        worker, server = (torch.zeros(n, dtype=torch.float32, device=self.comm.device) for n in sizes)
        return Errors(worker, server, self.made_for)

    @torch.no_grad()
    def average(self, x: Tensor, out: Tensor, errors: Errors, what: str) -> None:
        """`out`, in fp32, becomes the average of everyone's `x`, and may be it. The host waits for it.

        Raises NotFiniteError on all ranks or on none. See [Note: all or nothing].
        """
        self._check(x, out, errors)
        if not self.numel:
            return
        if self.comm.size == 1:
            self._copy(x, out, what)
            return
        message, worker = self._speak(x, errors)
        received = torch.empty_like(message)
        self.comm.all_to_all(message.view(-1), received.view(-1), what)
        answers, server = self._serve(received, errors)
        self.comm.all_gather(answers.view(-1), what)
        numbers, bits = self._opened(answers)
        self._believe(numbers, what)
        self._deliver(numbers, bits, out)
        errors.worker.copy_(worker)
        errors.server.copy_(server)

    def _check(self, x: Tensor, out: Tensor, errors: Errors) -> None:
        for name, tensor, kinds in (("x", x, KINDS), ("out", out, KINDS[:1])):
            if tensor.shape != (self.numel,) or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be {self.numel} elements in a row, not of shape {tuple(tensor.shape)} with "
                    f"strides {tensor.stride()}"
                )
            if tensor.dtype not in kinds:
                raise ValueError(f"{name} is {tensor.dtype}: it can be {', '.join(map(str, kinds))}")
        if errors.made_for != self.made_for:
            raise ValueError(f"these errors are of {errors.made_for}, and this is {self.made_for}")

    def _copy(self, x: Tensor, out: Tensor, what: str) -> None:
        """The average of a rank that is alone."""
        if not x.is_meta and bool(_doubt(x).isnan()):
            seen = x if self.live is None else x.masked_fill(~self.live, 0)
            raise NotFiniteError(
                what, [i for i, (a, b) in enumerate(self.ranges) if _doubt(seen[a:b]).isnan()]
            )
        out.copy_(x)
        if self.live is None:
            out[self.chunks.numel :].zero_()
        else:
            out.masked_fill_(~self.live, 0)

    def _speak(self, x: Tensor, errors: Errors) -> tuple[Tensor, Tensor]:
        """The messages to all servers, a row each; and what they leave unsaid."""
        chunks = self.chunks
        going, aside = (x[: chunks.numel], x[chunks.numel :]) if self.live is None else (self._live_of(x), x)
        wanted = going + errors.worker
        packed, scales = self._pack(wanted, self.ends)
        numbers = wanted.new_zeros(chunks.ranks * chunks.numbers)
        numbers.index_copy_(0, self.scale_places, scales.index_select(0, self.cut_tensors))
        rows = numbers.view(chunks.ranks, chunks.numbers)
        rows[:, 0] = _doubt(aside)
        message = torch.zeros(chunks.ranks, chunks.message, dtype=torch.uint8, device=x.device)
        self._write(message, rows, packed)
        return message, wanted

    def _serve(self, received: Tensor, errors: Errors) -> tuple[Tensor, Tensor]:
        """Room for all servers' answers, with this one's in its row; and what that leaves unsaid."""
        rank, parts = self.comm.rank, len(self.own_ends)
        numbers, bits = self._opened(received)
        mean = errors.server.clone()
        if len(mean):
            rows = bits[:, : -(-len(mean) // 8)].contiguous(), numbers[:, 1 : 1 + parts].contiguous()
            operators(mean.device).sign_unpack_mean(*rows, self.own_ends, mean, True)
        packed, scales = self._pack(mean, self.own_ends)
        row = numbers.new_zeros(1, self.chunks.numbers)
        row[:, 0] = numbers[:, 0].sum()
        row[:, 1 : 1 + parts] = scales
        answers = torch.zeros_like(received)
        self._write(answers[rank : rank + 1], row, packed)
        return answers, mean

    def _deliver(self, numbers: Tensor, bits: Tensor, out: Tensor) -> None:
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

    def _live_of(self, x: Tensor) -> Tensor:
        """Those elements that travel. On the meta device torch cannot count them."""
        return x.new_empty(self.chunks.numel) if x.is_meta else x[self.live]

    def _pack(self, wanted: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Bits and scales. `wanted` becomes what they get wrong."""
        if not len(wanted):
            return wanted.new_empty(0, dtype=torch.uint8), wanted.new_zeros(len(ends))
        packed, scales = operators(wanted.device).sign_pack(None, wanted, ends, self.l1)
        return packed, scales

    def _write(self, messages: Tensor, numbers: Tensor, packed: Tensor) -> None:
        """Numbers and bits into messages, a row each; the last bits may be fewer."""
        start, width = 4 * self.chunks.numbers, self.chunks.chunk // 8
        messages[:, :start].view(torch.float32).copy_(numbers)
        room = messages[:, start : start + width]
        room.copy_(torch.nn.functional.pad(packed, (0, room.numel() - len(packed))).view(room.shape))

    def _opened(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers and bits of messages, a row each."""
        start, width = 4 * self.chunks.numbers, self.chunks.chunk // 8
        numbers = messages[:, :start].view(torch.float32).contiguous()
        return numbers, messages[:, start : start + width]

    def _believe(self, numbers: Tensor, what: str) -> None:
        """Raise if what all have told all is not finite, or is not what they have told."""
        if numbers.is_meta:
            return
        finite = numbers.isfinite()
        is_fine = bool(finite.all())
        self.comm.check(what)
        if not is_fine:
            wrong = ~finite.view(-1)[self.scale_places]
            raise NotFiniteError(what, sorted(set(self.cut_tensors[wrong].tolist())))


def _doubt(numbers: Tensor) -> Tensor:
    """0, or NaN if one of these is not finite. Nobody waits for a device."""
    if not numbers.numel():
        return torch.zeros((), device=numbers.device)
    low, high = torch.aminmax(numbers)
    return (low * 0 + high * 0).float()


def _what_travels(
    numel: int, ranges: Sequence[Range], mask: Tensor | None
) -> tuple[list[int], Tensor | None]:
    """How many elements of each tensor do; and which of all, None if these are the first ones."""
    ends = [0, *(stop for _, stop in ranges)]
    if not all(before <= start <= stop <= numel for before, (start, stop) in zip(ends, ranges, strict=False)):
        raise ValueError(f"tensors must lie in a buffer of {numel} elements in order, not at {list(ranges)}")
    if mask is None and all(before == start for before, (start, _) in zip(ends, ranges, strict=False)):
        return [stop - start for start, stop in ranges], None
    live = torch.zeros(numel, dtype=torch.bool)
    for start, stop in ranges:
        live[start:stop] = True
    if mask is not None:
        if mask.shape != live.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"a mask must be {numel} times True or False, not {mask.dtype} of shape {tuple(mask.shape)}"
            )
        live &= mask.cpu()
    sizes = [int(live[start:stop].sum()) for start, stop in ranges]
    return sizes, None if bool(live[: sum(sizes)].all()) else live


def _bytes_of(live: Tensor) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * live.numel()).from_address(live.data_ptr())
