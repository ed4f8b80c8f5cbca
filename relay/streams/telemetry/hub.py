"""All streams of one relay: started by calls, fed by the nodes' frames, ended by leases and revocations.

A sample is checked once, as the result of a call is, and then shared. Must not know MCP.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

from attrs import define, field
from pydantic_core import from_json
from structlog.typing import FilteringBoundLogger

from relay.audit.refusal_counts import RefusalCounter, RefusalEvent, RefusalReason
from relay.auth.agent_tokens import AgentName, Authenticator, Principal
from relay.calls.executor import Following, StreamCall
from relay.calls.relay_tools import StreamClosedError
from relay.calls.results import CallAnswer, checked
from relay.calls.stream_port import Notify
from relay.fleet.fleet import Fleet
from relay.fleet.tools import Tool
from relay.observability.metrics import Metrics
from relay.routing.port import NodeFrames, NodeRef
from relay.streams.telemetry.stream import History, HistoryBytes, Sample, Stream, Subscription, Terms, lease_s
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from schemas.health import Loop
from schemas.payloads import Telemetry, TelemetryLease
from schemas.projection import META_LOST
from schemas.tally import Tally
from schemas.tokens import TokenError

PER_AGENT = 256
IN_ALL = 16_384
SWEEP_S = 1.0
_ROUND_S = 60.0
_RETRY_MS = 30_000
_RENEWALS_IN_A_LEASE = 3
_SHORTEST_INTERVAL_MS = 1000

OnSample = Callable[[str, Mapping[str, Any]], None]

MAX_WAITING = 16


@define(eq=False, repr=False)
class SampleQueue:
    """The samples for one reader.

    Attributes:
        lost: how many it has lost since the start.
    """

    _waiting: deque[Sample] = field(init=False, factory=deque)
    _changed: asyncio.Event = field(init=False, factory=asyncio.Event)
    _error: ToolError | None = field(init=False, default=None)
    lost: int = field(init=False, default=0)

    def put(self, sample: Sample) -> None:
        """Add a sample; if there are too many, the oldest is lost."""
        if len(self._waiting) == MAX_WAITING:
            self._waiting.popleft()
            self.lost += 1
        self._waiting.append(sample)
        self._changed.set()

    def end(self, error: ToolError) -> None:
        """End: the reader gets what waits, and then ``error``."""
        self._error = error
        self._changed.set()

    async def get(self) -> Sample:
        """Return the oldest sample, and wait for one if there is none.

        Raises:
            ToolError: it has ended.
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()


@define(eq=False, repr=False)
class Leases:
    """Tells nodes, by ``frames``, what to sample, for as long as a stream has a subscriber.

    A node that has lost its session lets its lease end by itself; it gets another when it connects.
    """

    _frames: NodeFrames
    _seconds: Callable[[], float]
    _to_stop: set[tuple[str, str]] = field(init=False, factory=set)

    def update(self, stream: Stream) -> None:
        """Send the lease of ``stream`` if its terms have changed, or a third of its time has passed.

        What cannot be sent now is sent by a later call.
        """
        now, terms = self._seconds(), stream.terms()
        if terms is None:
            return
        ttl_s = lease_s(terms.interval_ms / 1000)
        self._to_stop.discard(stream.tool.capability)
        if terms == stream.leased and now - stream.leased_s < ttl_s / _RENEWALS_IN_A_LEASE:
            return
        if self._sent(stream.tool.capability, terms, int(ttl_s * 1000)):
            stream.leased, stream.leased_s = terms, now

    def stop(self, stream: Stream) -> None:
        if stream.leased is not None:
            stream.leased = None
            self._to_stop.add(stream.tool.capability)
            self.stop_pending()

    def stop_pending(self) -> None:
        """Send what ends leases and could not be sent before."""
        ended = Terms(_SHORTEST_INTERVAL_MS, None)
        for capability in list(self._to_stop):
            if self._sent(capability, ended, 0):
                self._to_stop.discard(capability)

    def lost(self, node_id: str) -> None:
        """Forget what was to be sent to a node whose connection is lost: its leases end by themselves."""
        self._to_stop = {capability for capability in self._to_stop if capability[0] != node_id}

    def _sent(self, capability: tuple[str, str], terms: Terms, ttl_ms: int) -> bool:
        node_id, cap_id = capability
        lease: TelemetryLease = {"cap_id": cap_id, "interval_ms": terms.interval_ms, "ttl_ms": ttl_ms}
        if terms.include is not None:
            lease["include"] = sorted(terms.include)
        try:
            self._frames.send(node_id, OneWayType.TELEMETRY_LEASE, lease)
        except ToolError:
            return False  # offline, or too often: it is sent when it connects, or by the next sweep
        return True


