"""What was observed in one run: the records that the checker judges. Times are milliseconds since 1970.

Must not judge.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

AGENT_LINK = "agent-relay"
RELAY = "relay"


@dataclass(frozen=True, slots=True)
class Answer:
    """A JSON-RPC answer as the caller got it: what it says of itself, and ``ok`` or the code of its error."""

    request_id: object
    code: str
    message: object = None
    node_id: object = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call in the caller's log.

    Attributes:
        trace_id: its own; also the message that it sends, and the id of its request.
        ended_ms: None if it had no end before its caller gave up.
        answers: none, if its connection broke.
    """

    trace_id: str
    node_id: str
    began_ms: int
    ended_ms: int | None
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """A call that the relay's audit allows or denies."""

    correlation_id: str
    at_ms: int
    allowed: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a call in the relay's audit."""

    correlation_id: str
    at_ms: int
    duration_ms: float


@dataclass(frozen=True, slots=True)
class Run:
    """A command that a node has run, from its log."""

    trace_id: str
    correlation_id: str
    node_id: str


@dataclass(frozen=True, slots=True)
class Disturbance:
    """When a link or a process was not as it should be."""

    what: str
    began_ms: int
    ended_ms: int


@dataclass(frozen=True, slots=True)
class Lag:
    """How much later than it should a loop went on at some time."""

    at_ms: int
    lag_ms: float


@dataclass(frozen=True, slots=True)
class Healing:
    """When the last fault of a round was over, and when a part was right again.

    Attributes:
        part: the id of a node, or the relay.
        healed_ms: None if it was not.
    """

    part: str
    began_ms: int
    healed_ms: int | None


@dataclass(frozen=True, slots=True)
class History:
    """All of it."""

    calls: Sequence[Call] = field(default=())
    decisions: Sequence[Decision] = field(default=())
    outcomes: Sequence[Outcome] = field(default=())
    runs: Sequence[Run] = field(default=())
    disturbances: Sequence[Disturbance] = field(default=())
    lags: Sequence[Lag] = field(default=())
    healings: Sequence[Healing] = field(default=())


def summary(history: History) -> str:
    """Return in one line how many calls there were, how they ended, and how much the journals hold."""
    codes = Counter(answer.code for call in history.calls for answer in call.answers)
    codes["unknown"] = sum(not call.answers for call in history.calls)
    ends = ", ".join(f"{count} {code}" for code, count in codes.most_common())
    audited = f"{len(history.decisions)} decisions and {len(history.outcomes)} outcomes in the audit"
    return f"{len(history.calls)} calls ({ends}), {len(history.runs)} runs at nodes, {audited}"
