"""The relay's subscription to the broker: passes the messages of the devices' topics to the fleet.

A broker that delivers thousands of retained manifests at once has to wait, and calls meanwhile do not.
Messages of all unknown nodes together have one rate limit, since ids cost nothing to invent. Must not judge.
"""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence

from structlog.typing import FilteringBoundLogger

from relay.audit.refusal_counts import RefusalCounter, RefusalEvent, RefusalReason
from relay.fleet.fleet import Fleet
from relay.fleet.mqtt_connection import MqttConnection, MqttMessage
from relay.limits.rate_limits import Allowance, KeyedLimiters
from relay.observability.metrics import Metrics
from schemas import topics
from schemas.addresses import BrokerAddress
from schemas.errors import ToolError
from schemas.health import Loop
from schemas.identity import MAX_PEM_BYTES
from schemas.manifest import MAX_MANIFEST_BYTES
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable
from schemas.token_bucket import TokenBucket

_MAX_BACKOFF_S = 30
# A nats-server that has just started can grant a subscription and send none of its retained messages.
_RESUBSCRIBE_AFTER_S = 5.0
# Ten thousand retained manifests arrive within some seconds of the second subscription.
_CHECK_AFTER_S = 15.0
# How much is done before calls have their turn: whichever is reached first.
_TURN_BYTES = 64 * 1024
_TURN_S = 0.005
# Unknown nodes wait for their rate, a message after the other.
_MESSAGE_S = 120.0
_LARGEST = max(MAX_MANIFEST_BYTES, MAX_PEM_BYTES)
_MAX_HEARTBEAT_BYTES = 1024
_BYTES_LIKE_A_MESSAGE = 8192
# A node publishes three messages a heartbeat, and all of them again with each reconnect.
NODE_RATE = Allowance(rate=10, burst=60, concurrency=1)
# All unknown nodes together: a new relay learns of some thousands at once, of each by its leaf.
UNKNOWN_NODES_RATE = Allowance(rate=500, burst=2000, concurrency=1)


_SUBSCRIPTIONS = [
    (topic, 1) for topic in (topics.ALL_IDENTITIES, topics.ALL_ANNOUNCES, topics.ALL_HEARTBEATS)
]


