"""Health of a long-running program: whether its loops make progress, and what each subsystem can do now.

Both programs report by it: ``/healthz`` and the watchdog ask whether the loops are live, ``/readyz`` whether
calls flow. Must not know any subsystem, nor act on what it finds.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, NotRequired, TypedDict


class Loop:
    """The progress of one loop of the process. ``monotonic`` is in seconds.

    A loop is busy, for as long as it says at most, or it waits for something from outside, however long that
    takes. It is written by the loop, and may be read by other threads.

    Attributes:
        started: whether it has begun its first round.
    """

    __slots__ = ("_due_s", "_monotonic", "started")

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._due_s: float | None = None
        self.started = False

    def busy(self, within_s: float) -> None:
        """Report that the loop goes on, and will report again within ``within_s`` seconds."""
        self.started = True
        self._due_s = self._monotonic() + within_s

    def waits(self) -> None:
        """Report that the loop waits for something from outside, or has ended as it should."""
        self.started = True
        self._due_s = None

    @property
    def is_live(self) -> bool:
        """Whether the loop has reported as it said; also before its first round."""
        due_s = self._due_s
        return due_s is None or self._monotonic() <= due_s


def stalled(loops: Mapping[str, Loop]) -> list[str]:
    """Return the names of the loops that are not live: the process should be restarted."""
    return [name for name, loop in loops.items() if not loop.is_live]


async def endless(name: str, work: Awaitable[object]) -> NoReturn:
    """Await the service loop ``work``, which may not end.

    Raises:
        RuntimeError: it has ended, without an error of its own.
    """
    await work
    raise RuntimeError(f"the service loop {name!r} has ended")


class HealthDocument(TypedDict):
    """The health of one subsystem, as ``/readyz`` and the status show it."""

    started: bool
    live: bool
    ready: bool
    state: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Health:
    """The health of one subsystem.

    Attributes:
        started: whether it has begun its work.
        live: whether its loops make progress.
        ready: whether it can do its part of a call now.
        state: what it does now, in a text of ours; empty where the three say all.
        essential: whether the program is ready only if this is: most of what it is for needs it.
    """

    started: bool
    live: bool
    ready: bool
    state: str = ""
    essential: bool = True

    @classmethod
    def of(cls, loop: Loop, *, ready: bool, state: str = "", essential: bool = True) -> "Health":
        return cls(loop.started, loop.is_live, ready, state, essential)

    @classmethod
    def passive(cls, *, ready: bool, state: str = "") -> "Health":
        """Return the health of a subsystem that works only when it is called."""
        return cls(started=True, live=True, ready=ready, state=state)

    @property
    def lets_calls_flow(self) -> bool:
        """Whether the program is ready as far as this subsystem goes."""
        return self.live and (self.ready or not self.essential)

    def to_json(self) -> HealthDocument:
        """Return it as ``/readyz`` shows it."""
        shown: HealthDocument = {"started": self.started, "live": self.live, "ready": self.ready}
        return {**shown, "state": self.state} if self.state else shown
