"""One real publication on a broker, with what the broker says of it.

A broker of MQTT 3.1.1 confirms also what its access list refuses; one of MQTT 5 says so. Must not know what
is published, and must not be used by a daemon: it blocks.
"""

import queue
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from schemas.addresses import BrokerAddress
from schemas.error_roots import PeerError

if TYPE_CHECKING:
    from paho.mqtt.reasoncodes import ReasonCode

TIMEOUT_S = 5.0
_KEEPALIVE_S = 30
_T = TypeVar("_T")
_VERSIONS = (MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311)


class BrokerProbeError(PeerError):
    """The broker was not reached, or refuses; the text says what."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What is published: its topic, its payload, and whether the broker is to retain it."""

    topic: str
    payload: bytes
    retain: bool = False


class BrokerProbe:
    """A connection that speaks the newest version of MQTT that the broker does.

    Attributes:
        tells_refusals: whether the broker says when it refuses a publication.
    """

    def __init__(self, client: paho.Client, *, tells_refusals: bool, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self.tells_refusals = tells_refusals

    def publish(self, message: Publication) -> None:
        """Publish ``message``, and wait for the broker's confirmation.

        Raises:
            BrokerProbeError: it refuses, or does not confirm.
        """
        confirmed: queue.Queue[ReasonCode] = queue.Queue()
        self._client.on_publish = lambda _c, _d, _mid, code, _properties: confirmed.put(code)
        self._client.publish(message.topic, message.payload, qos=1, retain=message.retain)
        code = _taken(confirmed, self._timeout_s, "the broker does not confirm what is published")
        if code.is_failure:
            raise BrokerProbeError(f"the broker refuses what is published on {message.topic}: {code}")

    def try_to_publish(self, message: Publication) -> None:
        """Publish ``message``, whatever the broker says of it."""
        try:
            self.publish(message)
        except BrokerProbeError:
            return

    def subscribe(self, topic: str) -> "queue.Queue[str]":
        """Subscribe to ``topic``; return where the topics arrive on which something is published.

        Raises:
            BrokerProbeError: it refuses, or does not answer.
        """
        arrived: queue.Queue[str] = queue.Queue()
        granted: queue.Queue[list[ReasonCode]] = queue.Queue()
        self._client.on_message = lambda _c, _d, message: arrived.put(message.topic)
        self._client.on_subscribe = lambda _c, _d, _mid, codes, _properties: granted.put(codes)
        self._client.subscribe(topic, qos=1)
        for code in _taken(granted, self._timeout_s, "the broker does not answer the subscription"):
            if code.is_failure:
                raise BrokerProbeError(f"the broker refuses the subscription to {topic}: {code}")
        return arrived


@contextmanager
def probing(
    broker: BrokerAddress,
    client_id: str,
    tls: Callable[[], ssl.SSLContext | None],
    timeout_s: float = TIMEOUT_S,
    *,
    tries_mqtt_5: bool = True,
) -> Iterator[BrokerProbe]:
    """Hold a connection to ``broker``.

    ``tries_mqtt_5``: not at a broker that is known to speak 3.1.1 alone, whose log the attempt would be in.

    Raises:
        BrokerProbeError: it is not reached, or refuses the connection.
    """
    refusal = ""
    for version in _VERSIONS if tries_mqtt_5 else _VERSIONS[1:]:
        client = paho.Client(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=version)
        if (context := tls()) is not None:
            client.tls_set_context(context)
        try:
            _connect(client, broker, timeout_s)
            yield BrokerProbe(client, tells_refusals=version is _VERSIONS[0], timeout_s=timeout_s)
        except _RefusedError as error:
            refusal = str(error)
            continue
        finally:
            client.disconnect()
            client.loop_stop()
        return
    raise BrokerProbeError(f"{broker} refuses the connection: {refusal}")


class _RefusedError(PeerError):
    """This version of MQTT, or this client, is refused."""


def _connect(client: paho.Client, broker: BrokerAddress, timeout_s: float) -> None:
    answered: queue.Queue[str | None] = queue.Queue()
    client.on_connect = lambda _c, _d, _f, code, _p: answered.put(str(code) if code.is_failure else None)
    client.on_disconnect = lambda _c, _d, _f, code, _p: answered.put(str(code))
    client.connect_timeout = timeout_s
    try:
        client.connect(broker.host, broker.port, _KEEPALIVE_S)
    except OSError as error:
        raise BrokerProbeError(f"{broker} is not reached: {error.strerror or error}") from None
    client.loop_start()
    refusal = _taken(answered, timeout_s, f"{broker} does not answer")
    if refusal is not None:
        raise _RefusedError(refusal)


def _taken(arrived: "queue.Queue[_T]", timeout_s: float, otherwise: str) -> _T:
    try:
        return arrived.get(timeout=timeout_s)
    except queue.Empty:
        raise BrokerProbeError(otherwise) from None
