"""Fork safety: a forked child must not free the process groups, threads and files of its parent.

A child (a worker of a DataLoader, `multiprocessing` with "fork") has copies of all objects and shares sockets
and memory with its parent, but has none of its threads. If the child ended a run, by `destroy`, by garbage
collection or at exit, it would end the parent's run.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any


def in_this_process_only(act: Callable[..., Any]) -> Callable[..., None]:
    """Wrap `act` so that it does nothing in a process that was forked from this one."""
    made_in = os.getpid()

    def act_here(*given: Any) -> None:
        if os.getpid() == made_in:
            act(*given)

    return act_here


def leak(thing: object) -> None:
    """Leak `thing` in this process: its destructor would wait for threads that only the parent has."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
