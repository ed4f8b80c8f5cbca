"""The node's outbound connection to the broker. Publishes, and reads nothing.

paho runs its own thread, reconnects by itself and calls back on that thread; everything is handed to the
event loop before it touches our state. Must not queue: what matters is published again on every connect.
"""

import asyncio
import logging
import math
import ssl
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.reasoncodes import ReasonCode
from structlog.typing import FilteringBoundLogger

from kubelet.backoff import Backoff
from schemas.addresses import BrokerAddress
from schemas.faults import connection_reason
from schemas.text import printable

FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 60.0
_KEEPALIVE_S = 30
_CONFIRM_TIMEOUT_S = 5.0


class MqttPublisher:
    """A connection that is kept up from ``start`` to ``stop``.

    ``backoff`` is how long to wait after an attempt that failed, and after a connection that was lost. It is
    reset only when a connection held for longer than the longest wait: of two machines with one identity the
    broker drops one whenever the other connects, so each of them succeeds every time. ``tls`` is the context
    for a broker over TLS.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        broker: BrokerAddress,
        client_id: str,
        log: FilteringBoundLogger,
        backoff: Backoff,
        tls: ssl.SSLContext | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._log = log
        self._backoff = backoff
        self._monotonic = monotonic
        self._connected_at: float | None = None
        self._on_connect: list[Callable[[], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.connected = False
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id=client_id, protocol=MQTTProtocolVersion.MQTTv311
        )
        # Else paho drops the exception of a callback.
        self._client.enable_logger(logging.getLogger("paho"))
        if tls is not None:
            self._client.tls_set_context(tls)
        self._set_next_wait()
        self._client.on_connect = self._paho_connected
        self._client.on_connect_fail = self._paho_failed
        self._client.on_disconnect = self._paho_disconnected

    @property
    def started(self) -> bool:
        """Whether it has begun to connect."""
        return self._loop is not None

    @property
    def is_live(self) -> bool:
        """Whether paho's thread runs, as far as it was seen."""
        return self._thread is None or self._thread.is_alive()

    def when_connected(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the event loop after every connect, before any other task sees ``connected``.

        What it publishes is then published once: no task can find the new connection and publish the same.
        """
        self._on_connect.append(callback)

    def start(self) -> None:
        """Begin to connect, and go on trying until ``stop``. Returns at once."""
        self._loop = asyncio.get_running_loop()
        self._client.connect_async(self._broker.host, self._broker.port, _KEEPALIVE_S)
        self._client.loop_start()

    async def stop(self) -> None:
        """Disconnect from the broker."""
        self._client.on_disconnect = None  # it is no loss
        self.connected = False
        self._client.disconnect()
        await asyncio.to_thread(self._client.loop_stop)

    def publish(self, topic: str, payload: bytes, *, retain: bool) -> bool:
        """Publish, retained ones with QoS 1, if connected; return whether it was handed to paho."""
        if not self.connected:
            return False
        info = self._client.publish(topic, payload, qos=1 if retain else 0, retain=retain)
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

    def _set_next_wait(self) -> None:
        """Decide on the next wait. On paho's thread, which waits only after it has called back."""
        # paho counts in whole seconds, doubles what it is given, and starts over at every connect: both
        # bounds the same leave it nothing to decide.
        wait_s = max(1, math.ceil(self._backoff.next_s()))
        self._client.reconnect_delay_set(wait_s, wait_s)

    def _hand_over(self, action: Callable[[Any], None], argument: object) -> None:
        self._thread = threading.current_thread()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action, argument)

    def _connected(self, code: ReasonCode) -> None:
        if code.is_failure:
            self._log.warning(
                "broker refused the connection", broker=str(self._broker), reason=printable(str(code))
            )
            return
        self.connected = True
        self._log.info("broker connected", broker=str(self._broker))
        for callback in self._on_connect:
            callback()

    def _disconnected(self, reason: str) -> None:
        if self.connected:
            self._log.warning("broker lost", broker=str(self._broker), reason=printable(reason))
        else:
            self._log.info("broker not reached", broker=str(self._broker), reason=printable(reason))
        self.connected = False
