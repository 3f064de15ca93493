"""Asynchronous saves: a thread writes the checkpoint while training continues.

[Note: asynchronous saves] The caller waits until this rank's data are copied to a host buffer, which the
next save reuses. Then a thread writes the copy. Ranks communicate through the store
(`comm/store_messages.py`): each reports that its files are on the disk, and then the first rank reports that
the checkpoint is published, or the error. A rank that learns of a failure reports it in the next step, which
raises it on all ranks.

The thread is no daemon, so a script that ends waits for it. If the save fails at that point, the exit code is
1. If the script ends with an exception, the save is aborted, as in a crash, and the other ranks are notified.
"""

import atexit
import json
import logging
import os
import sys
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zero_full._compat import run_exit_functions
from zero_full.checkpoint import disk
from zero_full.checkpoint.failure import joined_messages, message_of
from zero_full.checkpoint.folder import CheckpointSave
from zero_full.checkpoint.rank_file import Payload, layout_of
from zero_full.comm.store_messages import StoreMessages
from zero_full.errors import CheckpointError
from zero_full.offload.arena import LOCKABLE, Arena, page_locker
from zero_full.shard.step.optimizer import ZeroOptimizer
from zero_full.threads import make_thread

log = logging.getLogger("zero_full")
OUTCOME = "the outcome"
COPY = "the copy of an asynchronous save"
LINGER_S = 10.0  # seconds for which a rank keeps its messages available to ranks that have not read them


class StagingBuffer:
    """Host memory for a copy of this rank's data, reused by later saves of tensors of the same sizes.

    For CUDA it is page-locked as in [Note: arena] of `offload/arena.py`, with a warning where that fails. The
    pages of a large tensor's copy are pages of the file, which are written without another copy: see [Note:
    direct writes] in `disk.py`.
    """

    def __init__(self) -> None:
        self.arena, self.rooms = Arena([]), list[Tensor]()  # bytes, one room for each tensor

    def copy(self, payload: Payload) -> Payload:
        """Copy the payload's tensors to the host buffer. The result is valid until the next call."""
        chunks = payload.chunks
        devices = {chunk.values.device for chunk in chunks if chunk.values.device.type != "cpu"}
        self._reserve(
            [_with_shift(chunk.values.nbytes) for chunk in chunks], {device.type for device in devices}
        )
        _, _, places = layout_of(payload)
        copies = []
        for chunk, room in zip(chunks, self.rooms, strict=True):
            shift, size = 0, chunk.values.nbytes
            if size >= disk.BLOCK:
                shift = (places[chunk.key] - room.data_ptr()) % disk.PAGE
                shift -= shift % chunk.values.itemsize  # nothing, but for complex128
            values = room[shift : shift + size].view(chunk.values.dtype)
            values.copy_(chunk.values, non_blocking=True)
            copies.append(replace(chunk, values=values))
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()
        plain_tensors = [tensor.to("cpu", copy=True) for tensor in payload.plain_tensors]
        return replace(payload, chunks=copies, plain_tensors=plain_tensors)

    def _reserve(self, sizes: Sequence[int], devices: Collection[str]) -> None:
        """Allocate regions of these sizes in bytes, unless the present ones have these sizes."""
        if sizes == [room.nbytes for room in self.rooms]:
            return
        self.release()  # free the old memory first, to avoid a peak of both
        self.arena = Arena(sizes, page_locker() if LOCKABLE in devices else None, optional=COPY)
        rooms = (self.arena.take(size, torch.uint8) for size in sizes)
        self.rooms = [torch.empty(0, dtype=torch.uint8) if room is None else room for room in rooms]

    def release(self) -> None:
        """Free the host memory."""
        self.arena.close()
        self.arena, self.rooms = Arena([]), []


def _with_shift(size: int) -> int:
    """Return the bytes of a region in which a tensor of this size may begin anywhere in a page."""
    return size + disk.PAGE * (size >= disk.BLOCK)


