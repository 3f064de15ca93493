"""Host staging on the CPU: ranks exchange as if they shared an accelerator."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from zero_full.comm import communicator
from zero_full.comm.host_staging import HostStaging


@contextmanager
def staged_transports(staging: int = 1024) -> Iterator[None]:
    """Communicators that are opened in this block stage their collectives, in pieces of few bytes."""
    choose = communicator.choose_transport

    def staged(*given: Any) -> Any:
        return HostStaging(choose(*given), staging)  # type: ignore[arg-type]

    with mock.patch.object(communicator, "choose_transport", staged):
        yield
