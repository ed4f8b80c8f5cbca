"""Assembles caller tools: the sessions of callers with nodes, and the tools by which they are used.

Must not decide anything: it constructs the parts and connects them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from structlog.typing import FilteringBoundLogger

from relay.audit.assembly import AuditPart
from relay.auth.agent_tokens import Authenticator
from relay.auth.assembly import AuthPart
from relay.calls.assembly import CallsPart
from relay.fleet.assembly import FleetPart
from relay.part import Part
from relay.routing.port import NodeFrames, Peers
from relay.settings.environment import RelayEnvironment
from relay.streams.caller_tools.caller_sessions import CallerSessions
from relay.streams.caller_tools.endings import Endings, Expiry
from relay.streams.caller_tools.event_streams import EventStreams, Polls
from relay.streams.caller_tools.forwarded_calls import ForwardedCalls, tag_of
from relay.streams.caller_tools.limits import NODE_BYTES, TOTAL_BYTES, SharedBudget, Timeouts
from relay.streams.caller_tools.node_requests import NodeRequests
from relay.streams.caller_tools.outbox import Outbox
from relay.streams.caller_tools.records import CallerRecords
from relay.streams.caller_tools.registry import Nodes, SessionRegistry
from relay.streams.caller_tools.tools import SessionTools
from schemas.health import Loop
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource


@dataclass(frozen=True, slots=True)
class CallerToolsPart(Part):
    """The sessions of all callers.

    Attributes:
        streams: the event streams of callers, which the MCP endpoint opens and closes.
        budget: the memory that the sessions take.
        timeouts: how long requests and sessions last.
    """

    streams: EventStreams
    expiry: Expiry
    tools: SessionTools
    requests: NodeRequests
    outbox: Outbox
    budget: SharedBudget
    timeouts: Timeouts

    async def run(self) -> None:
        """End what is over until cancelled."""
        await self.expiry.run()

    def loops(self) -> Mapping[str, Loop]:
        """What is over is ended."""
        return {"caller sessions": self.expiry.loop}


def assemble(  # noqa: PLR0913 - the packages below
    environment: RelayEnvironment,
    *,
    audit: AuditPart,
    auth: AuthPart,
    fleet: FleetPart,
    frames: NodeFrames,
    calls: CallsPart,
    peers: Peers | None,
) -> CallerToolsPart:
    """Return the part, which talks to nodes by ``frames`` and registers its tools with ``calls``.

    ``peers`` are the other relays of the fleet; None without a cluster.
    """
    tag = tag_of(peers.relay) if peers is not None else ""
    part = build(
        timeouts=Timeouts(request=environment.config.caller_timeout_s),
        registry=SessionRegistry(environment.now_ms, environment.random_bytes, tag),
        documents=environment.registry,
        peers=peers,
        nodes=Nodes(fleet.fleet),
        records=CallerRecords(audit.log, audit.refusals, environment.metrics, environment.log),
        authenticator=auth.authenticator,
        frames=frames,
        ulids=environment.ulids,
        monotonic=environment.monotonic,
        log=environment.log,
    )
    for tool in part.tools.tools(environment.registry):
        calls.relay_tools.register(tool)
    return part


def build(  # noqa: PLR0913 - what comes in from outside
    *,
    timeouts: Timeouts,
    registry: SessionRegistry,
    documents: SchemaRegistry,
    peers: Peers | None,
    nodes: Nodes,
    records: CallerRecords,
    authenticator: Authenticator,
    frames: NodeFrames,
    ulids: UlidSource,
    monotonic: Callable[[], float],
    log: FilteringBoundLogger,
) -> CallerToolsPart:
    """Return the part's parts, connected with each other and with ``frames``."""
    budget = SharedBudget(NODE_BYTES, TOTAL_BYTES)
    outbox = Outbox(frames, log, records.frame_dropped)
    endings = Endings(registry, outbox, records, budget, monotonic)
    requests = NodeRequests(registry, endings, outbox, records, ulids, monotonic)
    requests.follow(frames)
    sessions = CallerSessions(
        registry=registry,
        nodes=nodes,
        endings=endings,
        outbox=outbox,
        records=records,
        budget=budget,
        polls=Polls(endings, monotonic),
        timeouts=timeouts,
        monotonic=monotonic,
    )
    expiry = Expiry(registry, endings, outbox, nodes, authenticator, timeouts, monotonic, log)
    forwarded = None
    if peers is not None:
        forwarded = ForwardedCalls(peers, sessions, registry, endings, nodes, authenticator, documents)
    leave_elsewhere = partial(forwarded.leave, plainly=True) if forwarded is not None else None
    streams = EventStreams(authenticator, endings, leave_elsewhere, monotonic, log)
    tools = SessionTools(sessions, registry, streams, endings, forwarded)
    return CallerToolsPart(streams, expiry, tools, requests, outbox, budget, timeouts)
