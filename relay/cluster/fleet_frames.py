"""The one-way frames of the nodes of all relays: ``NodeFrames``, for what need not know where a node is.

A node of this relay is reached by its session. A frame for any other goes to the relay that holds it, as
presence has it, and those of a node go to the relays that they are for: lent tools to the one that has opened
the caller's session, samples to all that have leased them. A frame is of one session of its node, and is lost
with it. Must not know agents.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from attrs import define, field
from nats.aio.client import Client
from structlog.typing import FilteringBoundLogger

from relay.cluster.frame_queues import SAMPLE, FrameQueues, NodeAt, QueuedFrame, SampleSubjects
from relay.cluster.messages import FRAME, CountMessage, PeerMessages
from relay.cluster.presence import NodeEntry
from relay.routing.peers import Peers
from relay.routing.port import AnnounceHandler, ConnectionHandler, FrameHandler, NodeFrames, NodeRef
from schemas.caller_tools import MAX_SESSIONS
from schemas.errors import Failure, ToolError
from schemas.frame_types import ONE_WAY, OneWayType, Role
from schemas.handlers import Followers, Handlers
from schemas.payloads import SessionEnd, TelemetryLease
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource

_RETRY_MS = 60_000


@define(eq=False, repr=False)
class CallerSessionRelays:
    """The relays of callers' sessions, for each node by its own session."""

    _of_node: dict[NodeRef, dict[str, str]] = field(init=False, factory=lambda: defaultdict(dict))

    def passed(self, where: NodeAt, type_: OneWayType, payload: Mapping[str, Any]) -> None:
        """Take in a frame to a node of this relay, from the relay of ``where``.

        Raises:
            ToolError: RATE_LIMITED: the node has as many sessions as it may have.
        """
        relays = self._of_node[where.node]
        session_id: str = payload["session_id"]
        if type_ is OneWayType.SESSION_END:
            relays.pop(session_id, None)
        elif type_ is OneWayType.SESSION_OPEN:
            if session_id not in relays and len(relays) >= MAX_SESSIONS:
                raise ToolError(Failure.RATE_LIMITED, retry_after_ms=_RETRY_MS)
            relays[session_id] = where.relay

    def relay_of(self, node: NodeRef, session_id: str) -> str | None:
        """Return the other relay that has the session; None if there is none."""
        return self._of_node.get(node, {}).get(session_id)

    def node_connected(self, node: NodeRef) -> None:
        """Forget the sessions of an older session of the node: they are opened again."""
        for known in [known for known in self._of_node if known.node_id == node.node_id and known != node]:
            del self._of_node[known]

    def relay_gone(self, relay: str) -> list[tuple[NodeRef, str]]:
        """Forget the sessions of a relay that has ended; return them, each with its node."""
        ended = [
            (node, session_id)
            for node, relays in self._of_node.items()
            for session_id, kept_at in relays.items()
            if kept_at == relay
        ]
        for node, session_id in ended:
            del self._of_node[node][session_id]
        return ended


NodeCapability = tuple[str, str]
"""The id of a node, and that of a capability of it."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What one relay has leased: ``include`` None for all parts; ``until_s`` on the monotonic clock."""

    interval_ms: int
    include: frozenset[str] | None
    until_s: float


