"""Calls a function in the event loop at a signal.

The loop's own method would do, but loads the standard library's ``inspect``, with the parser of Python: a
mebibyte of every node. Must not be used outside of the main thread.
"""

import asyncio
import os
import signal
from collections.abc import Callable


def call_at(number: signal.Signals, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call ``callback`` in ``loop`` at each signal ``number``, which is ignored once the loop is closed."""

    def received(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback)

    signal.signal(number, received)


def ends_with_its_terminal() -> bool:
    """Return whether SIGHUP says that the program's terminal is closed: not under nohup, nor as a service."""
    return signal.getsignal(signal.SIGHUP) != signal.SIG_IGN and any(map(os.isatty, range(3)))
