"""What a forked child inherits of its parent's runs and must leave alone: process groups, threads, files.

A child (a loader's worker, `multiprocessing` with "fork") has copies of all objects and shares sockets and
memory with its parent, but has none of its threads. Whatever ends a run there, by `destroy`, by collecting
garbage or at exit, would end the parent's.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any


def only_here(act: Callable[..., Any]) -> Callable[..., None]:
    """`act`, which does nothing in a process that was forked from this one."""
    made_in = os.getpid()

    def act_here(*given: Any) -> None:
        if os.getpid() == made_in:
            act(*given)

    return act_here


def keep_for_good(thing: object) -> None:
    """Never run the destructor of `thing` in this process: it would wait for threads that are not here."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
