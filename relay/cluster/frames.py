"""The one-way frames of the nodes of all relays: ``NodeFrames``, for what need not know where a node is.

A node of this relay is reached by its session. A frame for any other goes to the relay that holds it, as
presence has it, and those of a node go to the relays that they are for: lent tools to the one that has opened
the caller's session, samples to all that have leased them. A frame is of one session of its node, and is lost
with it.

On its way to another relay a frame waits in a queue, in order for each node and bounded, and is acknowledged.
One that the other relay has refused because it is busy is sent again; one that may have arrived is not, but
the end of a session, which is kept until it was taken.
Samples go to every relay that has leased them: each by its channel in a fleet that is sealed; until then
they are published once, on ``edge.<fleet>.telemetry.<node_id>``, by the relay that holds the node's session.
Must not know agents.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import define, field
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from structlog.typing import FilteringBoundLogger

from relay.cluster.messages import FRAME, Asked, ClusterMessageError, CountMessage, PeerMessages
from relay.cluster.presence import NodeEntry
from relay.cluster.sealed_link import SealedAsk, SealedLink
from relay.observability.ascii_json import encoded
from relay.routing.port import (
    AnnounceHandler,
    Asker,
    ConnectionHandler,
    FrameHandler,
    NodeFrames,
    NodeRef,
    NoResponderError,
    Peers,
)
from schemas.callbacks import Followers, Handlers
from schemas.caller_tools import MAX_SESSIONS, SESSIONS_LAST_S
from schemas.errors import Failure, ToolError
from schemas.frames import MAX_FRAME_BYTES, ONE_WAY, OneWayType, Role
from schemas.payloads import SessionEnd, TelemetryLease
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

MAX_QUEUED_BYTES = 2 * MAX_FRAME_BYTES
"""How much waits for one node on its way to one relay; the frame that exceeds it is the last."""

_TIMEOUT_S = 2.0
_RETRY_S = 1.0
_FULL_RETRY_MS = 1000
_MOST_TRIES = 100
"""How often a frame is sent to a relay that refuses it for now: about as long as a request waits."""


@dataclass(frozen=True, slots=True)
class NodeAt:
    """A session of a node, and the other relay: the one that holds it, or the one that a frame goes to."""

    node: NodeRef
    relay: str


@dataclass(frozen=True, slots=True)
class QueuedFrame:
    """A frame that waits."""

    type: OneWayType
    payload: Mapping[str, Any]
    size: int


def _body(node: NodeRef, type_: OneWayType, payload: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "node_id": node.node_id,
        "session_id": node.session_id,
        "type": type_.value,
        "payload": payload,
    }


@define(eq=False)
class _FrameQueue:
    """What waits. ``is_broken`` from a frame that was lost until its loss was told."""

    frames: deque[QueuedFrame] = field(factory=deque)
    size: int = 0
    is_broken: bool = False
    task: asyncio.Task[None] | None = None


Before = Callable[[NodeAt, QueuedFrame], Awaitable[None]]
"""Prepares for what a frame will cause. Is awaited before the frame is sent."""
Lost = Callable[[NodeAt, QueuedFrame], None]
"""Is called with the frame with which a queue broke. What waited behind it is lost too."""
Taken = Callable[[NodeAt, QueuedFrame], None]
"""Is called with each frame that the other relay has acknowledged."""


@define(eq=False, repr=False)
class FrameQueues:
    """The queues to all other relays. One that broke takes frames again when ``lost`` is called."""

    _peers: Peers
    _before: Before = field(kw_only=True)
    _lost: Lost = field(kw_only=True)
    _taken: Taken = field(kw_only=True)
    _count: CountMessage = field(kw_only=True)
    _log: FilteringBoundLogger = field(kw_only=True)
    _sleep: Callable[[float], Awaitable[None]] = field(kw_only=True, default=asyncio.sleep)
    _queues: dict[NodeAt, _FrameQueue] = field(init=False, factory=dict)

    def put(self, where: NodeAt, type_: OneWayType, payload: Mapping[str, Any]) -> None:
        """Queue a frame.

        Raises:
            ToolError: NODE_OFFLINE while the queue is broken; RATE_LIMITED if too much waits; INTERNAL if it
                is larger than its type allows.
        """
        size = len(encoded(payload))
        if size > type_.max_bytes:
            raise ToolError(Failure.INTERNAL, "The frame does not fit its type.")
        queue = self._queues.setdefault(where, _FrameQueue())
        if queue.is_broken:
            raise ToolError(Failure.NODE_OFFLINE)
        if queue.size >= MAX_QUEUED_BYTES:
            self._count(FRAME, "asked", "refused")
            raise ToolError(Failure.RATE_LIMITED, "The node does not read.", retry_after_ms=_FULL_RETRY_MS)
        queue.frames.append(QueuedFrame(type_, payload, size))
        queue.size += size
        if queue.task is None:
            queue.task = asyncio.create_task(self._run(where, queue))

    def drop(self, node_id: str, but: NodeRef | None = None) -> None:
        """Drop what waits for a node, or of it, except in its session ``but``."""
        for where in [known for known in self._queues if known.node.node_id == node_id]:
            if where.node == but:
                continue
            if (task := self._queues.pop(where).task) is not None:
                task.cancel()

    async def close(self) -> None:
        tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        self._queues.clear()
        if tasks:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _run(self, where: NodeAt, queue: _FrameQueue) -> None:
        try:
            while queue.frames:
                frame = queue.frames[0]
                try:
                    await self._send(where, frame)
                except (NoResponderError, TimeoutError):
                    await self._broke(where, queue, frame)
                    return
                queue.frames.popleft()
                queue.size -= frame.size
        except Exception as error:  # noqa: BLE001 - a bug must end one queue, and be seen
            self._log.error("frames not sent", node_id=where.node.node_id, exc_info=error)
        finally:
            if self._queues.get(where) is queue:
                del self._queues[where]

    async def _send(self, where: NodeAt, frame: QueuedFrame) -> None:
        """Send one frame, again while the other relay refuses it for now.

        Raises:
            NoResponderError: no relay holds it any more.
            TimeoutError: no answer: it may have been taken.
        """
        await self._before(where, frame)
        body = _body(where.node, frame.type, frame.payload)
        for _ in range(_MOST_TRIES):
            try:
                await self._peers.ask(where.relay, FRAME, body, _TIMEOUT_S)
            except ToolError as error:
                if error.failure is Failure.NODE_OFFLINE:
                    raise NoResponderError("the node is not there") from None
                if error.failure is not Failure.RATE_LIMITED:
                    break
                await self._sleep((error.retry_after_ms or _FULL_RETRY_MS) / 1000)
            else:
                self._count(FRAME, "asked", "ok")
                self._taken(where, frame)
                return
        self._count(FRAME, "asked", "refused")
        self._log.warning(
            "frame not taken by another relay",
            node_id=where.node.node_id,
            relay=where.relay,
            type=frame.type.value,
        )

    async def _broke(self, where: NodeAt, queue: _FrameQueue, frame: QueuedFrame) -> None:
        for _ in queue.frames:
            self._count(FRAME, "asked", "lost")
        queue.frames.clear()
        queue.is_broken = True
        await self._sleep(_RETRY_S)
        del self._queues[where]
        self._lost(where, frame)


SAMPLE = "sample"
"""What a sample is counted as."""
MAX_WAITING = 256
"""The samples that wait to be published: those of all nodes of this relay."""
MAX_UNREAD = 64
"""The samples of one node that wait to be read."""

TakeFrame = Callable[[str, Mapping[str, Any]], None]
"""Takes a body of ``cluster.frame`` that the named relay has published. Must not block."""


@define(eq=False, repr=False, kw_only=True)
class SampleSubjects:
    """Sends samples to the relays that have leased them, and reads those of the nodes that are followed."""

    _link: SealedLink
    _messages: PeerMessages
    _take: TakeFrame
    _ulids: UlidSource
    _count: CountMessage
    _log: FilteringBoundLogger
    _waiting: deque[tuple[str, Collection[str], bytes]] = field(init=False, factory=deque)
    _wake: asyncio.Event = field(init=False, factory=asyncio.Event)
    _client: Client | None = field(init=False, default=None)
    _followed: dict[str, "Subscription | None"] = field(init=False, factory=dict)
    _ended: list["Subscription"] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        self._link.answer(SAMPLE, self._told)

    def publish(self, node: NodeRef, payload: Mapping[str, Any], relays: Collection[str]) -> None:
        """Send a sample of a node of this relay to ``relays``; the oldest that waits makes space for it."""
        body = _body(node, OneWayType.TELEMETRY, payload)
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._count(SAMPLE, "asked", "dropped")
        message = self._messages.ask(self._ulids.new(), body)
        self._waiting.append((self._subject(node.node_id), relays, message))
        self._wake.set()

    async def follow(self, node_id: str) -> None:
        """Read the samples of a node from now on, during every connection."""
        if node_id not in self._followed:
            self._followed[node_id] = None
            if self._client is not None:
                # The connection may have just ended: the next one reads the samples of all that is followed.
                with suppress(NatsError):
                    await self._subscribe(self._client, node_id)

    def unfollow(self, node_id: str) -> None:
        if (subscription := self._followed.pop(node_id, None)) is not None:
            self._ended.append(subscription)
            self._wake.set()

    async def serve(self, client: Client) -> None:
        self._waiting.clear()  # from before the connection: too old
        self._ended.clear()
        self._followed = dict.fromkeys(self._followed)  # the subscriptions of a former client ended with it
        self._client = client
        try:
            for node_id in list(self._followed):
                await self._subscribe(client, node_id)
            while True:
                while self._waiting:
                    await self._send(client, *self._waiting.popleft())
                while self._ended:
                    await self._ended.pop().unsubscribe()
                self._wake.clear()
                await self._wake.wait()
        finally:
            self._client = None

    async def _send(self, client: Client, subject: str, relays: Collection[str], message: bytes) -> None:
        if not self._link.is_sealed:
            await client.publish(subject, message)
            self._count(SAMPLE, "asked", "ok")
            return
        for relay in relays:
            is_sent = await self._link.send(relay, SAMPLE, message)
            self._count(SAMPLE, "asked", "ok" if is_sent else "dropped")

    async def _subscribe(self, client: Client, node_id: str) -> None:
        if self._link.is_sealed:
            return  # they come by the channels
        subscription = await client.subscribe(
            self._subject(node_id), cb=self._received, pending_msgs_limit=MAX_UNREAD
        )
        if self._client is not client:
            return  # it has ended meanwhile, and its subscriptions with it
        if node_id in self._followed:
            self._followed[node_id] = subscription
        else:
            self._ended.append(subscription)
            self._wake.set()

    def _subject(self, node_id: str) -> str:
        return f"edge.{self._link.fleet}.telemetry.{node_id}"

    async def _received(self, message: Msg) -> None:
        if self._link.is_sealed or (asked := self._read(message.data)) is None:
            return
        if message.subject != self._subject(asked.body["node_id"]):
            self._count(SAMPLE, "answered", "invalid")
            self._log.warning("sample of another relay dropped", reason="it is of another node")
            return
        self._take(asked.relay, asked.body)

    def _told(self, ask: SealedAsk) -> None:
        # Whether that relay has the node, what takes it looks at.
        if (asked := self._read(ask.body)) is not None:
            self._take(ask.relay, asked.body)

    def _read(self, data: bytes) -> Asked | None:
        try:
            return self._messages.read_ask(data, FRAME)
        except ClusterMessageError as error:
            self._count(SAMPLE, "answered", "invalid")
            self._log.warning("sample of another relay dropped", reason=str(error))
            return None


_RETRY_MS = 60_000


@define(eq=False, repr=False)
class CallerSessionRelays:
    """The relays of callers' sessions, for each node by its own session. ``seconds`` is a monotonic clock."""

    _seconds: Callable[[], float]
    _of_node: dict[NodeRef, dict[str, str]] = field(init=False, factory=lambda: defaultdict(dict))
    # When each was lost that is not back, the first one first.
    _lost_s: dict[NodeRef, float] = field(init=False, factory=dict)

    def passed(self, where: NodeAt, type_: OneWayType, payload: Mapping[str, Any]) -> None:
        """Handle a frame to a node of this relay, from the relay of ``where``.

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
        self._lost_s.pop(node, None)
        for known in [known for known in self._of_node if known.node_id == node.node_id and known != node]:
            del self._of_node[known]

    def node_lost(self, node: NodeRef) -> None:
        """Keep the sessions of a node while it may come back with them, and forget those of earlier ones."""
        now_s = self._seconds()
        self._lost_s[node] = now_s
        while self._lost_s and now_s - self._lost_s[lost := next(iter(self._lost_s))] >= SESSIONS_LAST_S:
            del self._lost_s[lost]
            self._of_node.pop(lost, None)

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
        """Apply what ``relay`` leases, in place of what it had, and send the node what follows for all.

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
MAX_ENDED = 4096
"""The nodes whose ends are kept: as many as have sessions with the callers of one relay."""
_MSG_ID = "0" * 26
_NOT_SEEN_RETRY_MS = 100


