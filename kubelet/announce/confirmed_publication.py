"""Retained messages published once, each confirmed by the broker, for commands that end afterwards.

Must not be used by the daemon: it publishes again whenever it connects.
"""

import asyncio
from collections.abc import Sequence

from kubelet.announce.mqtt import MqttPublisher


async def publish_all(
    publisher: MqttPublisher, messages: Sequence[tuple[str, bytes]], timeout_s: float
) -> bool:
    """Connect, publish ``messages``, pairs of topic and payload, in order, and disconnect.

    Returns whether the broker confirmed all; after one that it did not confirm, no other is published.
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
