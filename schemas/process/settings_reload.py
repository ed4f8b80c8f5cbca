"""Reads the settings of a running program again at SIGHUP, and applies those that need no restart.

In a terminal SIGHUP says that this is closed: the program stops, as at SIGTERM.

All that can be applied, or nothing when the settings cannot be used. Must not load what reads settings: a
program does that when it is asked to, and most daemons never are.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from structlog.typing import FilteringBoundLogger

from schemas.error_roots import ConfigError, OperatorError, StateError
from schemas.process.service_manager import ServiceManager
from schemas.text import printable

if TYPE_CHECKING:
    from schemas.settings import Reloaded


@dataclass(frozen=True, slots=True)
class ReadAgain:
    """Settings that were read again and can be used, and what applies them in the event loop."""

    reloaded: "Reloaded"
    apply: Callable[[], None]


class SettingsReload:
    """Applies what ``read`` returns; it is called in a thread, and may raise what a program's loader does."""

    def __init__(
        self, read: Callable[[], ReadAgain], manager: ServiceManager, log: FilteringBoundLogger
    ) -> None:
        self._read = read
        self._manager = manager
        self._log = log

    async def run(self) -> None:
        """Reload at each SIGHUP until cancelled."""
        asked, loop = asyncio.Event(), asyncio.get_running_loop()
        if ends_with_its_terminal():
            call_at(signal.SIGHUP, loop, partial(signal.raise_signal, signal.SIGTERM))
            await asked.wait()
        # Until the loop is closed: without a handler the signal would end a program that is draining.
        call_at(signal.SIGHUP, loop, asked.set)
        while True:
            await asked.wait()
            asked.clear()
            self._manager.reloading()
            await self.reload()
            self._manager.ready()

    async def reload(self) -> None:
        """Read the settings and apply them; the log names each that has changed, or what is wrong."""
        try:
            again = await asyncio.to_thread(self._read)
        except (OperatorError, StateError, OSError) as error:
            problems = error.problems if isinstance(error, ConfigError) else (str(error),)
            self._log.error("settings not reloaded", problems=[printable(each) for each in problems])
            return
        again.apply()
        applied, need_restart = again.reloaded.applied, again.reloaded.need_restart
        for name, text in applied.items():
            self._log.info("setting reloaded", setting=name, value=printable(text))
        for name in need_restart:
            self._log.warning("setting needs a restart", setting=name)
        self._log.info("settings read again", changed=len(applied) + len(need_restart))


def call_at(number: signal.Signals, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call ``callback`` in ``loop`` at each signal ``number``, which is ignored once the loop is closed."""

    def received(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(callback)

    signal.signal(number, received)


def ends_with_its_terminal() -> bool:
    """Return whether SIGHUP says that the program's terminal is closed: not under nohup, nor as a service."""
    return signal.getsignal(signal.SIGHUP) != signal.SIG_IGN and any(map(os.isatty, range(3)))
