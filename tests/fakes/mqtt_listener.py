"""A subscriber at a real broker, which hands over to the test what comes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from schemas.addresses import BrokerAddress

BOUND_S = 60


@dataclass(frozen=True, slots=True)
class Message:
    """What came. ``retained``: it lay at the broker before the subscription."""

    topic: str
    payload: bytes
    retained: bool
    qos: int


class MqttListener:
    """Subscribes to ``topic`` with QoS 1."""

    def __init__(self, broker: BrokerAddress, topic: str) -> None:
        self._broker = broker
        self._topic = topic
        self._messages: asyncio.Queue[Message] = asyncio.Queue()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["MqttListener"]:
        """Be subscribed until the end of the block."""
        loop = asyncio.get_running_loop()
        subscribed = asyncio.Event()
        client = paho.Client(CallbackAPIVersion.VERSION2)

        # What names the client would be a cycle, whose sockets a collection of garbage closes one day.
        def on_connect(client: paho.Client, *_: object) -> None:
            client.subscribe(self._topic, qos=1)

        def on_subscribe(*_: object) -> None:
            loop.call_soon_threadsafe(subscribed.set)

        def on_message(_client: object, _data: object, message: paho.MQTTMessage) -> None:
            came = Message(message.topic, bytes(message.payload), message.retain, message.qos)
            loop.call_soon_threadsafe(self._messages.put_nowait, came)

        client.on_connect, client.on_subscribe, client.on_message = on_connect, on_subscribe, on_message
        await asyncio.to_thread(client.connect, self._broker.host, self._broker.port)
        client.loop_start()
        try:
            await asyncio.wait_for(subscribed.wait(), BOUND_S)
            yield self
        finally:
            client.disconnect()
            await asyncio.to_thread(client.loop_stop)

    async def next(self) -> Message:
        return await asyncio.wait_for(self._messages.get(), BOUND_S)

    async def until_silent(self) -> None:
        """Wait until nothing has come for 2.5 s."""
        with suppress(TimeoutError):
            while True:
                await asyncio.wait_for(self._messages.get(), 2.5)
