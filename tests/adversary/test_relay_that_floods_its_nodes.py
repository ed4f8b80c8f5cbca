"""Attacker: the relay that a node has connected to. Tried: pings, pongs, fragments and tiny messages as
fast as they go, before the welcome and after it, so that the node's board does nothing else.

What must happen: the node closes after what a relay within the node's limits can send, says so in its
log, and reconnects with backoff.
"""

from collections.abc import AsyncIterator

import pytest

from kubelet.session.link import LinkState
from schemas.frames import FrameReader
from schemas.registry import SchemaRegistry
from tests.fakes.linked_node import LinkedNode
from tests.fakes.played_relay import PlayedRelay
from tests.fakes.signer import SimulatedNode

MANY = 100_000


@pytest.fixture
async def relay(reader: FrameReader) -> AsyncIterator[PlayedRelay]:
    async with PlayedRelay(reader).running() as relay:
        yield relay


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True) -> bytes:
    """Return one frame as a server sends it: without a mask."""
    return bytes([fin << 7 | opcode, len(payload)]) + payload


@pytest.mark.parametrize(
    "flood",
    [
        pytest.param(frame(9) * MANY, id="pings"),
        pytest.param(frame(10) * MANY, id="pongs"),
        pytest.param(frame(1, b"{", fin=False) + frame(0, fin=False) * MANY, id="fragments"),
        pytest.param(
            frame(1, b'{"type":"bye"}'[:0]) * 0 + frame(1, b"", fin=False) + frame(9) * MANY, id="mixed"
        ),
    ],
)
@pytest.mark.parametrize("welcome", [False, True], ids=["before the welcome", "after it"])
async def test_the_node_closes_the_connection(
    relay: PlayedRelay, node: SimulatedNode, registry: SchemaRegistry, flood: bytes, *, welcome: bool
) -> None:
    async with LinkedNode.running(node, relay.url, registry) as linked:
        end = await relay.next()
        if welcome:
            await end.admit()
            await end.accept()
            await linked.until(LinkState.ANNOUNCED)
        end.socket.transport.write(flood)
        await linked.log.until("relay broke the protocol")
        assert await end.until_closed() is None
        await linked.waits.next()