@define(eq=False, repr=False, kw_only=True)
class TelemetryHub:
    """The streams. ``seconds`` is a monotonic clock."""

    _fleet: Fleet
    _frames: NodeFrames
    _authenticator: Authenticator
    _metrics: Metrics
    _refusals: RefusalCounter
    _seconds: Callable[[], float]
    _log: FilteringBoundLogger
    _per_agent: int = PER_AGENT
    _in_all: int = IN_ALL
    _leases: Leases = field(init=False)
    _bytes: HistoryBytes = field(init=False, factory=HistoryBytes)
    _nodes: defaultdict[str, dict[str, Stream]] = field(init=False, factory=lambda: defaultdict(dict))
    _counts: Tally[AgentName] = field(init=False, factory=Tally)
    _listeners: defaultdict[tuple[AgentName, str], dict[object, Notify]] = field(
        init=False, factory=lambda: defaultdict(dict)
    )
    _on_sample: list[OnSample] = field(init=False, factory=list)
    loop: Loop = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._leases = Leases(self._frames, self._seconds)
        self.loop = Loop(self._seconds)
        self._frames.on_frame(OneWayType.TELEMETRY, self._received)
        self._frames.on_connection(self._linked)

    def on_sample(self, listener: OnSample) -> None:
        """Call ``listener`` with every sample that is accepted, and the node that it is of."""
        self._on_sample.append(listener)

    # --- calls

    def admit(self, principal: Principal, tool: Tool, *, followed: bool) -> None:
        """Return if ``principal`` may start another stream, as ``SampleStreams`` describes."""
        stream = self._nodes.get(tool.node_id, {}).get(tool.cap_id)
        if not followed and stream is not None and stream.get(principal.name) is not None:
            return  # it changes the one that it has
        self._check_limits(principal)

    def _check_limits(self, principal: Principal) -> None:
        if self._counts[principal.name] >= self._per_agent or self._counts.total() >= self._in_all:
            text = "Too many subscriptions are open; end one, or wait until one has lapsed."
            raise ToolError(Failure.RATE_LIMITED, text, retry_after_ms=_RETRY_MS)

    async def start(self, call: StreamCall, first: CallAnswer) -> CallAnswer:
        """Start a stream with its first sample, as ``SampleStreams`` describes."""
        if call.following is not None:
            return await self._follow(call, call.following, first)
        name, node_id = call.principal.name, call.tool.node_id

        def notify(_sample: Sample) -> None:
            for listener in list(self._listeners.get((name, node_id), {}).values()):
                listener()

        self._join(call, first, name, notify, lambda _error: None)
        return first

    async def _follow(self, call: StreamCall, following: Following, first: CallAnswer) -> CallAnswer:
        """Send each sample as a notification while that is followed, and return the last one.

        ``progress`` counts the samples, also those that the reader has lost: a gap in it shows how many.
        """
        queue, key, last = SampleQueue(), object(), first.text
        stream, subscription = self._join(call, first, key, queue.put, queue.end)
        progress, missed = 1, 0
        try:
            async with asyncio.timeout(following.for_s):
                while True:
                    params: dict[str, Any] = {
                        "progressToken": following.progress_token,
                        "progress": progress,
                        "message": last,
                    }
                    if missed:
                        self._metrics.telemetry_lost.inc(missed)
                        params["_meta"] = {META_LOST: missed}
                    before = queue.lost
                    await following.emit("notifications/progress", params)
                    if following.most is not None and progress >= following.most:
                        break
                    sample = await queue.get()
                    missed = queue.lost - before
                    progress += 1 + missed
                    subscription.renew(self._seconds())
                    last = stream.shown(sample, subscription.include)
        except (TimeoutError, StreamClosedError):
            pass  # its time is over; or its client has disconnected, and reads no answer
        finally:
            self._leave(stream, key)
        return CallAnswer(last, result=from_json(last))

    def _join(
        self,
        call: StreamCall,
        first: CallAnswer,
        key: Hashable,
        on_sample: Callable[[Sample], None],
        on_end: Callable[[ToolError], None],
    ) -> tuple[Stream, Subscription]:
        tool, now, arguments = call.tool, self._seconds(), call.arguments
        stream = self._nodes.get(tool.node_id, {}).get(tool.cap_id)
        if stream is None or stream.get(key) is None:
            self._check_limits(call.principal)  # others that were admitted meanwhile count too
        if stream is None:
            stream = Stream(tool, call.principal.tenant, History(self._bytes), now)
            self._nodes[tool.node_id][tool.cap_id] = stream
            self._metrics.telemetry_streams.inc()
        if first.result is not None and not stream.history.count:
            stream.history.append(first.result["ts_ms"], first.text)
        subscription = Subscription(
            call.principal,
            arguments["interval_ms"],
            frozenset(arguments["include"]) if "include" in arguments else None,
            on_sample,
            on_end,
            stream.history.count,
        )
        subscription.begin(now)
        if stream.get(key) is None:
            self._counts[call.principal.name] += 1
            self._metrics.telemetry_subscriptions.inc()
        stream.add(key, subscription)
        self._leases.update(stream)
        return stream, subscription

    def _leave(self, stream: Stream, key: Hashable) -> None:
        """Remove a subscription; the last one ends its stream."""
        subscription = stream.remove(key)
        if subscription is None:
            return
        self._counts[subscription.principal.name] -= 1
        self._metrics.telemetry_subscriptions.dec()
        if len(stream):
            self._leases.update(stream)
            return
        self._leases.stop(stream)
        stream.history.clear()
        of_node = self._nodes[stream.tool.node_id]
        del of_node[stream.tool.cap_id]
        if not of_node:
            del self._nodes[stream.tool.node_id]
        self._metrics.telemetry_streams.dec()

    # --- readers and listeners of the resource

    def streams_of(self, principal: Principal, node_id: str) -> list[Stream]:
        """Return the streams of a node whose tools ``principal`` may call, its own ones first."""
        streams = self._nodes.get(node_id, {}).values()
        allowed = [stream for stream in streams if self._denied(stream, principal) is None]
        return sorted(allowed, key=lambda stream: (stream.get(principal.name) is None, stream.tool.cap_id))

    def renewed(self, principal: Principal, stream: Stream) -> Subscription | None:
        """Renew the lease of the agent's subscription of ``stream``, if it has one, and return it.

        It ends with the token that expires last: its agent may read by others that end sooner.
        """
        subscription = stream.get(principal.name)
        if subscription is not None:
            subscription.principal = max(subscription.principal, principal, key=lambda each: each.expires_s)
            subscription.renew(self._seconds())
        return subscription

    def renew_own(self, principal: Principal, node_id: str) -> None:
        """Renew the agent's subscriptions of the node."""
        for stream in self.streams_of(principal, node_id):
            self.renewed(principal, stream)

    def listen(self, principal: Principal, node_id: str, notify: Notify) -> Callable[[], None]:
        """Call ``notify`` with each sample of the node at the cadence of the agent's own subscriptions.

        Returns what ends that, and with the agent's last listener of the node its subscriptions.
        """
        place, key = (principal.name, node_id), object()
        self._listeners[place][key] = notify
        self.renew_own(principal, node_id)

        def stop() -> None:
            listeners = self._listeners.get(place, {})
            if listeners.pop(key, None) is None or listeners:
                return
            del self._listeners[place]
            for stream in list(self._nodes.get(node_id, {}).values()):
                self._leave(stream, principal.name)

        return stop

    # --- nodes

    def _received(self, node: NodeRef, payload: Telemetry) -> None:
        stream, now = self._nodes.get(node.node_id, {}).get(payload["cap_id"]), self._seconds()
        if stream is None or stream.leased is None or stream.tenant != node.tenant:
            self._metrics.telemetry_samples.labels("unasked").inc()
            return
        interval_s = stream.leased.interval_ms / 1000
        if not stream.cadence.takes(now, interval_s, interval_s / 2):
            self._metrics.telemetry_samples.labels("early").inc()
            return
        try:
            answer = checked({"ok": True, "result": payload["sample"]}, stream.tool, {})
        except ToolError:
            self._metrics.telemetry_samples.labels("invalid").inc()
            if self._refusals.count(RefusalEvent.FRAME_DROPPED, node.node_id, RefusalReason.SAMPLE_INVALID):
                self._log.warning("sample not accepted", node_id=node.node_id)
            return
        self._metrics.telemetry_samples.labels("accepted").inc()
        for key, error in stream.take(payload["sample"]["ts_ms"], answer.text, now).items():
            self._log.error("a subscriber cannot take a sample", node_id=node.node_id, exc_info=error)
            if (subscription := stream.get(key)) is not None:
                self._leave(stream, key)
                subscription.on_end(ToolError(Failure.INTERNAL))
        for listener in self._on_sample:
            listener(node.node_id, answer.result or {})

    def _linked(self, node: NodeRef, connected: bool) -> None:  # noqa: FBT001 - as ConnectionHandler
        if not connected:
            self._leases.lost(node.node_id)
            return
        for stream in self._nodes.get(node.node_id, {}).values():
            stream.leased = None  # a node that was restarted has none
            self._leases.update(stream)

    # --- time and trust

    async def run(self) -> None:
        while True:
            self.loop.busy(SWEEP_S + _ROUND_S)
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def revoke(self, jtis: Collection[str]) -> None:
        """End the subscriptions that were made with one of these tokens."""

        def reason(_stream: Stream, subscription: Subscription) -> ToolError | None:
            return ToolError(Failure.TOKEN_REFUSED) if subscription.principal.jti in jtis else None

        self._end(reason)

    def sweep(self) -> None:
        """End what has lapsed or is not allowed any more, and renew the leases of the rest."""
        self._leases.stop_pending()
        self._end(self._over)
        for stream in self._streams():
            self._leases.update(stream)

    def _over(self, stream: Stream, subscription: Subscription) -> ToolError | None:
        now, principal = self._seconds(), subscription.principal
        if (error := self._denied(stream, principal)) is not None:
            return error
        if self._listeners.get((principal.name, stream.tool.node_id)):
            subscription.renew(now)
        if subscription.expires_s > now:
            return None
        silent = now - stream.received_s >= lease_s(subscription.interval_s)
        if silent:
            # Its row says that the command was never sent.
            return ToolError(Failure.NODE_OFFLINE, "The node had answered, and sends nothing any more.")
        return ToolError(Failure.DEADLINE_EXCEEDED)

    def _denied(self, stream: Stream, principal: Principal) -> ToolError | None:
        try:
            self._authenticator.check(principal)
            self._fleet.resolve(stream.tool.canonical, principal.rights)
        except TokenError:
            return ToolError(Failure.TOKEN_REFUSED)
        except ToolError as error:
            return error
        return None

    def _end(self, reason: Callable[[Stream, Subscription], ToolError | None]) -> None:
        for stream in self._streams():
            for key, subscription in stream:
                if (error := reason(stream, subscription)) is not None:
                    self._leave(stream, key)
                    subscription.on_end(error)

    def _streams(self) -> list[Stream]:
        return [stream for of_node in self._nodes.values() for stream in of_node.values()]
