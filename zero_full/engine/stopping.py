"""How an engine's run ends when it is told to: by a signal, after a step, saved."""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from zero_full.checkpoint.background import wait_for_checkpoint
from zero_full.checkpoint.failure import Attempt
from zero_full.checkpoint.folder import check_tag
from zero_full.comm.topology import this_rank
from zero_full.errors import CheckpointError
from zero_full.shard.step.optimizer import ZeroOptimizer
from zero_full.shard.step.stop_signals import SIGNALS

log = logging.getLogger("zero_full")
ClientState = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class Stopping:
    """The part of an engine that listens to signals."""

    optimizer: ZeroOptimizer
    save_checkpoint: Callable[..., bool]
    _stepping: bool
    _save_at_stop: Callable[[], Any] | None

    def on_signal(
        self,
        save_dir: str | Path,
        signals: Iterable[int] = SIGNALS,
        tag: str | None = None,
        client_state: ClientState | None = None,
    ) -> None:
        """Finish the step, save and exit with 0, on all ranks, if any rank gets one of these signals.

        Every rank must call this, in the main thread of its process: right after `load_checkpoint` is best,
        because earlier signals do what they always do.

        save_dir      `save_checkpoint`'s, as `tag` is
        signals       SIGTERM and SIGUSR1, unless you say others
        client_state  a mapping, read when the run is saved, or a function that returns one then

        What happens: `engine.step` finishes the step in which the ranks hear of the signal, waits until the
        checkpoint is there and raises SystemExit(0). A step that is skipped because of an overflow counts. A
        further signal has no effect. Whoever has to be quicker sends SIGKILL: the last complete checkpoint
        stays. After the last step nobody listens, and the script goes on to its end.

        The handlers of these signals that were there before are not called until `destroy` gives them back.
        Loops that own their end, or do not call `engine.step`: `optimizer.watch_signals()`.
        """
        if tag is not None:
            check_tag(tag)
        if not (client_state is None or callable(client_state) or isinstance(client_state, Mapping)):
            raise TypeError(
                f"client_state is a dict or a function that returns one, and not {client_state!r}"
            )

        def save() -> None:
            attempt, told = Attempt(self.optimizer, "on_signal"), dict[str, Any]()
            attempt(lambda: told.update(client_state() if callable(client_state) else client_state or {}))
            attempt.agree()
            try:
                wait_for_checkpoint(self.optimizer)
            except CheckpointError as error:  # of an earlier save: this one is the more needed
                log.error("%s", error)
            self.save_checkpoint(save_dir, tag, told)
            if this_rank() == 0:
                log.warning("a signal has asked this run to stop: it is saved in %s, and ends", save_dir)

        self.optimizer.signals.watch(signals, f"to save in {save_dir}" + (f" as {tag}" if tag else ""))
        if self._save_at_stop is None:
            self.optimizer.register_step_pre_hook(self._refuse_plain_step)
        self._save_at_stop = save

    @property
    def stop_requested(self) -> bool:
        """Whether a signal that is watched has come to any rank: the same on all, and found out in a step."""
        return self.optimizer.stop_requested

    def _refuse_plain_step(self, *step: Any) -> None:
        if not self._stepping:
            raise RuntimeError(
                "optimizer.step() after on_signal, which saves and exits in engine.step(): call that, or "
                "optimizer.watch_signals() instead of on_signal, and look at optimizer.stop_requested after "
                "each step"
            )

    def _stop_if_asked(self) -> None:
        """After a step."""
        if self._save_at_stop is not None and self.stop_requested:
            if (came := self.optimizer.signals.came) is not None:
                log.info("%s has come to rank %d", came.name, this_rank())
            self._save_at_stop()
            sys.exit(0)