class FleetFrames:
    """The frames of the nodes of all relays, for the relay of ``link``; ``local`` has those of its own.

    ``tenant_of`` returns the tenant of a node, None if it is not known.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        local: NodeFrames,
        peers: Peers,
        messages: PeerMessages,
        *,
        link: SealedLink,
        tenant_of: Callable[[str], str | None],
        registry: SchemaRegistry,
        ulids: UlidSource,
        seconds: Callable[[], float],
        count: CountMessage,
        log: FilteringBoundLogger,
    ) -> None:
        self._local = local
        self._relay = link.relay
        self._tenant_of = tenant_of
        self._documents = {type_: registry.load(f"session.{type_.value}@1.0.0") for type_ in OneWayType}
        self._count = count
        self._log = log
        self._queues = FrameQueues(
            peers, before=self._before, lost=self._lost, taken=self._taken, count=count, log=log
        )
        self._samples = SampleSubjects(
            link=link,
            messages=messages,
            take=self._published,
            ulids=ulids,
            count=count,
            log=log,
        )
        self._leases = SharedLeases(local, seconds)
        self._callers = CallerSessionRelays(seconds)
        self._elsewhere: dict[str, NodeAt] = {}
        self._here: dict[str, NodeRef] = {}
        self._leased: dict[str, set[str]] = {}
        self._ended: dict[str, dict[str, Mapping[str, Any]]] = {}
        self._handlers = Handlers[OneWayType, FrameHandler]()
        self._followers = Followers[[NodeRef, bool]](self._not_followed)
        peers.answer(FRAME, self._asked)
        local.on_connection(self._connection_changed)
        for type_ in OneWayType:
            # What nodes find is shown by presence: no relay is handed the frame.
            if type_.sender is Role.NODE and type_ is not OneWayType.FINDINGS:
                local.on_frame(type_, partial(self._sent_by_node, type_))

    async def serve(self, client: Client) -> None:
        await self._samples.serve(client)

    async def close(self) -> None:
        await self._queues.close()

    # --- NodeFrames

    def send(self, node_id: str, frame_type: OneWayType, payload: Mapping[str, Any]) -> None:
        is_lease, where = frame_type is OneWayType.TELEMETRY_LEASE, self._elsewhere.get(node_id)
        if frame_type is OneWayType.SESSION_END and (where is not None or node_id not in self._here):
            self._note_ended(node_id, payload)
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
        """Note that a node has connected to another relay, or is lost there: an ``ElsewhereHandler``."""
        before, tenant = self._left(node_id), self._tenant_of(node_id)
        if entry is None or tenant is None:
            if before is not None:
                self._queues.drop(node_id)
                self._notify(before.node, connected=False)
            return
        node = NodeRef(tenant, node_id, entry.session_id)
        self._queues.drop(node_id, but=node)
        self._elsewhere[node_id] = NodeAt(node, entry.relay)
        self._begin(node)

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
            self._callers.node_lost(node)
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

    def _note_ended(self, node_id: str, end: Mapping[str, Any]) -> None:
        """Keep the end of a session: without it the session stays, at the node and as one of its relay's."""
        ends = self._ended[node_id] = self._ended.pop(node_id, {})  # the newest last
        ends[end["session_id"]] = end
        if len(ends) > MAX_SESSIONS:
            del ends[next(iter(ends))]
        if len(self._ended) > MAX_ENDED:
            # Most often of a node that is away for good; any other is told once it names the session.
            del self._ended[next(iter(self._ended))]

    def _taken(self, where: NodeAt, frame: QueuedFrame) -> None:
        node_id = where.node.node_id
        if frame.type is OneWayType.SESSION_END and (ends := self._ended.get(node_id)) is not None:
            ends.pop(frame.payload["session_id"], None)
            if not ends:
                del self._ended[node_id]

    def _begin(self, node: NodeRef) -> None:
        """Send what a node of another relay needs: first the ends, which leave space for what is opened."""
        for end in list(self._ended.get(node.node_id, {}).values()):
            with suppress(ToolError):  # it is sent when the node connects, or the loss of others is told
                self.send(node.node_id, OneWayType.SESSION_END, end)
        self._notify(node, connected=True)

    async def _before(self, where: NodeAt, frame: QueuedFrame) -> None:
        """Read the samples of a node before they are leased: the first one comes at once."""
        if frame.type is OneWayType.TELEMETRY_LEASE and where.node.node_id in self._leased:
            await self._samples.follow(where.node.node_id)

    def _lost(self, where: NodeAt, frame: QueuedFrame) -> None:
        """Begin anew with a node whose frames were lost on their way: what it needs is sent again.

        What a node has sent is not: a request for a lent tool ends by its timeout, or with its relay.
        """
        if frame.type.sender is Role.RELAY and self._elsewhere.get(where.node.node_id) == where:
            self._begin(where.node)

    def _sent_by_node(self, type_: OneWayType, node: NodeRef, payload: Mapping[str, Any]) -> None:
        """Hand a frame of a node of this relay to the relays that it is for."""
        if type_ is OneWayType.TELEMETRY:
            relays = self._leases.relays_of(node.node_id, payload["cap_id"])
            if others := [relay for relay in relays if relay != self._relay]:
                self._samples.publish(node, payload, others)
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

    async def _asked(self, asker: Asker, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Handle a frame that another relay has sent here: a ``PeerHandler``."""
        relay = asker.relay
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
