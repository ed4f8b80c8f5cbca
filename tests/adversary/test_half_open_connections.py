"""Attacker: one who cuts cables, or freezes a node that was admitted. Tried: a connection that is there but
never answers a ping, one that never reads, and one that never answers the relay's close.

What must happen: the relay notices, ends the connection and calls the node offline; a call fails at once with
``E_NODE_OFFLINE``, not at its deadline. A lost connection is no refusal: there is no line in the audit for
it.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fakes.frames import frame_text
from tests.fakes.hub import Hub
from tests.fakes.raw_http import until_cut, ws_frame
from tests.fakes.served_relay import ServedRelay
from tests.fakes.serving import Server
from tests.fakes.signer import NODE_ID, TENANT, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"


@pytest_asyncio.fixture(loop_scope="module")
async def relay(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ServedRelay]:
    """A relay that pings so often that it fits into a test."""
    monkeypatch.setattr("relay.http.listener._PING_INTERVAL_S", 0.05)
    monkeypatch.setattr("relay.http.listener._PING_TIMEOUT_S", 0.05)
    async with Server.running() as server, ServedRelay.open(hub, server) as relay:
        yield relay


async def test_a_node_that_answers_no_ping_is_offline(relay: ServedRelay, node: SimulatedNode) -> None:
    relay.hub.announce(node)
    reader, writer = await relay.admitted(node)
    assert await until_cut(reader, writer) == 1011
    await relay.until_idle()
    assert [known.connected for known in relay.hub.nodes_of(TENANT)] == [False]
    assert (await relay.call(ECHO_NAME)).error()["code"] == "E_NODE_OFFLINE"
    assert relay.calls() == [("allow", "ok", NODE_ID), ("error", "E_NODE_OFFLINE", NODE_ID)]
    assert relay.refusals() == []


async def test_a_node_that_reads_nothing_is_offline(relay: ServedRelay, node: SimulatedNode) -> None:
    relay.hub.announce(node)
    _, writer = await relay.admitted(node)
    transport = writer.transport
    assert isinstance(transport, asyncio.ReadTransport)
    transport.pause_reading()
    # Frames that the relay answers, until it can get rid of no more answers.
    heartbeat = ws_frame(frame_text("heartbeat").encode())
    async with asyncio.timeout(30):
        while not relay.is_idle:
            writer.write(heartbeat * 100)
            await asyncio.sleep(0)
    writer.close()
    assert [known.connected for known in relay.hub.nodes_of(TENANT)] == [False]
    assert (await relay.call(ECHO_NAME)).error()["code"] == "E_NODE_OFFLINE"
