"""The node's outbound connection to the broker, and what stands for it where there is none.

Publishes, and reads nothing. paho runs its own thread, reconnects by itself and calls back on that thread;
everything is handed to the event loop before it touches our state. Must not queue: what matters is published
again on every connect, and when there is room again for what paho refused. Must not know a node's messages.
"""

import asyncio
import logging
import math
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.reasoncodes import ReasonCode
from structlog.typing import FilteringBoundLogger

from schemas.addresses import BrokerAddress
from schemas.faults import connection_reason
from schemas.health import Health, Loop
from schemas.pacing import Backoff
from schemas.text import printable

FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 60.0
_KEEPALIVE_S = 30
MAX_UNCONFIRMED = 16
"""A node's retained messages that wait for the confirmation. paho keeps them across connections."""
_CONFIRM_TIMEOUT_S = 5.0
_STOP_S = 2.0
_TURN_S = 120.0
"""How long paho's thread may take to connect: name resolution alone takes half a minute."""


def _is_no_failed_connect(record: logging.LogRecord) -> bool:
    """Return whether a line of paho says more than its callback for a connection that was not made."""
    return not record.getMessage().startswith("Client is not connected")


class WatchedClient(paho.Client):
    """paho's client with a network thread that is watched: both must be set before it is started.

    Attributes:
        on_turn: called in each turn of the thread, about once a second while there is a connection.
        on_end: called when the thread ends, by ``disconnect`` or by a fault.
    """

    on_turn: Callable[[], None]
    on_end: Callable[[], None]

    def __init__(self, client_id: str) -> None:
        super().__init__(
            CallbackAPIVersion.VERSION2, client_id=client_id, protocol=MQTTProtocolVersion.MQTTv311
        )
        # Else paho drops the exception of a callback.
        log = logging.getLogger("paho")
        log.addFilter(_is_no_failed_connect)
        self.enable_logger(log)

    def disconnect(self, *arguments: Any, **options: Any) -> MQTTErrorCode:
        """Disconnect for good. That its thread then finds the connection closed is no fault."""
        self.disable_logger()
        return super().disconnect(*arguments, **options)

    def loop_stop(self) -> MQTTErrorCode:
        """Wait for the end of paho's thread, and close the sockets that woke it.

        paho leaves them to the garbage collector, which warns of them where it finds them before the client.
        """
        ended = super().loop_stop()
        self._reset_sockets(sockpair_only=True)
        return ended

    def loop_misc(self) -> MQTTErrorCode:
        self.on_turn()
        return super().loop_misc()

    def loop_forever(self, *arguments: Any, **options: Any) -> MQTTErrorCode:
        try:
            return super().loop_forever(*arguments, **options)
        finally:
            self.on_end()


