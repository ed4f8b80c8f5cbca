"""Attacker: a client with a thousand connections, each of them slow. Tried: half a head, a head a
byte at a time, a body that never comes, a WebSocket that never authenticates, a reader that never reads:
all at once.

What must happen: a good client is served as if they were not there. How much later is measured in the
benches; here, each of its calls is answered within the five seconds that RFC-0005 section 7 gives it.
"""

import asyncio
import resource
from contextlib import AsyncExitStack, suppress

import pytest
from websockets.exceptions import ConnectionClosed

from bench.slow import SlowClients
from schemas.delivery import CALL_BUDGET_MS
from tests.fakes.node_end import NodeEnd
from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import NOW_MS

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALL, FEW = 1000, 200
NODE_IDS = [f"01hzx9k3m4p7q8r9s0t1v2w3{letter}y" for letter in "abcde"]
CALLS_A_NODE = 10
"""As many as echo's own limit lets through at once."""


def count() -> int:
    """Return how many there can be: both ends of each are in this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ALL if soft >= 3 * ALL else FEW


async def answer_everything(end: NodeEnd) -> None:
    with suppress(ConnectionClosed):
        while True:
            command = await end.receive("cmd")
            result = {**command.payload["arguments"], "received_at_ms": NOW_MS, "node_id": end.node.node_id}
            await end.acknowledge(command, result)


@pytest.mark.long
async def test_a_good_client_is_served_while_a_thousand_slow_ones_are_connected(relay: ServedRelay) -> None:
    token = relay.hub.token()
    async with AsyncExitStack() as stack:
        for node_id in NODE_IDS:
            end = await stack.enter_async_context(relay.session(relay.hub.ca.issue(node_id)))
            answering = asyncio.create_task(answer_everything(end))
            stack.callback(answering.cancel)
        slow = SlowClients(relay.address.port, count(), relay.hub.token(sub="slow"))
        await stack.enter_async_context(slow.running())
        for number in range(CALLS_A_NODE):
            for node_id in NODE_IDS:
                async with asyncio.timeout(CALL_BUDGET_MS / 1000):
                    reply = await relay.call(f"sysecho.{node_id}.echo.invoke", token, message=str(number))
                assert reply.json()["result"]["structuredContent"]["message"] == str(number)
    assert [code for _, code, _ in relay.calls()] == ["ok", "ok"] * CALLS_A_NODE * len(NODE_IDS)
