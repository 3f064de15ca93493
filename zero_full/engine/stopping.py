"""Save and exit after a signal: the part of an engine that `on_signal` adds."""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from zero_full.checkpoint.async_save import wait_for_checkpoint
from zero_full.checkpoint.failure import Attempt
from zero_full.checkpoint.folder import check_tag
from zero_full.comm.topology import this_rank
from zero_full.errors import CheckpointError
from zero_full.shard.step.optimizer import ZeroOptimizer

log = logging.getLogger("zero_full")
ClientState = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
Save = Callable[[str | Path, str | None, Mapping[str, Any]], bool]  # directory, tag, client state


class Stopping:
    """Saves the run and exits with 0 after the step in which the ranks agree that a signal has come.

    optimizer                    agrees on the signals in its steps
    save                         the engine's `save_checkpoint`
    save_dir, tag, client_state  its arguments; a client_state that is a function is called at the save
    """

    def __init__(
        self,
        optimizer: ZeroOptimizer,
        save: Save,
        save_dir: str | Path,
        tag: str | None,
        client_state: ClientState | None,
    ) -> None:
        if tag is not None:
            check_tag(tag)
        if not (client_state is None or callable(client_state) or isinstance(client_state, Mapping)):
            raise TypeError(f"client_state must be a dict or a function returning one, not {client_state!r}")
        self.optimizer, self.save = optimizer, save
        self.save_dir, self.tag, self.client_state = save_dir, tag, client_state

    def watch(self, signals: Iterable[int]) -> None:
        """Replace the handlers of these signals by one that notes the signal."""
        purpose = f"to save in {self.save_dir}" + (f" as {self.tag}" if self.tag else "")
        self.optimizer.signals.watch(signals, purpose)

    def stop_if_requested(self) -> None:
        """Save and exit, if a signal has come to any rank. Every rank must call this, after a step."""
        if not self.optimizer.stop_requested:
            return
        if (came := self.optimizer.signals.came) is not None:
            log.info("rank %d received %s", this_rank(), came.name)
        self._save()
        sys.exit(0)

    def _save(self) -> None:
        attempt, saved = Attempt(self.optimizer, "on_signal"), dict[str, Any]()
        state = self.client_state
        attempt(lambda: saved.update(state() if callable(state) else state or {}))
        attempt.agree()
        try:
            wait_for_checkpoint(self.optimizer)
        except CheckpointError as error:  # an earlier save failed, so this one is needed even more
            log.error("%s", error)
        self.save(self.save_dir, self.tag, saved)
        if this_rank() == 0:
            log.warning("stopping after a signal: the run is saved in %s", self.save_dir)
