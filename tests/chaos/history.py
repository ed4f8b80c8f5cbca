"""What was observed in one run: the records that the checker judges. Times are milliseconds since 1970.

Must not judge.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

AGENT_LINK = "agent-relay"
NODE_LINK = "node-relay"
"""Agent runtimes use it too: it leads to the public URL."""
RELAY = "relay"
DEADLINE_MS = 5000
"""RFC-0005 section 7, as the caller sees it."""
RELAY_WAITS_S = 3.0
"""How long the relay is told to wait for a caller."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A JSON-RPC answer as the caller got it: what it says of itself, and ``ok`` or the code of its error.

    ``run`` is the id that a run returns of a tool that is not idempotent.
    """

    request_id: object
    code: str
    message: object = None
    node_id: object = None
    run: object = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call in the caller's log.

    Attributes:
        trace_id: its own; also the id of its request, and the message that it sends without a key.
        answers: none, if its connection broke or its caller gave up.
        link: the one that it uses.
        deadline_ms: that of the relay, or of the caller itself.
        is_given_up: whether the caller did not wait any longer.
        relay: the one that it is made by way of.
        key: its idempotency key, which other calls may have too; then also the message that it sends.
    """

    trace_id: str
    node_id: str
    began_ms: int
    ended_ms: int
    answers: tuple[Answer, ...]
    link: str = AGENT_LINK
    deadline_ms: int = DEADLINE_MS
    is_given_up: bool = False
    relay: str = RELAY
    key: str | None = None

    @property
    def is_remote(self) -> bool:
        """Whether it is a call by remote tools, whose deadline is its own."""
        return self.link == NODE_LINK


@dataclass(frozen=True, slots=True)
class Recorded:
    """A record in the audit of an agent runtime: ``started``, ``ended`` or ``refused``."""

    trace_id: str
    event: str


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample as a follower got it.

    Attributes:
        progress: its number, in which what was lost counts too.
        lost: how many were lost before it, as the relay says.
    """

    at_ms: int
    ts_ms: int
    node_id: str
    progress: int
    lost: int = 0


@dataclass(slots=True)
class Following:
    """A call that follows a node's telemetry.

    Attributes:
        link: the one that it uses.
        relay: the one that it is made by way of.
        ended_ms: None if it was open when the run ended.
        is_silent: whether it was neither continued nor ended.
        ends: the codes of its answers; none if its connection broke.
    """

    node_id: str
    began_ms: int
    link: str = AGENT_LINK
    relay: str = RELAY
    ended_ms: int | None = None
    is_silent: bool = False
    samples: list[Sample] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a node's local agent was answered: a code; if that is ``ok``, also what the caller had written."""

    code: str
    token: object = None
    caller: object = None
    request_id: object = None


@dataclass(slots=True)
class Request:
    """A request of a node's local agent for the tool that a caller lends.

    Attributes:
        token: its own, which the caller returns.
        part: the process of the node.
        replies: none, if the connection to the node broke or the agent gave up.
        is_given_up: whether the agent did not wait any longer.
    """

    token: str
    caller: str
    node_id: str
    part: str
    began_ms: int
    ended_ms: int = 0
    replies: list[Reply] = field(default_factory=list)
    is_given_up: bool = False


@dataclass(slots=True)
class Served:
    """A request as a caller got it; ``accepted`` counts the answers to it that the relay has accepted."""

    request_id: str
    token: str
    caller: str
    node_id: str
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """A call that the audit of ``relay`` allows or denies.

    ``is_prompt``: it is to end by echo's deadline; it neither follows nor waits for events.
    """

    correlation_id: str
    at_ms: int
    allowed: bool
    is_prompt: bool = True
    relay: str = RELAY


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a call in the relay's audit."""

    correlation_id: str
    at_ms: int
    duration_ms: float
    is_prompt: bool = True


@dataclass(frozen=True, slots=True)
class Run:
    """A command that a node has run, from its log."""

    trace_id: str
    correlation_id: str
    node_id: str


@dataclass(frozen=True, slots=True)
class Fault:
    """An exception that a program or library of ours did not expect, as it was logged."""

    part: str
    text: str


@dataclass(frozen=True, slots=True)
class Disturbance:
    """When a link or a process was not as it should be. ``kind`` is that of the fault, if it was one."""

    what: str
    began_ms: int
    ended_ms: int
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Lag:
    """How much later than it should a loop went on at some time."""

    at_ms: int
    lag_ms: float


@dataclass(frozen=True, slots=True)
class Healing:
    """When the last fault of a round was over, and when a part was right again.

    Attributes:
        part: the id of a node, the relay, or what an agent does with either.
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
    recorded: Sequence[Recorded] = field(default=())
    followings: Sequence[Following] = field(default=())
    requests: Sequence[Request] = field(default=())
    served: Sequence[Served] = field(default=())
    faults: Sequence[Fault] = field(default=())


def summary(history: History) -> str:
    """Return in one line how many calls there were, how they ended, and how much the journals hold."""
    plain = [call for call in history.calls if not call.is_remote and call.key is None]
    keyed = [call for call in history.calls if call.key is not None]
    remote = [call for call in history.calls if call.is_remote]
    samples = [sample for following in history.followings for sample in following.samples]
    lost = sum(sample.lost for sample in samples)
    codes = Counter(reply.code for request in history.requests for reply in request.replies)
    codes["unknown"] = sum(not request.replies for request in history.requests)
    return "; ".join(
        (
            f"{len(plain)} calls ({_ends(plain)})",
            f"{len(keyed)} for {len({call.key for call in keyed})} keys ({_ends(keyed)})",
            f"{len(remote)} by remote tools ({_ends(remote)})",
            f"{len(samples)} samples and {lost} counted as lost in {len(history.followings)} streams",
            f"{len(history.requests)} requests for callers' tools ({_counted(codes)})",
            f"{len(history.runs)} runs at nodes",
            f"{len(history.decisions)} decisions and {len(history.outcomes)} outcomes in the audit",
        )
    )


def _ends(calls: Sequence[Call]) -> str:
    codes = Counter(answer.code for call in calls for answer in call.answers)
    codes["unknown"] = sum(not call.answers for call in calls)
    return _counted(codes)


def _counted(codes: "Counter[str]") -> str:
    return ", ".join(f"{count} {code}" for code, count in codes.most_common())
