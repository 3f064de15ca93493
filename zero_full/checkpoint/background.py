"""Saves that are written while the training goes on.

[Note: beside the training] The caller waits for a copy of what this rank saves, in memory on the host that is
kept for the next save; a thread writes it. Ranks tell each other through the store
(`comm/store_messages.py`): each that its files are on the disk, then the first one that the checkpoint is
published, or why not. Who has heard of a failure says so in the next step, and all ranks raise it there.

The thread is no daemon, so that a script which ends waits for it; if the save fails then, the exit code says
so. If the script ends with an error there is no waiting: the save ends unfinished, as in a crash, and the
others are told.
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
from zero_full.comm.store_messages import Notes
from zero_full.errors import CheckpointError
from zero_full.shard.step.optimizer import ZeroOptimizer

log = logging.getLogger("zero_full")
OUTCOME = "the outcome"
FAREWELL_S = 10.0  # how long a rank stays for others that have not heard the outcome


class CopyRoom:
    """Memory on the host for a copy of what this rank saves, kept from save to save."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.unlock: Callable[[], object] = lambda: None

    def copy(self, payload: Payload) -> Payload:
        """The same with values of its own, until the next copy."""
        # Wide numbers first, as in the file: so every tensor begins at a multiple of its numbers' size.
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
        self.release()  # the old room goes before there is a new one
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if "cuda" in devices:
            self._lock()

    def _lock(self) -> None:
        """Let CUDA copy into it at full speed.

        torch's own page-locked memory has a power of two of bytes, which may be twice as much, and is not
        given back to the system.
        """
        cuda, address, nbytes = torch.cuda.cudart(), self.memory.data_ptr(), self.memory.nbytes
        if int(cuda.cudaHostRegister(address, nbytes, 0)):
            self.release()
            raise CheckpointError(
                f"CUDA cannot lock {nbytes} bytes of the host's memory for a copy: save without asynchronous"
            )
        self.unlock = weakref.finalize(self, cuda.cudaHostUnregister, address)

    def release(self) -> None:
        """Let go of the memory."""
        self.unlock()  # it does so once
        self.memory = self.memory[:0].clone()


class Writing:
    """One save on its way to the disk. See [Note: beside the training]."""

    def __init__(self, save: CheckpointSave, patience_s: float) -> None:
        self.save, self.patience_s = save, patience_s
        self.notes = Notes(f"save/{save.nonce}", save.ranks, self._look)
        self.failure: CheckpointError | None = None
        self.error_before = getattr(sys, "last_value", None)  # an interactive session may have had one
        self.made_in = os.getpid()
        self.thread = threading.Thread(target=self._run, name="zero_full-save")
        self.thread.start()

    def _look(self) -> None:
        """Raise if the script has ended with an error."""
        error = getattr(sys, "last_value", None)
        if not threading.main_thread().is_alive() and error is not self.error_before:
            raise CheckpointError(f"the script has ended with an error: {said(error)}")

    def _run(self) -> None:
        try:
            failed = self._write_and_publish()
        except Exception as error:  # the store is gone, or the rank that publishes
            failed = said(error)
        if failed:
            self.failure = CheckpointError(f"{self.save.folder} was written beside the training: {failed}")
            atexit.register(self._exit_as_failed)
        mine = [_note_of(self.save.payload.rank)]
        keys = [*mine, OUTCOME] if self.save.is_first else mine
        self.notes.part(keys, min(FAREWELL_S, self.patience_s))

    def told(self) -> CheckpointError | None:
        """What has failed, for who raises it."""
        atexit.unregister(self._exit_as_failed)
        return self.failure

    def _exit_as_failed(self) -> None:
        """Nothing of the script is left to raise it: exit code 1, after all else that is done at its end."""
        if os.getpid() != self.made_in:  # a fork, which has not failed
            return
        atexit.unregister(self._exit_as_failed)
        log.error("%s", self.failure)
        run_exit_functions()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)

    def _write_and_publish(self) -> str:
        """Why the save has failed on any rank; nothing, when it is published."""
        rows, failed = dict[str, Any](), None
        try:
            rows.update(self.save.write(self._look))
        except Exception as error:
            failed = said(error)
        self.notes.leave(_note_of(self.save.payload.rank), json.dumps([failed, rows]))
        if not self.save.is_first:
            return self.notes.read([OUTCOME], 2 * self.patience_s)[0]
        outcome = ""
        try:
            self._publish()
        except Exception as error:
            outcome = said(error)
            self.save.discard()
        self.notes.leave(OUTCOME, outcome)
        return outcome

    def _publish(self) -> None:
        """Wait for all ranks' files, and make a checkpoint of them; raise if any rank has failed."""
        ranks = self.save.ranks
        told = self.notes.read([_note_of(rank) for rank in ranks], self.patience_s)
        everyones = dict(zip(ranks, map(json.loads, told), strict=True))
        if failed := {rank: text for rank, (text, _) in everyones.items() if text is not None}:
            raise CheckpointError(reasons(failed, len(ranks)))
        self.save.commit({rank: rows for rank, (_, rows) in everyones.items()})


def _note_of(rank: int) -> str:
    return f"rank {rank}"


class BackgroundSaves:
    """The saves of one optimizer that are written beside its training, one at a time."""

    def __init__(self) -> None:
        self.room = CopyRoom()
        self.writing: Writing | None = None

    def begin(self, save: CheckpointSave, patience_s: float) -> None:
        """Write what is in the room. `wait` must have been called."""
        self.writing = Writing(save, patience_s)

    def has_failed(self) -> bool:
        """Whether a save has failed, and `wait` would say so at once."""
        return self.writing is not None and self.writing.failure is not None

    def wait(self) -> None:
        """Until nothing is being written. CheckpointError if that has failed; it is raised once."""
        if self.writing is None:
            return
        self.writing.thread.join()
        ended, self.writing = self.writing, None
        if (failure := ended.told()) is not None:
            raise failure

    def close(self) -> None:
        """Wait, and let go of the memory."""
        try:
            self.wait()
        finally:
            self.room.release()


def background_of(optimizer: ZeroOptimizer) -> BackgroundSaves:
    """The optimizer's own."""
    if optimizer.beside is None:
        optimizer.beside = BackgroundSaves()
    assert isinstance(optimizer.beside, BackgroundSaves)
    return optimizer.beside


def wait_for_checkpoint(optimizer: ZeroOptimizer) -> None:
    """Wait until a checkpoint that is being written beside the training is complete.

    CheckpointError if that has failed, unless a step has raised it already. Any rank may call this alone.
    """
    background_of(optimizer).wait()
