"""What a drained subscription still gets, of a real nats-server that reads its UNSUB late."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from nats.aio.client import Client
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from relay.cluster.flushing_client import FlushingClient
from tests.fakes.cluster_server import NatsServer
from tests.fakes.polling import BOUND_S
from tests.fakes.unsubscribe_gate import UnsubscribeGate

pytestmark = pytest.mark.integration

INBOX = "edge.main.inbox"
SUBJECT = "edge.main.cmd.x"


@asynccontextmanager
async def connected(client: Client, nats: NatsServer, port: int) -> AsyncIterator[Client]:
    seed = nats.credentials.read_text()
    await client.connect(
        f"nats://127.0.0.1:{port}", nkeys_seed_str=seed, inbox_prefix=INBOX, allow_reconnect=False
    )
    try:
        yield client
    finally:
        await client.close()


async def test_a_drained_subscription_gets_what_is_sent_before_the_server_has_ended_it(
    nats: NatsServer,
) -> None:
    async with (
        UnsubscribeGate(nats.address).running() as gate,
        connected(FlushingClient(f"{INBOX}.probe"), nats, gate.port) as client,
        connected(Client(), nats, nats.address.port) as other,
    ):
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        subscription = await client.subscribe(SUBJECT, cb=arrived.put)
        await client.flush()
        gate.arm()
        draining = asyncio.create_task(subscription.drain())  # type: ignore[no-untyped-call]
        await gate.holds.wait()
        await other.publish(SUBJECT, b"the last")
        async with asyncio.timeout(BOUND_S):
            assert (await arrived.get()).data == b"the last"
        assert not draining.done()
        gate.open()
        await draining
        with pytest.raises(NoRespondersError):
            await other.request(SUBJECT, b"", BOUND_S)


async def test_a_flush_that_no_server_answers_is_given_up(nats: NatsServer) -> None:
    client = FlushingClient(f"{INBOX}.probe")
    async with UnsubscribeGate(nats.address).running() as gate, connected(client, nats, gate.port):
        subscription = await client.subscribe(SUBJECT)
        await client.flush()
        gate.arm()
        await subscription.unsubscribe()
        await gate.holds.wait()
        with pytest.raises(NatsTimeoutError):
            await client.flush(0.1)
