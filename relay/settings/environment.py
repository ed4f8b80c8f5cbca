"""What every part of one relay gets: configuration, contract, clocks, randomness, log and metrics.

There are three clocks, and a type for the milliseconds of each. ``SystemClock`` is the system's, for records
(audit, logs, ledgers, certificates), which agree with those of every other program on the machine;
``RelayClock`` is for validity checks, and each session has one of its own. The system's clock can be set
while the relay runs: by an operator, by NTP at boot, by a hypervisor. Ticks, which only go forward, show by
how much. Must not contain state of a part.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.spans import SpanSink, no_spans
from schemas.times import RelayMs, SystemClock, SystemMs, is_credible

if TYPE_CHECKING:
    # For the clock alone the commands would load the libraries of log and metrics.
    from structlog.typing import FilteringBoundLogger

    from relay.observability.metrics import Metrics
    from relay.settings.config import RelayConfig
    from schemas.kinds import KindRegistry
    from schemas.lines import LineWriter
    from schemas.registry import SchemaRegistry
    from schemas.ulids import UlidSource

TOLERANCE_MS = 255_000
"""4 min, and the rest of an earlier step. A manifest may be 5 min ahead: the node has 45 s of that."""
_CATCH_UP = 1 / 8
_OFTEN_MS = 8
"""Readings that are further apart make up a whole millisecond."""


def now_ms() -> SystemMs:
    """Return the system's time in milliseconds since the epoch."""
    return SystemMs(time.time_ns() // 1_000_000)


def ticks_ms() -> int:
    """Return milliseconds since boot, which cannot be set; they go on while the machine is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class RelayClock:
    """Follows the system's clock, but not its steps.

    A step within the tolerance is made up over half an hour at most, so that nothing expires or begins at
    once. A larger one is followed at once: a token that has expired by the system's clock must not be
    accepted for hours. The clock is then not trusted until the step is undone, or a node's manifest
    agrees with it. Nor is one trusted that has not been set since the machine started, and reads 1970, say.
    """

    def __init__(self, now_ms: SystemClock, ticks_ms: Callable[[], int], log: "FilteringBoundLogger") -> None:
        self._now_ms = now_ms
        self._ticks_ms = ticks_ms
        self._log = log
        self._ticks = ticks_ms()
        self._offset: float = now_ms() - self._ticks
        self._before: float | None = None
        if not is_credible(now_ms()):
            log.error("the system's clock is not set: until it is, manifests and tokens are refused")

    def __call__(self) -> RelayMs:
        """Return the time in milliseconds since the epoch."""
        ticks = self._ticks_ms()
        passed, self._ticks = ticks - self._ticks, ticks
        offset = self._now_ms() - ticks
        if -1 < offset - self._offset < 1 and passed < _OFTEN_MS and self._before is None:
            # No step, but the rest of whole numbers. Under load it is read thousands of times a second.
            return RelayMs(int(ticks + self._offset))
        return RelayMs(self._followed(ticks, offset, max(0, passed)))

    def _followed(self, ticks: int, offset: int, passed: int) -> int:
        """Return the time at ``ticks``, ``passed`` after the last reading: the offset has changed."""
        if self._before is not None:
            if abs(offset - self._before) > TOLERANCE_MS:
                self._offset = offset
                return ticks + offset
            self._offset, self._before = self._before, None
            self._log.info("the system's clock is back where it was before it was set")
        gap = offset - self._offset
        if abs(gap) > TOLERANCE_MS and not is_credible(int(ticks + self._offset)):
            self._offset = offset
            self._log.info("the system's clock is set")
        elif abs(gap) > TOLERANCE_MS:
            self._before, self._offset = self._offset, offset
            self._log.error(
                "the system's clock was set by minutes: until it is right, manifests and tokens are refused",
                by_ms=round(gap),
            )
        else:
            most = passed * _CATCH_UP
            self._offset += max(-most, min(most, gap))
        return int(ticks + self._offset)

    def is_trusted(self) -> bool:
        """Return whether the clock is set, and no step beyond the tolerance is left unconfirmed."""
        return is_credible(self()) and self._before is None

    def compare(self, issued_at_ms: int) -> None:
        """Compare the clock with the time at which a connected node signed what it now announces."""
        if not self.is_trusted() and abs(self() - issued_at_ms) <= TOLERANCE_MS:
            self._before = None
            self._log.info("the system's clock is right as it was set: a node's agrees with it")


@dataclass(frozen=True, slots=True)
class RelayEnvironment:
    """What the parts of one relay have in common.

    Attributes:
        lines: where the log goes, and the access log beside it.
        now_ms: the system's time in milliseconds since the epoch, for records.
        clock: the time for decisions, which follows the system's without its steps.
        ticks_ms: milliseconds since boot.
        monotonic: seconds of a clock that never goes back.
        random_bytes: returns the given number of random bytes.
        spans: takes the span of each call that is traced.
    """

    config: "RelayConfig"
    registry: "SchemaRegistry"
    kinds: "KindRegistry"
    ulids: "UlidSource"
    metrics: "Metrics"
    log: "FilteringBoundLogger"
    lines: "LineWriter"
    now_ms: SystemClock
    clock: RelayClock
    ticks_ms: Callable[[], int]
    monotonic: Callable[[], float]
    random_bytes: Callable[[int], bytes]
    spans: SpanSink = no_spans