class MqttFeed:
    """Feeds the fleet from one broker; ``tls`` has the roots to trust and the certificate to present, if TLS.

    ``longest_wait_s`` bounds the backoff between two attempts to connect, which doubles from one second. Each
    connection subscribes again after ``resubscribe_after_s``: the broker then repeats what is retained. What
    has not arrived after ``check_after_s`` is logged as missing.

    Attributes:
        connected: whether the broker is connected and has granted the subscription.
        is_awaited: whether calls have to wait for what the broker retains, as they do for ``check_after_s``
            from the start; later, nodes that it does not send announce themselves by their sessions.
        loop: the progress of ``run``.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        broker: BrokerAddress,
        client_id: str,
        fleet: Fleet,
        registry: SchemaRegistry,
        metrics: Metrics,
        refusals: RefusalCounter,
        log: FilteringBoundLogger,
        per_node: Allowance = NODE_RATE,
        unknown_nodes: Allowance = UNKNOWN_NODES_RATE,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        tls: ssl.SSLContext | None = None,
        longest_wait_s: int = _MAX_BACKOFF_S,
        resubscribe_after_s: float = _RESUBSCRIBE_AFTER_S,
        check_after_s: float = _CHECK_AFTER_S,
    ) -> None:
        self._broker = broker
        self._fleet = fleet
        self._heartbeat = registry.load("heartbeat@1.0.0")
        self._metrics = metrics
        self._refusals = refusals
        self._log = log
        self._per_node = per_node
        self._limiters: KeyedLimiters[str] = KeyedLimiters(monotonic)
        self._unknown_nodes = TokenBucket(unknown_nodes.rate, unknown_nodes.burst, monotonic())
        self._monotonic = monotonic
        self._sleep = sleep
        self._resubscribe_after_s = resubscribe_after_s
        self._check_after_s = check_after_s
        self._timers: list[asyncio.TimerHandle] = []
        self.loop = Loop(monotonic)
        self.connected = False
        self.is_awaited = True
        self._reported: str | None = None
        self._connection = MqttConnection(
            broker=broker,
            client_id=client_id,
            subscriptions=_SUBSCRIPTIONS,
            largest=_LARGEST,
            changed=self._connected,
            refused=self._refused,
            progress=self.loop,
            log=log,
            tls=tls,
            longest_wait_s=longest_wait_s,
        )

    async def run(self) -> None:
        """Stay subscribed, and pass on what arrives, until cancelled."""
        timer = asyncio.get_running_loop().call_later(self._check_after_s, self._await_no_longer)
        try:
            await self._connection.run(self._take_batch)
        finally:
            timer.cancel()
            self._follow_up(connected=False)

    def _await_no_longer(self) -> None:
        self.is_awaited = False
        if not self.connected:
            self._log.warning("going on by the nodes' sessions, without the broker", broker=str(self._broker))

    async def _take_batch(self, messages: Sequence[MqttMessage]) -> None:
        began_s, size = self._monotonic(), 0
        for topic, payload in messages:
            self.loop.busy(_MESSAGE_S)
            try:
                await self._take(topic, payload)
            except Exception as error:  # noqa: BLE001 - a retained message would end the relay at every start
                self._metrics.messages_dropped.labels("internal").inc()
                self._log.error("message not understood", exc_info=error)
            size += len(payload)
            if size >= _TURN_BYTES or self._monotonic() - began_s >= _TURN_S:
                await asyncio.sleep(0)
                began_s, size = self._monotonic(), 0
        await asyncio.sleep(0)

    async def _take(self, topic: str, payload: bytes) -> None:
        parsed = topics.parse(topic)
        if parsed is None:
            self._metrics.messages_dropped.labels("topic").inc()
            return
        node_id, channel = parsed
        cost = 1 + len(payload) / _BYTES_LIKE_A_MESSAGE
        if self._fleet.tenant_of(node_id) is None:
            # The broker waits with all messages: a leaf that is dropped would not be published again.
            while (wait_s := self._unknown_nodes.take(self._monotonic(), cost)) > 0:
                await self._sleep(wait_s)
        try:
            with self._limiters.held(node_id, self._per_node, cost):
                self._dispatch(node_id, channel, payload)
        except ToolError:
            # One node that floods its topic must not take the others' time; its newest messages are repeated.
            self._metrics.messages_dropped.labels(RefusalReason.TOO_MANY).inc()
            self._refusals.count(RefusalEvent.MESSAGE_DROPPED, node_id, RefusalReason.TOO_MANY)

    def _dispatch(self, node_id: str, channel: str, payload: bytes) -> None:
        match channel:
            case "announce" if not payload:
                self._fleet.tombstone(node_id)
            case "announce" if len(payload) <= MAX_MANIFEST_BYTES:
                self._fleet.inventory.announced(node_id, payload)
                self._fleet.offer_manifest(node_id, payload, "broker")
            case "identity" if len(payload) <= MAX_PEM_BYTES:
                if payload:
                    self._fleet.offer_identity(node_id, payload.decode("ascii", "replace"))
            case "heartbeat" if len(payload) <= _MAX_HEARTBEAT_BYTES:
                self._take_heartbeat(node_id, payload)
            case _:
                self._metrics.messages_dropped.labels("size").inc()

    def _take_heartbeat(self, node_id: str, payload: bytes) -> None:
        try:
            beat = loads(payload, max_bytes=_MAX_HEARTBEAT_BYTES)
        except StrictJsonError:
            beat = None
        if not self._heartbeat.is_valid(beat) or beat["node_id"] != node_id:
            self._metrics.heartbeats("malformed").inc()
            self._refusals.count(RefusalEvent.HEARTBEAT_REFUSED, node_id, RefusalReason.MALFORMED)
            return
        self._fleet.inventory.heartbeat(node_id, beat["manifest_etag"])

    def _refused(self, reason: str) -> None:
        self._log.error("broker refuses the subscription", broker=str(self._broker), reason=printable(reason))

    def _connected(self, connected: bool, reason: str) -> None:  # noqa: FBT001 - as the connection calls it
        if connected != self.connected:
            event = "broker connected" if connected else "broker lost"
            self._log.info(event, broker=str(self._broker), reason=printable(reason))
            self._follow_up(connected=connected)
        elif not connected and reason != self._reported:
            # Each reason once: it is tried again every 30 s.
            self._log.warning("broker not reached", broker=str(self._broker), reason=printable(reason))
        self._reported = None if connected else reason
        self.connected = connected

    def _follow_up(self, *, connected: bool) -> None:
        """Subscribe again and check the inventory later, if the broker is connected."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if connected:
            self._fleet.inventory.subscribed()
            later = asyncio.get_running_loop().call_later
            self._timers += (
                later(self._resubscribe_after_s, self._connection.subscribe),
                later(self._check_after_s, self._fleet.inventory.check),
            )
