"""Samples of one relay's nodes, as another reads them over a real nats-server."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from nats.aio.client import Client

from relay.cluster.peer_messages import PeerMessages
from relay.cluster.sample_subjects import MAX_WAITING, SampleSubjects
from relay.routing.port import NodeRef
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource
from tests.fakes.cluster_server import FLEET, NatsServer
from tests.fakes.lines import LogLines
from tests.fakes.polling import BOUND_S, until
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, TENANT

pytestmark = pytest.mark.integration

SESSION = "01HZX9K3M4P7Q8R9S0T1V2W3XC"
NODE, OTHER_NODE = NodeRef(TENANT, NODE_ID, SESSION), NodeRef(TENANT, OTHER_NODE_ID, SESSION)


@dataclass
class Side:
    """One relay's subjects, and what it has taken."""

    relay: str
    registry: SchemaRegistry
    lines: LogLines = field(default_factory=LogLines)
    taken: list[tuple[str, str, int]] = field(default_factory=list)
    counted: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.subjects = SampleSubjects(
            messages=PeerMessages(self.registry, self.relay),
            fleet=FLEET,
            take=self._take,
            ulids=UlidSource(lambda: time.time_ns() // 1_000_000, os.urandom),
            count=lambda _kind, side, event: self.counted.append((side, event)),
            log=make_logger("relay", self.lines),
        )

    def _take(self, relay: str, body: Mapping[str, Any]) -> None:
        self.taken.append((relay, body["node_id"], body["payload"]["number"]))

    def publish(self, number: int, node: NodeRef = NODE) -> None:
        self.subjects.publish(node, {"number": number})

    @asynccontextmanager
    async def connected(self, nats: NatsServer) -> AsyncIterator[Client]:
        """Serve by a connection of its own until the end of the block."""
        client = Client()
        await client.connect(nats.url, nkeys_seed_str=nats.credentials.read_text(), allow_reconnect=False)
        serving = asyncio.create_task(self.subjects.serve(client))
        try:
            yield client
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
            await client.close()

    async def until_read(self, other: "Side", node: NodeRef = NODE) -> None:
        """Return when ``other`` reads the samples of ``node``, which this relay publishes."""

        def read() -> bool:
            self.publish(-1, node)
            return bool(other.taken)

        await until(read)
        # What was published meanwhile has arrived once this has.
        self.publish(0, node)
        await until(lambda: other.taken[-1][2] == 0)
        other.taken.clear()


@pytest.fixture
def here(registry: SchemaRegistry) -> Side:
    return Side("01HZX9K3M4P7Q8R9S0T1V2W3XA", registry)


@pytest_asyncio.fixture
async def there(registry: SchemaRegistry, here: Side, nats: NatsServer) -> AsyncIterator[Side]:
    """Another relay, with both connected."""
    side = Side("01HZX9K3M4P7Q8R9S0T1V2W3XB", registry)
    async with AsyncExitStack() as stack:
        for each in (here, side):
            await stack.enter_async_context(each.connected(nats))
        yield side


async def test_samples_of_a_followed_node_arrive_in_order_and_of_no_other(here: Side, there: Side) -> None:
    await here.subjects.follow(NODE_ID)
    await there.until_read(here)
    for number in range(1, 4):
        there.publish(number, OTHER_NODE)
        there.publish(number)
    await until(lambda: len(here.taken) == 3)
    assert here.taken == [(there.relay, NODE_ID, number) for number in range(1, 4)]


async def test_what_is_followed_twice_arrives_once_and_what_is_not_any_more_does_not(
    here: Side, there: Side
) -> None:
    for node_id in (NODE_ID, NODE_ID, OTHER_NODE_ID):
        await here.subjects.follow(node_id)
    await there.until_read(here)
    there.publish(1)
    await until(lambda: here.taken == [(there.relay, NODE_ID, 1)])
    here.subjects.unfollow(NODE_ID)
    # Of two that are published one after the other, the second alone arrives once the first is not read.
    async with asyncio.timeout(BOUND_S):
        while not here.taken or here.taken[0][1] != OTHER_NODE_ID:
            here.taken.clear()
            there.publish(2)
            there.publish(3, OTHER_NODE)
            await until(lambda: (there.relay, OTHER_NODE_ID, 3) in here.taken)


async def test_what_was_followed_before_the_connection_is_read_during_each(
    here: Side, nats: NatsServer, registry: SchemaRegistry
) -> None:
    there = Side("01HZX9K3M4P7Q8R9S0T1V2W3XB", registry)
    await here.subjects.follow(NODE_ID)
    async with there.connected(nats):
        for _ in range(2):
            async with here.connected(nats):
                await there.until_read(here)
        here.publish(1)
        assert here.counted == []


async def test_what_is_followed_as_the_connection_ends_is_read_during_the_next(
    here: Side, nats: NatsServer, registry: SchemaRegistry
) -> None:
    there = Side("01HZX9K3M4P7Q8R9S0T1V2W3XB", registry)
    async with there.connected(nats):
        async with here.connected(nats) as client:
            await here.subjects.follow(OTHER_NODE_ID)
            await there.until_read(here, OTHER_NODE)
            await client.close()
            await here.subjects.follow(NODE_ID)
        async with here.connected(nats):
            await there.until_read(here)


async def test_of_the_samples_that_wait_the_oldest_are_dropped(here: Side) -> None:
    for number in range(MAX_WAITING + 2):
        here.publish(number)
    assert here.counted == [("asked", "dropped")] * 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"secret": 1}', "document"),
        (OTHER_NODE_ID.encode(), "JSON"),
    ],
)
async def test_what_is_no_sample_is_counted_and_logged_without_its_content(
    here: Side, there: Side, nats: NatsServer, data: bytes, reason: str
) -> None:
    await here.subjects.follow(NODE_ID)
    await there.until_read(here)
    async with there.connected(nats) as client:
        await client.publish(f"edge.{FLEET}.telemetry.{NODE_ID}", data)
        line = await here.lines.until("sample of another relay dropped")
    assert reason in line["reason"]
    assert data.decode() not in str(line)
    assert here.counted == [("answered", "invalid")]
    assert here.taken == []


