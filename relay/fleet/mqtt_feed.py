"""The relay's subscription to the broker: passes the messages of the devices' topics to the fleet.

paho runs its own thread; messages cross to the event loop through a bounded inbox. A broker that delivers
thousands of retained manifests at once has to wait, and calls meanwhile do not. Messages of all unknown nodes
together have one rate limit, since ids cost nothing to invent. Must not judge.
"""

import asyncio
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import paho.mqtt.client as paho
from paho.mqtt.reasoncodes import ReasonCode
from structlog.typing import FilteringBoundLogger

from relay.audit.refusal_counts import RefusalCounter, RefusalEvent
from relay.fleet.fleet import Fleet
from relay.fleet.inbox import Inbox
from relay.observability.metrics import Metrics
from relay.rate_limits import Allowance, KeyedLimiters
from schemas import topics
from schemas.addresses import BrokerAddress
from schemas.errors import ToolError
from schemas.faults import connection_reason
from schemas.health import Loop
from schemas.identity import MAX_PEM_BYTES
from schemas.manifest import MAX_MANIFEST_BYTES
from schemas.process.mqtt_client import WatchedClient
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable
from schemas.token_bucket import TokenBucket

_KEEPALIVE_S = 30
_MAX_BACKOFF_S = 30
# A nats-server that has just started can grant a subscription and send none of its retained messages.
_RESUBSCRIBE_AFTER_S = 5.0
# Ten thousand retained manifests arrive within some seconds of the second subscription.
_CHECK_AFTER_S = 15.0
_INBOX_MESSAGES = 10_000
_INBOX_BYTES = 8 * 1024 * 1024
# How much is done without a pause for calls: whichever is reached first.
_BATCH_BYTES = 64 * 1024
_BATCH_S = 0.005
# Unknown nodes wait for their rate, a message after the other.
_MESSAGE_S = 120.0
_STOP_S = 2.0
_TURN_S = 120.0
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
        loop: the progress of ``run``.
        network: the progress of paho's thread.
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
        self._arrived = asyncio.Event()
        self._is_woken = False
        self.loop, self.network = Loop(monotonic), Loop(monotonic)
        self.connected = False
        self._reported: str | None = None
        self._thread_ended = asyncio.Event()
        self._client = WatchedClient(client_id)
        if tls is not None:
            self._client.tls_set_context(tls)
        self._client.reconnect_delay_set(1, longest_wait_s)
        self._longest_wait_s = longest_wait_s

    async def run(self) -> None:
        """Stay subscribed, and pass on what arrives, until cancelled."""
        loop = asyncio.get_running_loop()

        def arrived() -> None:
            # Waking the event loop costs more than a message: once until it begins to drain.
            if not self._is_woken and not loop.is_closed():
                self._is_woken = True
                loop.call_soon_threadsafe(self._arrived.set)

        inbox = Inbox(arrived, _INBOX_MESSAGES, _INBOX_BYTES)
        self._wire_up(loop, inbox)
        self._client.connect_async(self._broker.host, self._broker.port, _KEEPALIVE_S)
        self._client.loop_start()
        try:
            while True:
                self.loop.waits()
                await self._arrived.wait()
                self._arrived.clear()
                # Before the inbox is read: what arrives from now on wakes the loop again.
                self._is_woken = False
                await self._drain(inbox)
        finally:
            self._follow_up(connected=False)
            self._client.on_disconnect = None  # it is no loss
            self._client.disconnect()
            self._client.on_message = None
            inbox.close()  # paho's thread may be blocked in put
            # It may be connecting, for longer than the end of the relay may take.
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await asyncio.to_thread(self._client.loop_stop)

    async def thread_ended(self) -> None:
        """Wait until paho's thread has ended, which only a fault can cause while ``run`` runs."""
        await self._thread_ended.wait()

    def _wire_up(self, loop: asyncio.AbstractEventLoop, inbox: Inbox) -> None:
        def in_loop(action: Callable[..., None], *arguments: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(action, *arguments)

        def on_connect(
            client: paho.Client, _data: object, _flags: object, code: ReasonCode, _properties: object
        ) -> None:
            if code.is_failure:
                in_loop(self._connected, False, str(code))  # noqa: FBT003 - positional through the loop
                return
            client.subscribe(_SUBSCRIPTIONS)

        def on_subscribe(
            _client: object, _data: object, _mid: int, codes: list[ReasonCode], _properties: object
        ) -> None:
            refused = [code for code in codes if code.is_failure]
            in_loop(self._subscribed, str(refused[0]) if refused else None)

        def on_disconnect(
            _client: object, _data: object, _flags: object, code: ReasonCode, _properties: object
        ) -> None:
            in_loop(self._connected, False, str(code))  # noqa: FBT003 - positional through the loop

        def on_connect_fail(_client: object, _data: object) -> None:
            # paho passes no reason on, and calls while it handles the exception that has one.
            error = sys.exception()
            reason = "no answer" if error is None else connection_reason(error)
            in_loop(self._connected, False, reason)  # noqa: FBT003 - as above

        def on_message(_client: object, _data: object, message: paho.MQTTMessage) -> None:
            # Blocks this thread while the inbox is full: the broker waits, nothing is lost. Of a payload that
            # is too large, one byte more than the limit is kept, which shows that it is.
            inbox.put(message.topic, bytes(message.payload[: _LARGEST + 1]))

        self._client.on_turn = lambda: self.network.busy(_TURN_S)
        self._client.on_end = lambda: in_loop(self._thread_ended.set)
        self._client.on_connect = on_connect
        self._client.on_subscribe = on_subscribe
        self._client.on_disconnect = on_disconnect
        self._client.on_connect_fail = on_connect_fail
        self._client.on_message = on_message

    async def _drain(self, inbox: Inbox) -> None:
        began_s, size = self._monotonic(), 0
        while (message := inbox.take()) is not None:
            self.loop.busy(_MESSAGE_S)
            topic, payload = message
            try:
                await self._take(topic, payload)
            except Exception as error:  # noqa: BLE001 - a retained message would end the relay at every start
                self._metrics.messages_dropped.labels("internal").inc()
                self._log.error("message not understood", exc_info=error)
            size += len(payload)
            if size >= _BATCH_BYTES or self._monotonic() - began_s >= _BATCH_S:
                await asyncio.sleep(0)
                began_s, size = self._monotonic(), 0

    async def _take(self, topic: str, payload: bytes) -> None:
        parsed = topics.parse(topic)
        if parsed is None:
            self._metrics.messages_dropped.labels("topic").inc()
            return
        node_id, channel = parsed
        cost = 1 + len(payload) / _BYTES_LIKE_A_MESSAGE
        if not self._fleet.knows(node_id):
            # The broker waits with all messages: a leaf that is dropped would not be published again.
            while (wait_s := self._unknown_nodes.take(self._monotonic(), cost)) > 0:
                await self._sleep(wait_s)
        try:
            with self._limiters.held(node_id, self._per_node, cost):
                self._dispatch(node_id, channel, payload)
        except ToolError:
            # One node that floods its topic must not take the others' time; its newest messages are repeated.
            self._metrics.messages_dropped.labels("too_many").inc()
            self._refusals.count(RefusalEvent.MESSAGE_DROPPED, node_id, "too_many")

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
            self._metrics.heartbeats.labels("malformed").inc()
            self._refusals.count(RefusalEvent.HEARTBEAT_REFUSED, node_id, "malformed")
            return
        self._fleet.inventory.heartbeat(node_id, beat["manifest_etag"])

    def _subscribed(self, refusal: str | None) -> None:
        if refusal is not None:
            self._log.error(
                "broker refuses the subscription", broker=str(self._broker), reason=printable(refusal)
            )
        self._connected(refusal is None, refusal or "subscribed")

    def _connected(self, connected: bool, reason: str) -> None:  # noqa: FBT001 - positional through the loop
        if not connected:
            self.network.busy(self._longest_wait_s + _TURN_S)
        if connected != self.connected:
            event = "broker connected" if connected else "broker lost"
            self._log.info(event, broker=str(self._broker), reason=printable(reason))
            self._follow_up(connected=connected)
        elif not connected and reason != self._reported:
            # Each reason once: paho tries again every 30 s.
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
                later(self._resubscribe_after_s, self._client.subscribe, _SUBSCRIPTIONS),
                later(self._check_after_s, self._fleet.inventory.check),
            )
