"""One subscriber of a stream: its cadence, what it wants of a sample, and its lease.

Must not know the stream, nor how samples reach the agent.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from relay.auth.agent_tokens import Principal
from relay.streams.telemetry.cadence import Cadence
from relay.streams.telemetry.history import Sample
from schemas.errors import ToolError

MIN_LEASE_S = 30.0
_INTERVALS = 3


def lease_s(interval_s: float) -> float:
    """Return how long a lease lasts: three intervals, and at least 30 s."""
    return max(_INTERVALS * interval_s, MIN_LEASE_S)


@dataclass(slots=True, eq=False)
class Subscription:
    """One subscriber.

    Attributes:
        include: the parts of a sample that it wants; None for all.
        on_sample: is called with each sample at its cadence. Must not block.
        on_end: is called once when the relay ends it, with the reason.
        expires_s: when its lease ends, on the hub's monotonic clock.
        cadence: which samples it takes.
        seen: the number of the newest sample that its agent has read.
    """

    principal: Principal
    interval_ms: int
    include: frozenset[str] | None
    on_sample: Callable[[Sample], None]
    on_end: Callable[[ToolError], None]
    seen: int
    expires_s: float = field(default=0.0)
    cadence: Cadence = field(default_factory=Cadence)

    @property
    def interval_s(self) -> float:
        """The interval in seconds."""
        return self.interval_ms / 1000

    def begin(self, now_s: float) -> None:
        """Begin, with a sample that was just taken."""
        self.renew(now_s)
        self.cadence.due_s = now_s + self.interval_s

    def renew(self, now_s: float) -> None:
        """Begin another lease."""
        self.expires_s = now_s + lease_s(self.interval_s)

    def takes(self, now_s: float, stream_interval_s: float) -> bool:
        """Return whether the sample that has arrived is the one that is due, and count it.

        Within half of the stream's interval: samples arrive earlier or later than they are taken.
        """
        return self.cadence.takes(now_s, self.interval_s, stream_interval_s / 2)
