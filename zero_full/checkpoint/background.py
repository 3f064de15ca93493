"""Asynchronous saves: a thread writes the checkpoint while training continues.

[Note: beside the training] The caller waits until this rank's data are copied to a host buffer, which the
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
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from zero_full._compat import run_exit_functions
from zero_full.checkpoint.failure import reasons, said
from zero_full.checkpoint.one_save import CheckpointSave
from zero_full.checkpoint.rank_file import Payload
from zero_full.comm.store_messages import StoreMessages
from zero_full.errors import CheckpointError
from zero_full.shard.step.optimizer import ZeroOptimizer

log = logging.getLogger("zero_full")
OUTCOME = "the outcome"
FAREWELL_S = 10.0  # seconds for which a rank keeps its messages available to ranks that have not read them


class CopyRoom:
    """Host buffer for a copy of this rank's data, reused by later saves."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.unlock: Callable[[], object] = lambda: None

    def copy(self, payload: Payload) -> Payload:
        """Copy the payload's tensors to the host buffer. The result is valid until the next call."""
        # Wide dtypes first, as in the file, so that every tensor is aligned to its element size.
        chunks = sorted(payload.chunks, key=lambda chunk: -chunk.values.dtype.itemsize)
        devices = {chunk.values.device for chunk in chunks if chunk.values.device.type != "cpu"}
        self._make_room(sum(chunk.values.nbytes for chunk in chunks), {device.type for device in devices})
        copies, begin = [], 0
        for chunk in chunks:
            end = begin + chunk.values.nbytes
            room = self.memory[begin:end].view(chunk.values.dtype)
            room.copy_(chunk.values, non_blocking=True)
            copies.append(replace(chunk, values=room))
            begin = end
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()
        aside = [tensor.to("cpu", copy=True) for tensor in payload.aside]
        return replace(payload, chunks=copies, aside=aside)

    def _make_room(self, nbytes: int, devices: Collection[str]) -> None:
        if nbytes <= self.memory.numel():
            return
        self.release()  # free the old buffer first, to avoid a peak of both
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if "cuda" in devices:
            self._lock()

    def _lock(self) -> None:
        """Page-lock the buffer for fast copies by CUDA.

        torch's own pinned memory is rounded up to a power of two, up to twice as much, and is not returned to
        the system.
        """
        cuda, address, nbytes = torch.cuda.cudart(), self.memory.data_ptr(), self.memory.nbytes
        if int(cuda.cudaHostRegister(address, nbytes, 0)):
            self.release()
            raise CheckpointError(
                f"CUDA cannot lock {nbytes} bytes of the host's memory for a copy: save without asynchronous"
            )
        self.unlock = weakref.finalize(self, cuda.cudaHostUnregister, address)

    def release(self) -> None:
        """Free the host buffer."""
        self.unlock()  # a finalizer, which later calls ignore
        self.memory = self.memory[:0].clone()


class Writing:
    """One asynchronous save in progress. See [Note: beside the training]."""

    def __init__(self, save: CheckpointSave, patience_s: float) -> None:
        self.save, self.patience_s = save, patience_s
        self.messages = StoreMessages(f"save/{save.nonce}", save.ranks, self._look)
        self.failure: CheckpointError | None = None
        self.error_before = getattr(sys, "last_value", None)  # an earlier error of an interactive session
        self.made_in = os.getpid()
        self.thread = threading.Thread(target=self._run, name="zero_full-save")
        self.thread.start()

    def _look(self) -> None:
        """Raise if the script has ended with an exception."""
        error = getattr(sys, "last_value", None)
        if not threading.main_thread().is_alive() and error is not self.error_before:
            raise CheckpointError(f"the script has ended with an error: {said(error)}")

    def _run(self) -> None:
        try:
            failed = self._write_and_publish()
        except Exception as error:  # the store or the publishing rank is gone
            failed = said(error)
        if failed:
            self.failure = CheckpointError(f"{self.save.folder} was written beside the training: {failed}")
            atexit.register(self._exit_as_failed)
        mine = [_note_of(self.save.payload.rank)]
        keys = [*mine, OUTCOME] if self.save.is_first else mine
        self.messages.finish(keys, min(FAREWELL_S, self.patience_s))

    def told(self) -> CheckpointError | None:
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
            rows.update(self.save.write(self._look))
        except Exception as error:
            failed = said(error)
        self.messages.write(_note_of(self.save.payload.rank), json.dumps([failed, rows]))
        if not self.save.is_first:
            return self.messages.read([OUTCOME], 2 * self.patience_s)[0]
        outcome = ""
        try:
            self._publish()
        except Exception as error:
            outcome = said(error)
            self.save.discard()
        self.messages.write(OUTCOME, outcome)
        return outcome

    def _publish(self) -> None:
        """Wait for all ranks' files and publish the checkpoint. Raises if any rank has failed."""
        ranks = self.save.ranks
        told = self.messages.read([_note_of(rank) for rank in ranks], self.patience_s)
        everyones = dict(zip(ranks, map(json.loads, told), strict=True))
        if failed := {rank: text for rank, (text, _) in everyones.items() if text is not None}:
            raise CheckpointError(reasons(failed, len(ranks)))
        self.save.commit({rank: rows for rank, (_, rows) in everyones.items()})


def _note_of(rank: int) -> str:
    return f"rank {rank}"


class BackgroundSaves:
    """The asynchronous saves of one optimizer, one at a time."""

    def __init__(self) -> None:
        self.room = CopyRoom()
        self.writing: Writing | None = None

    def begin(self, save: CheckpointSave, patience_s: float) -> None:
        """Start writing the copy in the host buffer. `wait` must have been called before."""
        self.writing = Writing(save, patience_s)

    def has_failed(self) -> bool:
        """Return whether a save has failed, so that `wait` would raise."""
        return self.writing is not None and self.writing.failure is not None

    def wait(self) -> None:
        """Wait for the save in progress, if any. Raises CheckpointError if it has failed, once."""
        if self.writing is None:
            return
        self.writing.thread.join()
        ended, self.writing = self.writing, None
        if (failure := ended.told()) is not None:
            raise failure

    def close(self) -> None:
        """Wait for the save in progress, and free the host buffer."""
        try:
            self.wait()
        finally:
            self.room.release()


def background_of(optimizer: ZeroOptimizer) -> BackgroundSaves:
    """Return the optimizer's `BackgroundSaves`, created on first use."""
    if optimizer.beside is None:
        optimizer.beside = BackgroundSaves()
    assert isinstance(optimizer.beside, BackgroundSaves)
    return optimizer.beside


def wait_for_checkpoint(optimizer: ZeroOptimizer) -> None:
    """Wait until an asynchronous save is complete.

    Raises CheckpointError if it has failed, unless a step has raised it already. Not a collective call: a
    single rank may call this.
    """
    background_of(optimizer).wait()
