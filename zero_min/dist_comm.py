"""Ranks as processes: the same `Comm` over torch.distributed.

Start one with torchrun (`DistComm.from_env()` reads its environment), on gloo without a GPU and on
NCCL with one. A rank that fails or never comes leaves the others waiting in a collective; when theirs
times out, every rank writes down where it stands and reads what the others wrote.
"""

import os
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zero_min.comm import Comm, Handle, WorldError, caller, describe

T = TypeVar("T")
SETTLE = 0.2  # seconds
# torch 2.13 renamed it; the old name is all that torch 2.11 knows.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class DistComm(Comm):
    """This process's rank in the default process group of torch.distributed."""

    def __init__(self, check: bool = True, patience: float = 2.0) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self.check = check  # compare the calls of all ranks before each collective: slower, but no mix-ups
        self.patience = patience  # seconds to wait for the others' last words after a failure
        self.calls = 0
        self.sending: list[tuple[dist.Work | None, Tensor]] = []  # what may still be on its way
        self.device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    @classmethod
    def from_env(cls, backend: str = "gloo", timeout: float = 60.0, check: bool = True) -> "DistComm":
        """Join the world that torchrun describes: on the CPU with gloo, on one GPU a rank with "nccl".

        With `check`, ranks that part ways are told at once where each stands. It costs a small message
        for each collective, so measure speed without it.
        """
        missing = [k for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
        if missing:
            raise WorldError(f"{', '.join(missing)} not set: start this with torchrun --standalone")
        if os.name == "nt":
            os.environ.setdefault("USE_LIBUV", "0")  # torch for Windows may be built without it
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise WorldError(
                f"rank {os.environ['RANK']} cannot use {where}: {error}\nIf another job holds that port, "
                "choose another (torchrun --master-port) or let torchrun find one (--standalone)."
            ) from error
        return cls(check)

    def close(self) -> None:
        """Leave the world, once what was sent is on its way."""
        self.sent()
        dist.destroy_process_group()

    def settle(self) -> None:
        """gloo's own threads let go of a collective's buffers a moment after it has returned."""
        super().settle()
        self.sent()
        time.sleep(SETTLE)

    def sent(self) -> None:
        """Wait until all messages are on their way. One that is not would be lost if this process left."""
        for work, _ in self.sending:
            if work is not None:
                work.wait()
        self.sending.clear()

    def _guard(self, call: str, collective: Callable[[], T]) -> T:
        self.calls += 1
        try:
            if self.check:
                self._compare(call)
            return collective()
        except RuntimeError as error:
            raise WorldError(self._post_mortem(f"call {self.calls}, {call} at {caller()}", error)) from error

    def _compare(self, call: str) -> None:
        """Tell every rank a number that stands for my call; raise if theirs differ."""
        mine = torch.tensor([zlib.crc32(call.encode())], device=self.device)
        theirs = torch.empty(self.world_size, dtype=mine.dtype, device=self.device)
        _all_gather_single(theirs, mine)
        if len(theirs.unique()) > 1:
            raise RuntimeError("the ranks made different calls")

    def _post_mortem(self, mine: str, error: RuntimeError) -> str:
        """Tell the others where I stand, wait a moment, and read where they stand."""
        lines = [f"rank {self.rank}: {str(error).splitlines()[0]}"]
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"stands/{self.rank}", mine)
            time.sleep(self.patience)
            for rank in range(self.world_size):
                heard = store.check([f"stands/{rank}"])
                where = store.get(f"stands/{rank}").decode() if heard else "was not heard of (absent or dead)"
                lines.append(f"  rank {rank}: {where}")
        except RuntimeError:
            lines.append(f"  rank {self.rank}: {mine}\n  rank 0's store does not answer, so rank 0 is gone")
        return "\n".join(lines)

    def _send(self, tensor: Tensor, to: int) -> None:
        copy = tensor.detach().clone()  # the caller may change theirs at once
        self.sending.append((dist.isend(copy, to), copy))

    def _receive(self, like: Tensor, source: int) -> Tensor:
        received = like.new_empty(like.shape)
        try:
            dist.recv(received, source)
            self.sent()
        except RuntimeError as error:
            call = f"{describe('receive', like)} from rank {source} at {caller()}"
            raise WorldError(self._post_mortem(call, error)) from error
        return received

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        self._guard(describe("all_reduce", tensor), lambda: dist.all_reduce(tensor))
        return tensor

    def _all_to_all(self, call: str, parts: Sequence[Tensor], sizes: Sequence[int] | None) -> list[Tensor]:
        # gloo's own reduce-scatter puts all-reduce bytes on the wire; an exchange and a local sum does not.
        mine = parts[self.rank]
        give = [part.numel() for part in parts]
        get = [mine.numel()] * self.world_size if sizes is None else list(sizes)
        received, sent = mine.new_empty(sum(get)), torch.cat([part.reshape(-1) for part in parts])
        self._guard(call, lambda: dist.all_to_all_single(received, sent, get, give))
        return [part.view_as(mine) if sizes is None else part for part in received.split(get)]

    def _all_gather(self, call: str, whole: Tensor, mine: Tensor) -> Tensor:
        self._guard(call, lambda: _all_gather_single(whole.view(-1), mine.contiguous().view(-1)))
        return whole

    def _start_all_gather(self, call: str, whole: Tensor, mine: Tensor) -> Handle:
        flat, part = whole.view(-1), mine.contiguous().view(-1)
        work = self._guard(call, lambda: _all_gather_single(flat, part, async_op=True))

        def wait() -> None:
            assert work is not None  # as it is without async_op
            try:
                work.wait()
            except RuntimeError as error:
                raise WorldError(self._post_mortem(f"waiting for {call} at {caller()}", error)) from error

        return Handle(wait)

    def _broadcast(self, tensor: Tensor, source: int) -> Tensor:
        self._guard(describe(f"broadcast from {source}", tensor), lambda: dist.broadcast(tensor, source))
        return tensor

    def _barrier(self) -> None:
        self._guard("barrier()", dist.barrier)
