"""The tools that the relay answers itself: ``find_nodes``, the sessions' tools, the kinds view.

A package above registers its tools here while the relay is assembled. A call of one passes the gateway as any
other call does: limited, checked against its documents, recorded and counted. Must not know what a tool does.
"""

from bisect import insort
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relay.auth.agent_tokens import Caller
from relay.auth.permissions import Rights
from relay.calls.envelope import Call
from relay.fleet.selection import Selection
from relay.fleet.tools import KindVerb, Tool, ToolSchemas
from schemas.addresses import View
from schemas.error_roots import PeerError
from schemas.projection import alias_of, parse

RELAY_TOOL_TIMEOUT_S = 5.0
"""The gateway's budget; a long poll has a longer one of its own."""

Emit = Callable[[str, Mapping[str, Any]], Awaitable[None]]
"""Sends a notification on the response stream of a call: its method and its parameters.

Raises StreamClosedError if the client has disconnected."""


class StreamClosedError(PeerError):
    """The client has closed the response stream of its call."""


Shown = Callable[[Mapping[str, Any], Sequence[str]], Mapping[str, Any]]
"""Returns a result as the caller gets it; the texts are the samples that were gathered before it."""


@dataclass(frozen=True, slots=True)
class DirectedCall:
    """The node's tool that the arguments of a call name, and the arguments for it.

    Attributes:
        tool: as it was found; whether it may be called is not checked.
        shown: makes of the node's result the one that the caller gets.
        for_s: for how many seconds samples are gathered before the answer; None: as the caller follows them.
        samples: what was gathered, as JSON.
    """

    tool: Tool
    arguments: Mapping[str, Any]
    shown: Shown
    for_s: float | None = None
    samples: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ParentCall:
    """A call whose answer is made of others, which are calls of their own.

    Attributes:
        correlation_id: names it in the audit of each of them.
        ends: when this one of them must have ended, on the gateway's monotonic clock.
        directed: returns the call of the one node, for a caller with these rights. It raises ToolError.
    """

    correlation_id: str
    ends: float
    directed: Callable[[Rights], DirectedCall]


@dataclass(frozen=True, slots=True)
class RelayToolCall:
    """One call of a tool that the relay answers; its arguments fit the tool's input document.

    Attributes:
        call: as it was received.
        emit: None where the answer cannot be a stream.
        log_emit: the same, but None also where the caller did not opt in to log messages of level info.
        selection: what the caller's URL narrows the fleet to; an answer must not go beyond it.
        correlation_id: of this call, in upper case.
        ends: when its timeout ends it, on the gateway's monotonic clock.
        is_stopped: returns whether the relay ends it: its token was revoked, or the relay stops. One that is
            cancelled otherwise was closed by its caller.
    """

    caller: Caller
    call: Call
    emit: Emit | None
    log_emit: Emit | None
    selection: Selection
    correlation_id: str
    ends: float
    is_stopped: Callable[[], bool]

    @property
    def arguments(self) -> Mapping[str, Any]:
        arguments: Mapping[str, Any] = self.call.arguments
        return arguments


def _answered_here(_rights: Rights, _selection: Selection, _arguments: Mapping[str, Any]) -> None:
    """Direct no call to a node."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RelayTool:
    """One tool that the relay answers. All its texts are static.

    Attributes:
        canonical: the name, dotted if it has parts; its dashed form is accepted too.
        schema_ref: the registry's reference of its input document.
        visible: whether callers with these rights may list and call it.
        answer: returns the result, which must fit the output document. It raises ToolError.
        timeout_s: after this time the call ends as E_DEADLINE_EXCEEDED.
        views: the views that list it. A call is accepted in every view.
        kind_verb: the kind and verb of the nodes' tools that it represents, if any: listed while the caller
            reaches one of them, with the severest of their safety classes.
        directed: returns the node's tool that a call is for; None if the relay answers. It raises ToolError.
        streams: whether it may send notifications before its result, so that the answer must be a stream.
        follows: the same, but progress notifications alone, to callers that send a progress token.
        logs: the same, but log messages alone, to callers that opt in to them.
        waits: whether it can take long, within limits of its own: then it does not count towards the calls
            that its agent may have in flight.
        verbatim: whether its strings are passed on as they are: data that escaping would change.
        untrusted: the paths of the sentences in its result that a third party may have chosen.
        asks: the paths of the members of its result, or of each node's, that name a tool to ask next.
    """

    canonical: str
    title: str
    description: str
    schemas: ToolSchemas
    schema_ref: str
    safety_class: str
    idempotent: bool
    visible: Callable[[Rights], bool]
    answer: Callable[[RelayToolCall], Awaitable[Mapping[str, Any]]]
    timeout_s: float = RELAY_TOOL_TIMEOUT_S
    views: frozenset[View] = frozenset(View)
    kind_verb: KindVerb | None = None
    directed: Callable[[Rights, Selection, Mapping[str, Any]], DirectedCall | None] = _answered_here
    streams: bool = False
    follows: bool = False
    logs: bool = False
    waits: bool = False
    verbatim: bool = False
    untrusted: tuple[str, ...] = ()
    asks: tuple[tuple[str, ...], ...] = ()

    @property
    def node_id(self) -> None:
        return


class RelayTools:
    """The tools that one relay answers itself, by name.

    Attributes:
        find: returns the tool of a canonical or dashed name, if any; whether it may be called is not checked.
    """

    def __init__(self) -> None:
        self._tools: dict[str, RelayTool] = {}
        self._sorted: list[RelayTool] = []
        self.find: Callable[[str], RelayTool | None] = self._tools.get

    def __iter__(self) -> Iterator[RelayTool]:
        return iter(self._sorted)

    def register(self, tool: RelayTool) -> None:
        """Add ``tool``, under its canonical name and its dashed form.

        Raises:
            ValueError: the name is taken, or could be that of a node's tool.
        """
        names = {tool.canonical, alias_of(tool.canonical)}
        if names & self._tools.keys() or parse(tool.canonical) is not None:
            raise ValueError(f"{tool.canonical} cannot be the name of another tool")
        self._tools.update(dict.fromkeys(names, tool))
        insort(self._sorted, tool, key=lambda known: known.canonical)
