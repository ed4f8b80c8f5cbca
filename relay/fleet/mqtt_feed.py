"""The relay's subscription to the broker: passes the messages of the devices' topics to the fleet.

A broker that delivers thousands of retained manifests at once has to wait, and calls meanwhile do not.
Messages of all unknown nodes together have one rate limit, since ids cost nothing to invent. Must not judge.

The connection is paho's client, whose socket the event loop reads and writes: a thread of paho's would wake
the loop for messages one by one. What arrives within a pause is one batch; while it is taken, nothing is
read: the broker waits, and nothing is lost.
"""

import asyncio
import errno
import os
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import paho.mqtt.client as paho
from attrs import define, field
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.reasoncodes import ReasonCode
from structlog.typing import FilteringBoundLogger

from relay.audit.refusal_counts import RefusalCounter, RefusalEvent, RefusalReason
from relay.fleet.fleet import Fleet
from relay.limits.rate_limits import Allowance, KeyedLimiters
from relay.observability.metrics import Metrics
from schemas import topics
from schemas.addresses import BrokerAddress
from schemas.errors import ToolError
from schemas.faults import connection_reason
from schemas.health import Loop
from schemas.identity import MAX_PEM_BYTES
from schemas.manifest import MAX_MANIFEST_BYTES
from schemas.pacing import Backoff, TokenBucket
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable
from schemas.threads import NoThreadError, started

MqttMessage = tuple[str, bytes]
"""A topic and a payload."""
OnState = Callable[[bool, str], None]
"""Called with whether the broker is connected and has granted the subscription, and the reason."""
TakeMessages = Callable[[Sequence[MqttMessage]], Awaitable[None]]

PAUSE_S = 0.1
"""After a few messages: waking up costs as much as several of them."""
_MANY = 16
"""After as many there is no pause: a broker that sends what it retains waits for them to be acknowledged."""
_FIRST_WAIT_S = 1.0
_KEEPALIVE_S = 30
_KEEPALIVE_CHECK_S = 1.0
_TURN_S = 120.0
_STOP_S = 2.0
_BATCH_BYTES = 64 * 1024
_NO_ANSWER = "it ended the connection without an answer, as when its store is full: see its log"
_NO_TOPIC = ""
"""In the place of one that is not UTF-8. A topic has at least one character (MQTT 3.1.1 section 4.7.3)."""