@define(eq=False, repr=False)
class SharedLeases:
    """Sends leases by ``frames``. ``seconds`` is a monotonic clock."""

    _frames: NodeFrames
    _seconds: Callable[[], float]
    _shares: dict[NodeCapability, dict[str, _Share]] = field(init=False, factory=dict)

    def ask(self, relay: str, node_id: str, lease: TelemetryLease) -> None:
        """Take in what ``relay`` leases, in place of what it had, and send the node what follows for all.

        Raises:
            ToolError: that was not sent, as ``NodeFrames`` describes. To ask again sends it.
        """
        capability = (node_id, lease["cap_id"])
        shares = self._shares.setdefault(capability, {})
        before = shares.pop(relay, None)
        if lease["ttl_ms"] > 0:
            until_s = self._seconds() + lease["ttl_ms"] / 1000
            include = frozenset(lease["include"]) if "include" in lease else None
            shares[relay] = _Share(lease["interval_ms"], include, until_s)
        try:
            self._send(capability, lease["interval_ms"])
        except ToolError:
            if lease["ttl_ms"] > 0:
                self._restore(capability, relay, before)
            raise

    def relays_of(self, node_id: str, cap_id: str) -> Collection[str]:
        """Return the relays that have leased the capability."""
        now = self._seconds()
        shares = self._shares.get((node_id, cap_id), {})
        return [relay for relay, share in shares.items() if share.until_s > now]

    def relay_gone(self, relay: str) -> None:
        for capability, shares in list(self._shares.items()):
            if (share := shares.pop(relay, None)) is not None:
                with suppress(ToolError):  # the lease of the node ends by itself
                    self._send(capability, share.interval_ms)

    def node_changed(self, node_id: str) -> None:
        """Forget the leases of a node that has connected or is lost: each relay leases it again."""
        for capability in [known for known in self._shares if known[0] == node_id]:
            del self._shares[capability]

    def _restore(self, capability: NodeCapability, relay: str, before: _Share | None) -> None:
        """Take back what ``relay`` has asked for, since it was not sent."""
        shares = self._shares[capability]
        del shares[relay]
        if before is not None:
            shares[relay] = before
        elif not shares:
            del self._shares[capability]

    def _send(self, capability: NodeCapability, interval_ms: int) -> None:
        """Send the lease for all; ``interval_ms`` is that of one that ends the last."""
        node_id, cap_id = capability
        now = self._seconds()
        shares = self._shares[capability]
        for relay in [relay for relay, share in shares.items() if share.until_s <= now]:
            del shares[relay]
        lease: TelemetryLease = {"cap_id": cap_id, "interval_ms": interval_ms, "ttl_ms": 0}
        if shares:
            lease["interval_ms"] = min(share.interval_ms for share in shares.values())
            lease["ttl_ms"] = int(1000 * (max(share.until_s for share in shares.values()) - now))
            if (parts := _all_parts(share.include for share in shares.values())) is not None:
                lease["include"] = parts
        else:
            del self._shares[capability]
        self._frames.send(node_id, OneWayType.TELEMETRY_LEASE, lease)


def _all_parts(includes: Iterable[frozenset[str] | None]) -> list[str] | None:
    """Return every part that one of ``includes`` names; None if one of them wants all."""
    wanted: set[str] = set()
    for include in includes:
        if include is None:
            return None
        wanted |= include
    return sorted(wanted)


_GONE = "unknown"
"""The reason that a node is given for a session whose relay has ended."""
_MSG_ID = "0" * 26
_NOT_SEEN_RETRY_MS = 100