async def test_a_sample_on_the_subject_of_another_node_is_not_taken(
    here: Side, there: Side, nats: NatsServer, registry: SchemaRegistry
) -> None:
    await here.subjects.follow(NODE_ID)
    await there.until_read(here)
    body = {"node_id": OTHER_NODE_ID, "session_id": SESSION, "type": "telemetry", "payload": {"number": 1}}
    async with there.connected(nats) as client:
        misplaced = PeerMessages(registry, there.relay).ask(SESSION, body)
        await client.publish(f"edge.{FLEET}.telemetry.{NODE_ID}", misplaced)
        line = await here.lines.until("sample of another relay dropped")
    assert line["reason"] == "it is of another node"
    assert here.taken == []


async def test_a_node_that_is_followed_no_longer_while_the_connection_is_made_again_ends_nothing(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    side, other, goes_on = Side("A" * 26, registry), Side("B" * 26, registry), asyncio.Event()
    async with side.connected(nats), other.connected(nats):
        await side.subjects.follow(NODE_ID)
        await side.subjects.follow(OTHER_NODE_ID)
        await other.until_read(side, OTHER_NODE)
    side.counted.clear()
    client = Client()
    await client.connect(nats.url, nkeys_seed_str=nats.credentials.read_text(), allow_reconnect=False)
    subscribe = client.subscribe

    async def held(*arguments: Any, **options: Any) -> Any:
        await goes_on.wait()
        return await subscribe(*arguments, **options)

    client.subscribe = held  # type: ignore[method-assign]  # a server that is slow
    serving = asyncio.create_task(side.subjects.serve(client))
    await asyncio.sleep(0)
    side.subjects.unfollow(OTHER_NODE_ID)
    goes_on.set()
    for number in (1, 2):  # what has ended is unsubscribed between them
        side.publish(number)
        await until(lambda: serving.done() or side.counted.count(("asked", "ok")) == number)  # noqa: B023
    assert not serving.done(), serving.exception()
    serving.cancel()
    await asyncio.wait({serving})
    await client.close()
