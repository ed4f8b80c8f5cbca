import json

import pytest

from kubelet.announce.mqtt import MqttPublisher, publish_all
from schemas.addresses import BrokerAddress
from schemas.process.logs import make_logger
from tests.fakes.chance import short_waits
from tests.fakes.lines import LogLines
from tests.fakes.mqtt_listener import MqttListener

pytestmark = pytest.mark.integration

BOUND_S = 10
NO_BROKER = BrokerAddress("127.0.0.1", 9)
MESSAGES = [("a-node/identity", b"leaf"), ("a-node/announce", b"manifest")]


def publisher_to(broker: BrokerAddress, log: LogLines) -> MqttPublisher:
    return MqttPublisher(broker, "a-command", make_logger("kubelet", log), short_waits())


async def test_all_messages_are_confirmed_retained_and_in_order(broker: BrokerAddress, log: LogLines) -> None:
    publisher = publisher_to(broker, log)
    async with MqttListener(broker, "a-node/+").listening() as listener:
        assert await publish_all(publisher, MESSAGES, BOUND_S) is True
        came = [await listener.next() for _ in MESSAGES]
    assert [(message.topic, message.payload) for message in came] == MESSAGES
    async with MqttListener(broker, "a-node/+").listening() as late:
        assert all([(await late.next()).retained for _ in MESSAGES])


async def test_a_broker_that_is_not_there_has_confirmed_nothing(log: LogLines) -> None:
    assert await publish_all(publisher_to(NO_BROKER, log), MESSAGES, timeout_s=0.05) is False
    assert json.loads(log.getvalue().splitlines()[0])["event"] == "broker not reached"
