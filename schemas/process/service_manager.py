"""What this process and the service manager that has started it tell each other: sd_notify(3), and SIGHUP.

The watchdog is fed while the service loops make progress: a timer alone would go on while they hang. Must not
fail: a manager that does not listen changes nothing for callers. At SIGHUP the settings are read again: all
that need no restart are applied, or nothing where they cannot be used. In a terminal it says that this is
closed, and the program stops, as at SIGTERM. Must not load what reads settings: most daemons never do again.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from structlog.typing import FilteringBoundLogger

from schemas.error_roots import ConfigError, OperatorError, StateError
from schemas.process.resources import watchdog_s
from schemas.text import printable

if TYPE_CHECKING:
    from schemas.settings import Reloaded

_REPORT_S = 5.0
_FEEDS_PER_WATCHDOG = 4
_TELL_TIMEOUT_S = 1.0


class ServiceManager:
    """The manager that listens at ``address``, if any, and expects a sign of life every ``watchdog_s``."""

    def __init__(self, address: str | None, watchdog_s: float | None, log: FilteringBoundLogger) -> None:
        # An abstract address is written with an @, which stands for a zero byte.
        self._address = "\0" + address[1:] if address and address.startswith("@") else address
        self._watchdog_s = watchdog_s
        self._log = log
        self._stalled: Sequence[str] = ()

    @classmethod
    def of(cls, environment: Mapping[str, str], pid: int, log: FilteringBoundLogger) -> "ServiceManager":
        """Return the manager that ``environment`` names to the process ``pid``, if it names one."""
        watched = environment.get("WATCHDOG_PID") in {None, str(pid)}
        return cls(environment.get("NOTIFY_SOCKET"), watchdog_s(environment) if watched else None, log)

    def ready(self) -> None:
        """Tell that the program serves, also after ``reloading``."""
        self._tell("READY=1")

    def reloading(self) -> None:
        """Tell that the program reads its configuration again; ``ready`` must follow."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._tell("STOPPING=1\nSTATUS=stopping: waiting for the calls in flight")

    async def run(self, stalled: Callable[[], Sequence[str]], status: Callable[[], str]) -> None:
        """Report ``status``, one line, and feed the watchdog while no loop is stalled, until cancelled."""
        if not self._address:
            await asyncio.Event().wait()
        pause_s = min(_REPORT_S, (self._watchdog_s or _REPORT_S) / _FEEDS_PER_WATCHDOG)
        reported = None
        while True:
            if (line := status()) != reported:
                self._tell(f"STATUS={line}")
                reported = line
            self._feed(stalled())
            await asyncio.sleep(pause_s)

    def _feed(self, stalled: Sequence[str]) -> None:
        if stalled and stalled != self._stalled:
            self._log.error("service loops are stalled", loops=stalled)
        self._stalled = stalled
        if self._watchdog_s and not stalled:
            self._tell("WATCHDOG=1")

    def _tell(self, state: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            # It waits only while the manager's queue is full.
            manager.settimeout(_TELL_TIMEOUT_S)
            try:
                manager.sendto(state.encode(), self._address)
            except OSError as error:
                self._log.warning("service manager not reached", reason=printable(str(error)))


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
        """Reload at each SIGHUP until cancelled; where that signal stops the program, only wait."""
        asked, loop = asyncio.Event(), asyncio.get_running_loop()
        if ends_with_its_terminal():
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


def signals_that_stop() -> tuple[signal.Signals, ...]:
    """Return those that stop this program, SIGHUP among them where it says that the terminal is closed.

    Elsewhere SIGHUP is ignored from here on, until the program can reload: by default it would end it.
    """
    stop = (signal.SIGINT, signal.SIGTERM)
    if ends_with_its_terminal():
        return (*stop, signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return stop


def ends_with_its_terminal() -> bool:
    """Return whether SIGHUP says that the program's terminal is closed: not under nohup, nor as a service."""
    return signal.getsignal(signal.SIGHUP) != signal.SIG_IGN and any(map(os.isatty, range(3)))