class AsyncSave:
    """One asynchronous save in progress. See [Note: asynchronous saves]."""

    def __init__(self, save: CheckpointSave, patience_s: float) -> None:
        self.save, self.patience_s = save, patience_s
        self.messages = StoreMessages(f"save/{save.nonce}", save.ranks, self._check_script)
        self.failure: CheckpointError | None = None
        self.error_before = getattr(sys, "last_value", None)  # an earlier error of an interactive session
        self.made_in = os.getpid()
        self.thread = make_thread(self._run, "zero_full-save")
        self.thread.start()

    def _check_script(self) -> None:
        """Raise if the script has ended with an exception."""
        error = getattr(sys, "last_value", None)
        if not threading.main_thread().is_alive() and error is not self.error_before:
            raise CheckpointError(f"the script has ended with an error: {message_of(error)}")

    def _run(self) -> None:
        try:
            failed = self._write_and_publish()
        except Exception as error:  # the store or the publishing rank is gone
            failed = message_of(error)
        if failed:
            self.failure = CheckpointError(f"the asynchronous save into {self.save.folder} failed: {failed}")
            atexit.register(self._exit_as_failed)
        keys = [_key_of(self.save.payload.rank), *([OUTCOME] if self.save.is_first else [])]
        self.messages.finish(keys, min(LINGER_S, self.patience_s))

    def take_failure(self) -> CheckpointError | None:
        """Return the failure or None. The caller raises it, so the exit code is not changed any more."""
        atexit.unregister(self._exit_as_failed)
        return self.failure

    def _exit_as_failed(self) -> None:
        """Exit with code 1 after all other exit functions, as the script has ended and cannot raise."""
        if os.getpid() != self.made_in:  # a forked process, which has not failed
            return
        atexit.unregister(self._exit_as_failed)
        log.error("%s", self.failure)
        run_exit_functions()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)

    def _write_and_publish(self) -> str:
        """Write this rank's files and wait until the checkpoint is published.

        Returns the error message of a rank that has failed, or an empty string.
        """
        rows, failed = dict[str, Any](), None
        try:
            rows.update(self.save.write(self._check_script))
        except Exception as error:
            failed = message_of(error)
        self.messages.write(_key_of(self.save.payload.rank), json.dumps([failed, rows]))
        if not self.save.is_first:
            return self.messages.read([OUTCOME], 2 * self.patience_s)[0]
        outcome = ""
        try:
            self._publish()
        except Exception as error:
            outcome = message_of(error)
            self.save.discard()
        self.messages.write(OUTCOME, outcome)
        return outcome

    def _publish(self) -> None:
        """Wait for all ranks' files and publish the checkpoint. Raises if any rank has failed."""
        ranks = self.save.ranks
        reports = self.messages.read([_key_of(rank) for rank in ranks], self.patience_s)
        everyones = dict(zip(ranks, map(json.loads, reports), strict=True))
        if failed := {rank: text for rank, (text, _) in everyones.items() if text is not None}:
            raise CheckpointError(joined_messages(failed, len(ranks)))
        self.save.commit({rank: rows for rank, (_, rows) in everyones.items()})


def _key_of(rank: int) -> str:
    return f"rank {rank}"


class AsyncSaves:
    """The asynchronous saves of one optimizer, one at a time."""

    def __init__(self) -> None:
        self.staging = StagingBuffer()
        self.running: AsyncSave | None = None

    def has_failed(self) -> bool:
        """Return whether a save has failed, so that `wait` would raise."""
        return self.running is not None and self.running.failure is not None

    def wait(self) -> None:
        """Wait for the save in progress, if any. Raises CheckpointError if it has failed, once."""
        if self.running is None:
            return
        self.running.thread.join()
        ended, self.running = self.running, None
        if (failure := ended.take_failure()) is not None:
            raise failure

    def close(self) -> None:
        """Wait for the save in progress, and free the host buffer."""
        try:
            self.wait()
        finally:
            self.staging.release()


def async_saves_of(optimizer: ZeroOptimizer) -> AsyncSaves:
    """Return the optimizer's `AsyncSaves`, created on first use."""
    if optimizer.background is None:
        optimizer.background = AsyncSaves()
    assert isinstance(optimizer.background, AsyncSaves)
    return optimizer.background


def wait_for_checkpoint(optimizer: ZeroOptimizer) -> None:
    """Wait until an asynchronous save is complete.

    Raises CheckpointError if it has failed, unless a step has raised it already. Not a collective call: a
    single rank may call this.
    """
    async_saves_of(optimizer).wait()
