"""One publication on real brokers, with and without access lists."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schemas.addresses import BrokerAddress
from schemas.process.broker_probe import BrokerProbeError, Publication, probing
from tests.fakes.broker import Broker
from tests.fakes.ports import unused_port
from tests.fakes.signer import NODE_ID

pytestmark = pytest.mark.integration

MESSAGE = Publication(f"$devices/{NODE_ID}/identity", b"PEM", retain=True)
BOUND_S = 10


def plain() -> None:
    """Return the TLS context of a connection without TLS."""


@contextmanager
def refusing(
    kind: str, directory: Path, *, deaf: bool = False, mute: bool = False
) -> Iterator[BrokerAddress]:
    broker = Broker(kind, directory, deaf=deaf, mute=mute)
    broker.start()
    try:
        yield broker.address
    finally:
        broker.stop()


def test_a_broker_confirms_what_is_published_and_delivers_it(broker: BrokerAddress, broker_kind: str) -> None:
    with probing(broker, "probe", plain) as probe:
        arrived = probe.subscribe("$devices/+/identity")
        probe.publish(MESSAGE)
        assert arrived.get(timeout=BOUND_S) == MESSAGE.topic
        # nats-server speaks MQTT 3.1.1 alone.
        assert probe.tells_refusals is (broker_kind == "mosquitto")


def test_a_broker_of_mqtt_5_says_what_its_access_list_refuses(broker_kind: str, tmp_path: Path) -> None:
    with refusing(broker_kind, tmp_path, mute=True) as broker, probing(broker, "probe", plain) as probe:
        if not probe.tells_refusals:
            probe.publish(MESSAGE)  # confirmed, and not delivered: the relay says what it received
            return
        with pytest.raises(BrokerProbeError, match=r"refuses what is published .* Not authorized"):
            probe.publish(MESSAGE)
        probe.try_to_publish(MESSAGE)


def test_a_subscription_that_is_refused_is_no_success(broker_kind: str, tmp_path: Path) -> None:
    with (
        refusing(broker_kind, tmp_path, deaf=True) as broker,
        probing(broker, "probe", plain) as probe,
        pytest.raises(BrokerProbeError, match="refuses the subscription"),
    ):
        probe.subscribe("$devices/+/heartbeat")


def test_a_broker_that_is_not_there_is_named() -> None:
    unused = BrokerAddress("127.0.0.1", unused_port())
    with pytest.raises(BrokerProbeError, match=f"{unused} is not reached"), probing(unused, "probe", plain):
        raise AssertionError


def test_a_broker_that_says_nothing_is_not_waited_for_for_long(free_listener: Callable[[], int]) -> None:
    silent = BrokerAddress("127.0.0.1", free_listener())
    with (
        pytest.raises(BrokerProbeError, match="does not answer"),
        probing(silent, "probe", plain, timeout_s=0.2),
    ):
        raise AssertionError
