"""What this process tells the service manager that has started it: sd_notify(3).

The watchdog is fed while the service loops make progress: a timer alone would go on while they hang. Must not
fail: a manager that does not listen changes nothing for callers.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from structlog.typing import FilteringBoundLogger

from schemas.text import printable

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
        period_us = environment.get("WATCHDOG_USEC", "")
        watchdog_s = int(period_us) / 1e6 if watched and period_us.isdecimal() and int(period_us) else None
        return cls(environment.get("NOTIFY_SOCKET"), watchdog_s, log)

    def ready(self) -> None:
        """Tell that the program serves, also after ``reloading``."""
        self._tell("READY=1")

    def reloading(self) -> None:
        """Tell that the program reads its configuration again; ``ready`` must follow."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Tell that the program ends."""
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
