"""The data of one call: the request, what is known of it, and the answer; and the port by which it streams.

Must not decide anything, nor know streams: ``relay.streams`` implements ``SampleStreams``. What is made for
every call is a tuple: a frozen dataclass takes twice as long.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from relay.ascii_json import encoded, members_of
from relay.audit.log import AuditLog
from relay.auth.agent_tokens import Caller, Principal
from relay.calls.envelope import Call, follow_s
from relay.calls.relay_tools import DirectedCall, Emit, ParentCall, RelayTool
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.fleet.tools import Tool
from relay.limits.rate_limits import Limiter
from relay.routing.port import Idempotency
from schemas.errors import Failure, ToolError
from schemas.images import Images
from schemas.projection import META_PROGRESS_TOKEN
from schemas.text import printable


class Hop(StrEnum):
    """Where a call failed; the value is fit for a counter's label.

    RELAY: it was refused or failed here. SESSION: it could not be delivered. NODE: it was sent, and the node
    did not answer in time, or with an error, or with a result that is not valid.
    """

    RELAY = "relay"
    SESSION = "session"
    NODE = "node"


_HOPS = {
    Failure.NODE_OFFLINE: Hop.SESSION,
    Failure.ATTESTATION_FAILED: Hop.SESSION,
    Failure.DEADLINE_EXCEEDED: Hop.NODE,
}


def hop_of(error: BaseException) -> Hop:
    """Return where a command failed for which a ``NodeRouter`` raised ``error``."""
    return _HOPS.get(error.failure, Hop.RELAY) if isinstance(error, ToolError) else Hop.RELAY


_NO_PRINCIPAL = members_of({"tenant": None, "iss": None, "sub": None, "jti": None})


class CallRequest(NamedTuple):
    """A call from a transport: its caller is identified, and nothing else of it has been checked.

    Attributes:
        emit: sends a notification before the answer; None where that cannot be a stream.
        selection: what the caller's URL narrows the fleet to.
        parent: the call whose answer this one is a part of, if any.
    """

    caller: Caller
    call: Call
    emit: Emit | None = None
    selection: Selection = WHOLE_FLEET
    parent: ParentCall | None = None


MOST_SAMPLES = 10
FOLLOWED_S = 15.0
"""Clients send a progress token with every call, and wait for its result: so it comes soon."""


@dataclass(frozen=True, slots=True)
class Following:
    """How the caller of a call follows it: by notifications with its progress token.

    Attributes:
        most: after how many samples the call ends; None if it lasts ``for_s`` in any case.
        for_s: after how many seconds it ends.
    """

    emit: Emit
    progress_token: str | int
    most: int | None = MOST_SAMPLES
    for_s: float = FOLLOWED_S


class CallAnswer(NamedTuple):
    """A result or an error envelope (``error@1.0.0``), exactly one of them; ``text`` is its ASCII JSON.

    Attributes:
        hop: of an error, the hop that failed.
        correlation_id: the one under which the gateway has recorded the call.
        images: what the result has besides, as content blocks of MCP: ``text`` does not contain them.
    """

    text: str
    result: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    hop: Hop | None = None
    correlation_id: str = ""
    images: Images = ()


@dataclass(slots=True)
class CallRecord:
    """What is known of one call, and its lines in the audit.

    Attributes:
        started: when it arrived, on the gateway's monotonic clock.
        call: as it was received, or as the call of the node's tool that it was directed to.
        request: what it was made of; a tool of the relay's own is given its caller.
        first: the correlation id of the call that this one repeats; None if it repeats none.
        attempt: how often the call was sent under its idempotency key, this one included.
        idempotency: its key, as a relay that holds its node's session needs to know it; None without a key.
        share: what the call takes of its agent's concurrency, until it is released.
        streamed: whether it stays open after its first sample: then it is no measure of latency.
        answered: whether the node has answered, so that the outcome is known.
        hop: where the call is; of one that failed, the hop that failed.
        is_canary: whether the relay makes it by itself: it uses up nothing of the capability's rate, and
            has no lines of its own in the audit.
        counted: whether its agent's limits refused it, so that the audit counts it with others.
        error: what it failed with.
        directed: what a tool of the relay's own has directed the call to, if one has.
    """

    correlation_id: str
    call: Call
    started: float
    request: CallRequest | None = None
    principal: Principal | None = None
    tool: Tool | RelayTool | None = None
    first: str | None = None
    attempt: int = 1
    idempotency: Idempotency | None = None
    span_id: str | None = None
    share: Limiter | None = None
    streamed: bool = False
    answered: bool = False
    hop: Hop = Hop.RELAY
    is_canary: bool = False
    counted: bool = False
    error: ToolError | None = None
    directed: DirectedCall | None = None

    def release_share(self) -> None:
        """Give back what the call takes of its agent's concurrency."""
        share, self.share = self.share, None
        if share is not None:
            share.release()

    def following(self) -> Following | None:
        """Return how what the call streams is followed; None if it is not."""
        by_caller = self._followed_by_caller()
        if self.directed is None or self.directed.for_s is None:
            return by_caller
        samples = self.directed.samples

        async def gather(method: str, params: Mapping[str, Any]) -> None:
            samples.append(params["message"])
            if by_caller is not None:
                await by_caller.emit(method, params)

        return Following(gather, by_caller.progress_token if by_caller else "", None, self.directed.for_s)

    def shown(self, answer: CallAnswer) -> CallAnswer:
        """Return the node's ``answer`` as the caller of the tool that was called gets it."""
        if self.directed is None or answer.result is None:
            return answer
        result = self.directed.shown(answer.result, self.directed.samples)
        return CallAnswer(encoded(result), result=result, images=answer.images)

    def _followed_by_caller(self) -> Following | None:
        emit = self.request.emit if self.request is not None else None
        token = self.call.meta.get(META_PROGRESS_TOKEN)
        # A keyed call outlives its caller, and so its stream.
        if emit is None or self.call.idempotency_key is not None or isinstance(token, bool):
            return None
        if not isinstance(token, int | str):
            return None
        for_s = follow_s(self.call.meta)
        return Following(emit, token) if for_s is None else Following(emit, token, None, for_s)

    def denied(self, audit: AuditLog, error: ToolError) -> None:
        audit.append(f'{self._members()},"decision":"deny","code":"{error.failure.value.code}"')

    def allowed(self, audit: AuditLog) -> None:
        """Record that the call is allowed. Raises AuditUnavailableError: it must not be made."""
        audit.append(self._members() + ',"decision":"allow","code":"ok"')

    def ended(self, audit: AuditLog, code: str, now: float) -> None:
        """Record the outcome of a call that was allowed."""
        duration_ms = int((now - self.started) * 1e6 + 0.5) / 1000  # ``round`` takes ten times as long
        outcome = "ok" if code == "ok" else "error"
        audit.append(f'{self._members()},"outcome":"{outcome}","code":"{code}","duration_ms":{duration_ms}')

    def _members(self) -> str:
        who = self.principal.members if self.principal else _NO_PRINCIPAL
        members = f'"correlation_id":"{self.correlation_id}",{who},{self._called()}'
        if self.call.given_id:
            members = f'{members},"caller_correlation_id":"{self.call.given_id}"'
        if self.request is not None and self.request.parent is not None:
            members = f'{members},"parent":"{self.request.parent.correlation_id}"'
        return members if self.first is None else f'{members},"first":"{self.first}"'

    def _called(self) -> str:
        if isinstance(self.tool, Tool):
            # Of the name's alphabet and a node's: no character of theirs needs an escape.
            return f'"tool":"{self.tool.canonical}","node_id":"{self.tool.node_id}"'
        if self.tool is not None:
            return members_of({"tool": self.tool.canonical, "node_id": self.tool.node_id})
        name, parsed = self.call.name, self.call.parsed
        shown = printable(name, 64) if isinstance(name, str) else ""
        return members_of({"tool": shown, "node_id": parsed.node_id if parsed else None})


@dataclass(frozen=True, slots=True)
class StreamCall:
    """A call that is allowed, and has been answered by its first sample.

    Attributes:
        following: None if the call ends with its first sample, and is followed by its resource.
    """

    principal: Principal
    tool: Tool
    arguments: Mapping[str, Any]
    following: Following | None


class SampleStreams(Protocol):
    """The streams that calls start."""

    def admit(self, principal: Principal, tool: Tool) -> None:
        """Return if another stream may be started. Raises ToolError: RATE_LIMITED."""
        ...

    async def start(self, call: StreamCall, first: CallAnswer) -> CallAnswer:
        """Start the stream, and return the answer of the call: at once, or when it is no longer followed.

        Raises:
            ToolError: the stream ended while it was followed.
        """
        ...