@define(eq=False, repr=False, kw_only=True, slots=False)
class MqttConnection:
    """A connection to ``broker``; ``tls`` has the roots to trust and the certificate to present, if TLS.

    ``largest`` bounds what is kept of a payload: of a larger one, one byte more, which shows that it is.
    ``longest_wait_s`` bounds the backoff between two attempts to connect, which doubles from one second.
    ``progress`` is that of ``run``.
    """

    _broker: BrokerAddress
    _client_id: str
    _subscriptions: list[tuple[str, int]]
    _largest: int
    _changed: OnState
    _refused: Callable[[str], None]
    _progress: Loop
    _log: FilteringBoundLogger
    _tls: ssl.SSLContext | None
    _longest_wait_s: float
    _keepalive_s: int = _KEEPALIVE_S
    _sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _answered: bool = field(init=False, default=False)
    _batch: list[MqttMessage] = field(init=False, factory=list)
    _readable: asyncio.Future[None] | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._backoff = Backoff(_FIRST_WAIT_S, self._longest_wait_s)
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id=self._client_id, protocol=MQTTProtocolVersion.MQTTv311
        )
        if self._tls is not None:
            self._client.tls_set_context(self._tls)
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = self._on_subscribe
        self._client.on_disconnect = self._on_disconnect
        self._client.on_socket_close = self._on_socket_close
        self._client.on_message = self._on_message

    async def run(self, take: TakeMessages) -> None:
        """Stay connected and subscribed, and have ``take`` handle what arrives, until cancelled."""
        self._client.connect_async(self._broker.host, self._broker.port, self._keepalive_s)
        try:
            while True:
                self._progress.busy(_TURN_S)
                try:
                    await self._connect()
                    await self._serve(take)
                except Exception as error:  # noqa: BLE001 - a broker must not end the relay
                    self._log.error("broker not understood", broker=str(self._broker), exc_info=error)
                    self._client.disconnect()
                wait_s = self._backoff.next_s()
                self._progress.busy(wait_s + _TURN_S)
                await self._sleep(wait_s)
        finally:
            self._client.on_disconnect = None  # it is no loss
            self._client.disconnect()

    def subscribe(self) -> None:
        """Subscribe, also again: the broker then repeats what it retains."""
        self._client.subscribe(self._subscriptions)
        self._write_rest()

    async def _connect(self) -> None:
        self._answered = False
        connecting = _in_thread(self._client.reconnect)
        try:
            await asyncio.wait([connecting])
        except asyncio.CancelledError:
            # What it opens meanwhile is to be closed.
            ended, _ = await asyncio.wait([connecting], timeout=_STOP_S)
            for each in ended:
                each.exception()  # read, so that it is not reported as one that was missed
            raise
        try:
            connecting.result()
        except OSError as error:
            self._changed(False, connection_reason(error))  # noqa: FBT003 - positional, as paho's own callbacks
        self._write_rest()

    async def _serve(self, take: TakeMessages) -> None:
        count = 0
        while self._client.socket() is not None:
            self._progress.busy(_TURN_S)
            if not count:
                await self._until_readable()
            count = await self._read_all(take)
            self._client.loop_misc()
            self._write_rest()
            if count:
                await self._sleep(PAUSE_S if count < _MANY else 0)

    async def _read_all(self, take: TakeMessages) -> int:
        """Have all that can be read now taken; return how many messages that were."""
        count = 0
        while self._read_batch():
            batch, self._batch = self._batch, []
            count += len(batch)
            await take(batch)
        return count

    async def _until_readable(self) -> None:
        """Wait until there is something to read, at most until the keepalive is to be checked."""
        connection = self._client.socket()
        if connection is None:
            return
        loop = asyncio.get_running_loop()
        self._readable = loop.create_future()
        # Once: the socket stays readable until it is read.
        loop.add_reader(connection.fileno(), _settle, self._readable)
        timer = loop.call_later(_KEEPALIVE_CHECK_S, _settle, self._readable)
        try:
            await self._readable
        finally:
            timer.cancel()
            if self._client.socket() is connection:
                loop.remove_reader(connection.fileno())

    def _read_batch(self) -> bool:
        """Read messages up to the size of a batch; return whether there are any."""
        size = 0
        while size < _BATCH_BYTES and self._client.socket() is not None:
            count = len(self._batch)
            self._client.loop_read()  # at most one packet
            if len(self._batch) > count:
                size += len(self._batch[-1][1])
            elif not self._has_decrypted():
                break
        self._write_rest()
        return bool(self._batch)

    def _has_decrypted(self) -> bool:
        """Return whether bytes wait in the TLS library, for which the socket does not become readable."""
        connection = self._client.socket()
        return isinstance(connection, ssl.SSLSocket) and connection.pending() > 0

    def _write_rest(self) -> None:
        connection = self._client.socket()
        if connection is not None and self._client.want_write():
            asyncio.get_running_loop().add_writer(connection.fileno(), self._write)

    def _write(self) -> None:
        self._client.loop_write()
        connection = self._client.socket()
        if connection is not None and not self._client.want_write():
            asyncio.get_running_loop().remove_writer(connection.fileno())

    # paho calls these within its own methods, which are called above; it names no types for most arguments.

    def _on_connect(
        self, _client: object, _data: object, _flags: object, code: ReasonCode, _properties: object
    ) -> None:
        self._answered = True
        if code.is_failure:
            self._changed(False, str(code))  # noqa: FBT003 - as above
            return
        self._backoff.reset()
        self._client.subscribe(self._subscriptions)

    def _on_subscribe(
        self, _client: object, _data: object, _mid: int, codes: list[ReasonCode], _properties: object
    ) -> None:
        refusal = next((str(code) for code in codes if code.is_failure), None)
        if refusal is not None:
            self._refused(refusal)
        self._changed(refusal is None, refusal or "subscribed")

    def _on_disconnect(
        self, _client: object, _data: object, _flags: object, code: ReasonCode, _properties: object
    ) -> None:
        self._changed(False, str(code) if self._answered else _NO_ANSWER)  # noqa: FBT003 - as above

    def _on_socket_close(self, _client: object, _data: object, connection: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(connection.fileno())
        loop.remove_writer(connection.fileno())
        if self._readable is not None:
            _settle(self._readable)

    def _on_message(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:
            topic = _NO_TOPIC
        self._batch.append((topic, bytes(message.payload[: self._largest + 1])))


def _in_thread(work: Callable[[], object]) -> asyncio.Future[None]:
    """Run ``work`` in a thread of its own, for which the end of the process does not wait.

    It connects: that resolves a name and completes a TLS handshake, and both can take long.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        failure = None
        try:
            work()
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            failure = error
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(_settle, done, failure)

    try:
        started(threading.Thread(target=run, name="broker connect", daemon=True))
    except NoThreadError:
        # As any other reason for which a connection is not made: it is tried again.
        done.set_exception(OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
    return done


def _settle(future: asyncio.Future[None], failure: Exception | None = None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)


_MAX_BACKOFF_S = 30
# A nats-server that has just started can grant a subscription and send none of its retained messages.
_RESUBSCRIBE_AFTER_S = 5.0
# Ten thousand retained manifests arrive within some seconds of the second subscription.
_CHECK_AFTER_S = 15.0
# How much is done before calls have their turn: whichever is reached first.
_TURN_BYTES = 64 * 1024
_BATCH_S = 0.005
# Unknown nodes wait for their rate, a message after the other.
_MESSAGE_S = 120.0
_LARGEST = max(MAX_MANIFEST_BYTES, MAX_PEM_BYTES)
_MAX_HEARTBEAT_BYTES = 1024
_BYTES_PER_MESSAGE = 8192
# A node publishes three messages a heartbeat, and all of them again with each reconnect.
NODE_RATE = Allowance(rate=10, burst=60, concurrency=1)
# All unknown nodes together: a new relay learns of some thousands at once, of each by its leaf.
UNKNOWN_NODES_RATE = Allowance(rate=500, burst=2000, concurrency=1)


_SUBSCRIPTIONS = [
    (topic, 1) for topic in (topics.ALL_IDENTITIES, topics.ALL_ANNOUNCES, topics.ALL_HEARTBEATS)
]


@define(eq=False, repr=False, kw_only=True, slots=False)
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

    _broker: BrokerAddress
    _client_id: str
    _fleet: Fleet
    _registry: SchemaRegistry
    _metrics: Metrics
    _refusals: RefusalCounter
    _log: FilteringBoundLogger
    _per_node: Allowance = NODE_RATE
    _unknown_nodes: Allowance = UNKNOWN_NODES_RATE
    _monotonic: Callable[[], float] = time.monotonic
    _sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _tls: ssl.SSLContext | None = None
    _longest_wait_s: int = _MAX_BACKOFF_S
    _resubscribe_after_s: float = _RESUBSCRIBE_AFTER_S
    _check_after_s: float = _CHECK_AFTER_S
    connected: bool = field(init=False, default=False)
    is_awaited: bool = field(init=False, default=True)
    _timers: list[asyncio.TimerHandle] = field(init=False, factory=list)
    _reported: str | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.loop = Loop(self._monotonic)
        self._heartbeat = self._registry.load("heartbeat@1.0.0")
        self._limiters: KeyedLimiters[str] = KeyedLimiters(self._monotonic)
        self._unknown = TokenBucket(self._unknown_nodes.rate, self._unknown_nodes.burst, self._monotonic())
        self._connection = MqttConnection(
            broker=self._broker,
            client_id=self._client_id,
            subscriptions=_SUBSCRIPTIONS,
            largest=_LARGEST,
            changed=self._connected,
            refused=self._refused,
            progress=self.loop,
            log=self._log,
            tls=self._tls,
            longest_wait_s=self._longest_wait_s,
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
            if size >= _TURN_BYTES or self._monotonic() - began_s >= _BATCH_S:
                await asyncio.sleep(0)
                began_s, size = self._monotonic(), 0
        await asyncio.sleep(0)

    async def _take(self, topic: str, payload: bytes) -> None:
        parsed = topics.parse(topic)
        if parsed is None:
            self._metrics.messages_dropped.labels("topic").inc()
            return
        node_id, channel = parsed
        cost = 1 + len(payload) / _BYTES_PER_MESSAGE
        if self._fleet.tenant_of(node_id) is None:
            # The broker waits with all messages: a leaf that is dropped would not be published again.
            while (wait_s := self._unknown.take(self._monotonic(), cost)) > 0:
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
                self._fleet.inventory.received(node_id, payload)
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