class MqttPublisher:
    """A connection that is kept up from ``start`` to ``stop``.

    ``backoff`` is how long to wait after an attempt that failed, and after a connection that was lost. It is
    reset only when a connection held for longer than the longest wait: of two machines with one identity the
    broker drops one whenever the other connects, so each of them succeeds every time. ``tls`` is the context
    for a broker over TLS. ``nodes`` is how many nodes publish by this connection.

    Attributes:
        refused: how many messages paho did not take, since too many wait for a confirmation.
        ended: set when paho's thread has ended, by ``stop`` or by a fault.
        loop: the progress of that thread.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        broker: BrokerAddress,
        client_id: str,
        log: FilteringBoundLogger,
        backoff: Backoff,
        tls: ssl.SSLContext | None = None,
        *,
        nodes: int = 1,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._log = log
        self._backoff = backoff
        self._monotonic = monotonic
        self._connected_at: float | None = None
        self._on_connect: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.loop = Loop(monotonic)
        self.connected = False
        self.refused = 0
        self._refused_since = False
        self._last_retained: int | None = None
        self.ended = asyncio.Event()
        self._client = WatchedClient(client_id)
        self._client.max_queued_messages_set(MAX_UNCONFIRMED * nodes)
        self._client.on_turn = lambda: self.loop.busy(_TURN_S)
        self._client.on_end = lambda: self._hand_over(self.ended.set)
        if tls is not None:
            self._client.tls_set_context(tls)
        self._set_next_wait()
        self._client.on_connect = self._paho_connected
        self._client.on_connect_fail = self._paho_failed
        self._client.on_disconnect = self._paho_disconnected
        self._client.on_publish = self._paho_published

    @property
    def health(self) -> Health:
        return Health.of(
            self.loop, ready=self.connected, state="connected" if self.connected else "connecting"
        )

    def when_connected(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the event loop after every connect, before any other task sees ``connected``.

        What it publishes is then published once: no task can find the new connection and publish the same.
        It is called again where paho refused some of it, as after connections that were lost before all was
        confirmed: once what was published before is.
        """
        self._on_connect.append(callback)

    def start(self) -> None:
        """Begin to connect, and go on trying until ``stop``. Returns at once."""
        self._loop = asyncio.get_running_loop()
        self._client.connect_async(self._broker.host, self._broker.port, _KEEPALIVE_S)
        self._client.loop_start()

    async def stop(self) -> None:
        self._client.on_disconnect = None  # it is no loss
        self.connected = False
        self._client.disconnect()
        # Its thread may be connecting, for longer than the end of the daemon may take.
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                await asyncio.to_thread(self._client.loop_stop)

    def publish(self, topic: str, payload: bytes, *, retain: bool) -> bool:
        """Publish, retained ones with QoS 1, if connected; return whether it was handed to paho."""
        if not self.connected:
            return False
        info = self._client.publish(topic, payload, qos=1 if retain else 0, retain=retain)
        if info.rc == paho.MQTT_ERR_QUEUE_SIZE:
            self.refused += 1
            self._refused_since = True
        elif retain:
            self._last_retained = info.mid
        return info.rc == paho.MQTT_ERR_SUCCESS

    async def publish_confirmed(self, topic: str, payload: bytes) -> bool:
        """Publish a retained message; return whether the broker has confirmed it."""
        info = self._client.publish(topic, payload, qos=1, retain=True)
        try:
            await asyncio.to_thread(info.wait_for_publish, _CONFIRM_TIMEOUT_S)
            return info.is_published()
        except (RuntimeError, ValueError):  # no connection, or it was lost
            return False

    def _paho_connected(
        self, _client: object, _data: object, _flags: object, code: ReasonCode, _properties: object
    ) -> None:
        if not code.is_failure:
            self._connected_at = self._monotonic()
        self._hand_over(self._connected, code)

    def _paho_failed(self, _client: object, _data: object) -> None:
        # paho passes no reason on, and calls while it handles the exception that has one.
        error = sys.exception()
        self._set_next_wait()
        self._hand_over(self._disconnected, "no answer" if error is None else connection_reason(error))

    def _paho_disconnected(
        self, _client: object, _data: object, _flags: object, code: ReasonCode, _properties: object
    ) -> None:
        connected_at, self._connected_at = self._connected_at, None
        if connected_at is not None and self._monotonic() - connected_at > LONGEST_WAIT_S:
            self._backoff.reset()
        self._set_next_wait()
        self._hand_over(self._disconnected, str(code))

    def _paho_published(
        self, _client: object, _data: object, message_id: int, _code: object, _properties: object
    ) -> None:
        self._hand_over(self._confirmed, message_id)

    def _set_next_wait(self) -> None:
        """Decide on the next wait. On paho's thread, which waits only after it has called back."""
        # paho counts in whole seconds, doubles what it is given, and starts over at every connect: both
        # bounds the same leave it nothing to decide.
        wait_s = max(1, math.ceil(self._backoff.next_s()))
        self._client.reconnect_delay_set(wait_s, wait_s)
        self.loop.busy(wait_s + _TURN_S)

    def _hand_over(self, action: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action, *arguments)

    def _connected(self, code: ReasonCode) -> None:
        if code.is_failure:
            self._log.warning(
                "broker refused the connection", broker=str(self._broker), reason=printable(str(code))
            )
            return
        self.connected = True
        self._log.info("broker connected", broker=str(self._broker))
        self._call_back()

    def _call_back(self) -> None:
        self._refused_since = False
        for callback in self._on_connect:
            callback()

    def _confirmed(self, message_id: int) -> None:
        # Brokers confirm in order: with the last, there is room for all.
        if self._refused_since and message_id == self._last_retained and self.connected:
            self._call_back()

    def _disconnected(self, reason: str) -> None:
        if self.connected:
            self._log.warning("broker lost", broker=str(self._broker), reason=printable(reason))
        else:
            self._log.info("broker not reached", broker=str(self._broker), reason=printable(reason))
        self.connected = False


class NoPublisher:
    """Stands for a connection where the relay has no broker: nothing is ever published, and nothing ends."""

    def __init__(self) -> None:
        self.refused = 0
        self.ended = asyncio.Event()
        self.loop = Loop()

    @property
    def health(self) -> Health:
        return Health.passive(ready=True, state="none: the session alone")

    def when_connected(self, callback: Callable[[], None]) -> None:
        """Do nothing: it never connects."""

    def start(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""

    def publish(self, topic: str, payload: bytes, *, retain: bool) -> bool:  # noqa: ARG002 - as MqttPublisher
        return False


Publisher = MqttPublisher | NoPublisher


async def publish_all(
    publisher: MqttPublisher, messages: Sequence[tuple[str, bytes]], timeout_s: float
) -> bool:
    """Connect, publish ``messages``, pairs of topic and payload, in order, and disconnect.

    For commands that end afterwards: the daemon publishes again whenever it connects. Returns whether the
    broker confirmed all; after one that it did not confirm, no other is published.
    """
    connected = asyncio.Event()
    publisher.when_connected(connected.set)
    publisher.start()
    try:
        async with asyncio.timeout(timeout_s):
            await connected.wait()
            for topic, payload in messages:
                if not await publisher.publish_confirmed(topic, payload):
                    return False
            return True
    except TimeoutError:
        return False
    finally:
        await publisher.stop()