class FleetFrames:
    """The frames of the nodes of all relays, for the relay ``relay``; ``local`` has those of its own.

    ``tenant_of`` returns the tenant of a node, None if it is not known.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        local: NodeFrames,
        peers: Peers,
        messages: PeerMessages,
        *,
        fleet: str,
        relay: str,
        tenant_of: Callable[[str], str | None],
        registry: SchemaRegistry,
        ulids: UlidSource,
        seconds: Callable[[], float],
        count: CountMessage,
        log: FilteringBoundLogger,
    ) -> None:
        self._local = local
        self._relay = relay
        self._tenant_of = tenant_of
        self._documents = {type_: registry.load(f"session.{type_.value}@1.0.0") for type_ in OneWayType}
        self._count = count
        self._log = log
        self._queues = FrameQueues(peers, before=self._before, lost=self._lost, count=count, log=log)
        self._samples = SampleSubjects(
            messages=messages, fleet=fleet, take=self._published, ulids=ulids, count=count, log=log
        )
        self._leases = SharedLeases(local, seconds)
        self._callers = CallerSessionRelays()
        self._elsewhere: dict[str, NodeAt] = {}
        self._here: dict[str, NodeRef] = {}
        self._leased: dict[str, set[str]] = {}
        self._handlers = Handlers[OneWayType, FrameHandler]()
        self._followers = Followers[[NodeRef, bool]](self._not_followed)
        peers.answer(FRAME, self._asked)
        local.on_connection(self._connection_changed)
        for type_ in OneWayType:
            if type_.sender is Role.NODE:
                local.on_frame(type_, partial(self._sent_by_node, type_))

    async def serve(self, client: Client) -> None:
        await self._samples.serve(client)

    async def close(self) -> None:
        await self._queues.close()

    # --- NodeFrames

    def send(self, node_id: str, frame_type: OneWayType, payload: Mapping[str, Any]) -> None:
        is_lease, where = frame_type is OneWayType.TELEMETRY_LEASE, self._elsewhere.get(node_id)
        if where is not None:
            self._queues.put(where, frame_type, payload)
            if is_lease:
                self._note_leased(node_id, payload)
        elif is_lease:
            self._leases.ask(self._relay, node_id, payload)  # type: ignore[arg-type]  # it is of its type
        else:
            self._local.send(node_id, frame_type, payload)

    def on_frame(self, frame_type: OneWayType, handler: FrameHandler) -> None:
        self._handlers.add(frame_type, handler)

    def on_connection(self, handler: ConnectionHandler) -> None:
        self._followers.add(handler)

    def on_announce(self, handler: AnnounceHandler) -> None:
        self._local.on_announce(handler)

    # --- where nodes are

    def elsewhere_changed(self, node_id: str, entry: NodeEntry | None) -> None:
        """Take in that a node has connected to another relay, or is lost there: an ``ElsewhereHandler``."""
        before, tenant = self._left(node_id), self._tenant_of(node_id)
        if entry is None or tenant is None:
            if before is not None:
                self._queues.drop(node_id)
                self._notify(before.node, connected=False)
            return
        node = NodeRef(tenant, node_id, entry.session_id)
        self._queues.drop(node_id, but=node)
        self._elsewhere[node_id] = NodeAt(node, entry.relay)
        self._notify(node, connected=True)

    def relay_gone(self, relay: str) -> None:
        self._leases.relay_gone(relay)
        for node, session_id in self._callers.relay_gone(relay):
            end: SessionEnd = {"session_id": session_id, "reason": _GONE}
            with suppress(ToolError):  # a node that is not connected ends it by itself
                self._local.send(node.node_id, OneWayType.SESSION_END, end)

    def _connection_changed(self, node: NodeRef, connected: bool) -> None:  # noqa: FBT001 - a ConnectionHandler
        self._leases.node_changed(node.node_id)
        if connected:
            self._left(node.node_id)
            self._queues.drop(node.node_id, but=node)
            self._callers.node_connected(node)
            self._here[node.node_id] = node
        else:
            self._here.pop(node.node_id, None)
        self._notify(node, connected=connected)

    def _left(self, node_id: str) -> NodeAt | None:
        """Note that a node is not where it was, and return where that is."""
        if self._leased.pop(node_id, None) is not None:
            self._samples.unfollow(node_id)
        return self._elsewhere.pop(node_id, None)

    def _notify(self, node: NodeRef, *, connected: bool) -> None:
        self._followers.notify(node, connected)

    def _not_followed(self, error: Exception, node: NodeRef, _connected: bool) -> None:  # noqa: FBT001 - as a follower
        self._log.error("connection not followed", node_id=node.node_id, exc_info=error)

    # --- frames to other relays

    def _note_leased(self, node_id: str, lease: Mapping[str, Any]) -> None:
        leased = self._leased.setdefault(node_id, set())
        if lease["ttl_ms"] > 0:
            leased.add(lease["cap_id"])
            return
        leased.discard(lease["cap_id"])
        if not leased:
            del self._leased[node_id]
            self._samples.unfollow(node_id)

    async def _before(self, where: NodeAt, frame: QueuedFrame) -> None:
        """Read the samples of a node before they are leased: the first one comes at once."""
        if frame.type is OneWayType.TELEMETRY_LEASE and where.node.node_id in self._leased:
            await self._samples.follow(where.node.node_id)

    def _lost(self, where: NodeAt, frame: QueuedFrame) -> None:
        """Begin anew with a node whose frames were lost on their way: what it needs is sent again.

        What a node has sent is not: a request for a lent tool ends by its timeout, or with its relay.
        """
        if frame.type.sender is Role.RELAY and self._elsewhere.get(where.node.node_id) == where:
            self._notify(where.node, connected=True)

    def _sent_by_node(self, type_: OneWayType, node: NodeRef, payload: Mapping[str, Any]) -> None:
        """Hand a frame of a node of this relay to the relays that it is for."""
        if type_ is OneWayType.TELEMETRY:
            relays = self._leases.relays_of(node.node_id, payload["cap_id"])
            if any(relay != self._relay for relay in relays):
                self._samples.publish(node, payload)
            if self._relay in relays or not relays:
                self._hand_over(type_, node, payload)
        elif (relay := self._callers.relay_of(node, payload["session_id"])) is None:
            self._hand_over(type_, node, payload)
        else:
            with suppress(ToolError):  # it is counted
                self._queues.put(NodeAt(node, relay), type_, payload)

    def _hand_over(self, type_: OneWayType, node: NodeRef, payload: Mapping[str, Any]) -> None:
        if (handler := self._handlers.get(type_)) is not None:
            handler(node, payload)

    # --- frames of other relays

    async def _asked(self, relay: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take in a frame that another relay has sent here: a ``PeerHandler``."""
        type_, node_id, payload = ONE_WAY[body["type"]], body["node_id"], body["payload"]
        if not self._fits(type_, payload):
            self._count(FRAME, "answered", "invalid")
            raise ToolError(Failure.INTERNAL)
        if type_.sender is Role.RELAY:
            node = self._here.get(node_id)
            if node is None or node.session_id != body["session_id"]:
                raise ToolError(Failure.NODE_OFFLINE)
            if type_ is OneWayType.TELEMETRY_LEASE:
                self._leases.ask(relay, node_id, payload)
            else:
                self._callers.passed(NodeAt(node, relay), type_, payload)
                self._local.send(node_id, type_, payload)
        elif (where := self._at(relay, body)) is not None:
            self._hand_over(type_, where.node, payload)
        else:
            # It has connected there, and presence does not say so yet.
            raise ToolError(Failure.RATE_LIMITED, retry_after_ms=_NOT_SEEN_RETRY_MS)
        self._count(FRAME, "answered", "ok")
        return {}

    def _published(self, relay: str, body: Mapping[str, Any]) -> None:
        type_, where, payload = ONE_WAY[body["type"]], self._at(relay, body), body["payload"]
        if type_ is not OneWayType.TELEMETRY or not self._fits(type_, payload):
            self._count(SAMPLE, "answered", "invalid")
        elif where is not None and payload["cap_id"] in self._leased.get(where.node.node_id, ()):
            self._count(SAMPLE, "answered", "ok")
            self._hand_over(type_, where.node, payload)

    def _at(self, relay: str, body: Mapping[str, Any]) -> NodeAt | None:
        """Return where the node is, if ``relay`` holds the session that the frame is of."""
        where = self._elsewhere.get(body["node_id"])
        if where is None or (where.relay, where.node.session_id) != (relay, body["session_id"]):
            return None
        return where

    def _fits(self, type_: OneWayType, payload: Mapping[str, Any]) -> bool:
        frame = {"type": type_.value, "msg_id": _MSG_ID, "payload": payload}
        return self._documents[type_].is_valid(frame)
