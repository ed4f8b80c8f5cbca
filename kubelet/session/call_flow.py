"""Whether calls flow over the session: a command was answered, and heartbeats are acknowledged.

A relay of protocol 1.1 sends an echo after each welcome, so that a node need not wait for an agent to find
out. An open connection alone proves nothing: a relay that has stalled behind it still answers pings. Must not
connect or send.
"""

from collections.abc import Callable

_FRESH_HEARTBEATS = 2.5
"""An acknowledgement is fresh for so many intervals: one may be lost, each with its jitter of a tenth."""


class CallFlow:
    """What the link has seen of calls. ``interval_s`` is that of the heartbeats; ``monotonic`` is in seconds.

    Attributes:
        relay_saw: the ETag that the relay received last by the broker, as its last acknowledgement names it;
            None if it named none.
        sessions: how many welcomes there were.
        acknowledgements: how many heartbeats of this session were acknowledged.
        gets_echo: whether the relay sends an echo after its welcome, and names what it saw.
    """

    def __init__(self, interval_s: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._connected = False
        self._is_answered = False
        self._acknowledged_s = 0.0
        self.sessions = 0
        self.acknowledgements = 0
        self.relay_saw: str | None = None
        self.gets_echo = False

    @property
    def acknowledged_s_ago(self) -> float | None:
        """Seconds since the last acknowledgement, or the welcome; None without a session."""
        return self._monotonic() - self._acknowledged_s if self._connected else None

    def connected(self, *, gets_echo: bool) -> None:
        """Begin with a welcome; ``gets_echo``: the relay sends an echo after it."""
        self._connected = True
        self.sessions += 1
        self.acknowledgements = 0
        self.gets_echo = gets_echo
        # Of a relay that sends no echo, the acknowledgements alone have to do.
        self._is_answered = not gets_echo
        self._acknowledged_s = self._monotonic()
        self.relay_saw = None

    def lost(self) -> None:
        """Note that the connection is lost."""
        self._connected = False

    def answered(self) -> None:
        """Note that a result was sent in answer to a command."""
        self._is_answered = True

    def acknowledged(self, broker_etag: str | None) -> None:
        """Note that a heartbeat was acknowledged."""
        self._acknowledged_s = self._monotonic()
        self.acknowledgements += 1
        self.relay_saw = broker_etag

    @property
    def is_answered(self) -> bool:
        """Whether a command of this connection was answered, or none need be."""
        return self._connected and self._is_answered

    @property
    def is_fresh(self) -> bool:
        """Whether heartbeats of this connection are acknowledged."""
        age_s = self._monotonic() - self._acknowledged_s
        return self._connected and age_s <= _FRESH_HEARTBEATS * self._interval_s()

    @property
    def state(self) -> str:
        """What an operator sees of it."""
        if not self._connected:
            return "no session"
        if not self.is_fresh:
            return "the relay acknowledges no heartbeats"
        return "calls flow" if self._is_answered else "no command answered yet"
