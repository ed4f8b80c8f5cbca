"""Frames on their way to another relay, which answers as the test says, and samples over a nats-server."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from nats.aio.client import Client

from relay.cluster.frame_queues import (
    MAX_QUEUED_BYTES,
    MAX_WAITING,
    FrameQueues,
    NodeAt,
    QueuedFrame,
    SampleSubjects,
)
from relay.cluster.messages import PeerMessages
from relay.routing.peers import NoResponderError, PeerHandler
from relay.routing.port import NodeRef
from schemas.errors import Failure, ToolError
from schemas.frame_types import OneWayType
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource
from tests.fakes.cluster_server import FLEET, NatsServer
from tests.fakes.lines import LogLines
from tests.fakes.polling import BOUND_S, until
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, TENANT

SESSION, NEXT_SESSION = "01HZX9K3M4P7Q8R9S0T1V2W3XC", "01HZX9K3M4P7Q8R9S0T1V2W3XD"
NODE = NodeRef(TENANT, NODE_ID, SESSION)
AT = NodeAt(NODE, "another relay")
BUSY = ToolError(Failure.RATE_LIMITED, retry_after_ms=70)


class PlayedPeers:
    """The other relays: each question ends with the next of ``ends``, or is taken.

    Attributes:
        asked: the numbers of the frames, as they were asked.
        held: while it is clear, no question ends.
    """

    relay = "this relay"

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.ends: list[Exception] = []
        self.held = asyncio.Event()
        self.held.set()

    def running(self) -> Collection[str]:
        return [AT.relay]

    def relay_of(self, _node_id: str) -> str | None:
        return AT.relay

    def answer(self, _kind: str, _handler: PeerHandler) -> None:
        raise AssertionError("queues ask, and do not answer")

    async def ask(
        self, _relay: str, _kind: str, body: Mapping[str, Any], _timeout_s: float
    ) -> Mapping[str, Any]:
        self.asked.append(body["payload"]["number"])
        await self.held.wait()
        if self.ends:
            raise self.ends.pop(0)
        return {}


class Stage:
    """The queues, and what they have told."""

    def __init__(self) -> None:
        self.peers = PlayedPeers()
        self.lines = LogLines()
        self.prepared: list[QueuedFrame] = []
        self.lost: list[tuple[NodeAt, Mapping[str, Any]]] = []
        self.counted: list[str] = []
        self.slept: list[float] = []
        self.queues = FrameQueues(
            self.peers,
            before=self._before,
            lost=lambda where, frame: self.lost.append((where, frame.payload)),
            count=lambda _kind, _side, event: self.counted.append(event),
            log=make_logger("relay", self.lines),
            sleep=self._sleep,
        )

    async def _before(self, _where: NodeAt, frame: QueuedFrame) -> None:
        self.prepared.append(frame)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    def put(self, number: int, where: NodeAt = AT, text: str = "") -> None:
        self.queues.put(where, OneWayType.SESSION_MESSAGE, {"number": number, "text": text})


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def test_frames_go_one_by_one_in_their_order(stage: Stage) -> None:
    stage.peers.held.clear()
    for number in range(3):
        stage.put(number)
    await until(lambda: stage.peers.asked)
    assert stage.peers.asked == [0]
    stage.peers.held.set()
    await until(lambda: stage.counted == ["ok"] * 3)
    assert stage.peers.asked == [0, 1, 2]
    assert [frame.payload["number"] for frame in stage.prepared] == [0, 1, 2]
    assert stage.lost == []


async def test_what_is_refused_for_now_is_sent_again_before_the_next(stage: Stage) -> None:
    stage.peers.ends = [BUSY, BUSY]
    stage.put(0)
    stage.put(1)
    await until(lambda: stage.counted == ["ok"] * 2)
    assert stage.peers.asked == [0, 0, 0, 1]
    assert stage.slept == [0.07, 0.07]


async def test_what_is_refused_for_good_is_left_out_and_logged(stage: Stage) -> None:
    stage.peers.ends = [ToolError(Failure.INTERNAL)]
    stage.put(0)
    stage.put(1)
    await until(lambda: stage.counted == ["refused", "ok"])
    assert stage.peers.asked == [0, 1]
    (line,) = stage.lines.entries("frame not taken by another relay")
    assert line["type"] == "session_message"
    assert (line["node_id"], line["relay"]) == (AT.node.node_id, AT.relay)


async def test_what_is_refused_again_and_again_is_given_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cluster.frame_queues._MOST_TRIES", 3)
    stage.peers.ends = [BUSY] * 3
    stage.put(0)
    await until(lambda: stage.counted == ["refused"])
    assert stage.peers.asked == [0, 0, 0]


@pytest.mark.parametrize(
    "end", [TimeoutError(), NoResponderError("none"), ToolError(Failure.NODE_OFFLINE)], ids=type
)
async def test_what_may_have_arrived_is_not_sent_again_and_its_loss_is_told(
    stage: Stage, end: Exception
) -> None:
    stage.peers.ends = [end]
    stage.put(0)
    stage.put(1)
    await until(lambda: stage.lost)
    assert stage.lost == [(AT, {"number": 0, "text": ""})]
    assert stage.counted == ["lost"] * 2
    assert stage.peers.asked == [0]
    stage.put(2)
    await until(lambda: stage.peers.asked == [0, 2])


async def test_a_queue_that_broke_takes_nothing_until_that_was_told(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = asyncio.Event()

    async def waits(_seconds: float) -> None:
        await told.wait()

    monkeypatch.setattr(stage.queues, "_sleep", waits)
    stage.peers.ends = [TimeoutError()]
    stage.put(0)
    await until(lambda: stage.counted == ["lost"])
    with pytest.raises(ToolError) as refused:
        stage.put(1)
    assert refused.value.failure is Failure.NODE_OFFLINE
    stage.put(2, NodeAt(NodeRef(TENANT, OTHER_NODE_ID, SESSION), AT.relay))
    await until(lambda: stage.peers.asked == [0, 2])
    told.set()
    await until(lambda: stage.lost)


async def test_no_more_waits_than_the_bound(stage: Stage) -> None:
    stage.peers.held.clear()
    text = "x" * (MAX_QUEUED_BYTES // 10)
    for number in range(10):
        stage.put(number, text=text)
    with pytest.raises(ToolError) as refused:
        stage.put(10, text=text)
    assert refused.value.failure is Failure.RATE_LIMITED
    assert refused.value.retry_after_ms == 1000
    assert stage.counted == ["refused"]
    await stage.queues.close()


async def test_a_frame_that_does_not_fit_its_type_is_refused(stage: Stage) -> None:
    with pytest.raises(ToolError) as refused:
        stage.put(0, text="x" * OneWayType.SESSION_MESSAGE.max_bytes)
    assert refused.value.failure is Failure.INTERNAL
    assert stage.peers.asked == []


async def test_what_waits_for_a_node_that_has_gone_is_dropped_but_for_its_session(stage: Stage) -> None:
    stage.peers.held.clear()
    later = NodeAt(NodeRef(TENANT, NODE_ID, NEXT_SESSION), AT.relay)
    for where, number in ((AT, 0), (later, 1)):
        stage.put(number, where)
        stage.put(number + 2, where)
    await until(lambda: len(stage.peers.asked) == 2)
    stage.queues.drop(NODE_ID, but=later.node)
    stage.peers.held.set()
    await until(lambda: stage.counted == ["ok"] * 2)
    assert sorted(stage.peers.asked) == [0, 1, 3]
    assert stage.lost == []


async def test_a_fault_of_our_own_ends_one_queue_and_is_logged(stage: Stage) -> None:
    stage.peers.ends = [LookupError("planted")]
    stage.put(0)
    fault = await stage.lines.until("frames not sent")
    assert "LookupError: planted" in fault["exception"]
    stage.put(1)
    await until(lambda: stage.counted == ["ok"])


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


@pytest.mark.integration
async def test_samples_of_a_followed_node_arrive_in_order_and_of_no_other(here: Side, there: Side) -> None:
    await here.subjects.follow(NODE_ID)
    await there.until_read(here)
    for number in range(1, 4):
        there.publish(number, OTHER_NODE)
        there.publish(number)
    await until(lambda: len(here.taken) == 3)
    assert here.taken == [(there.relay, NODE_ID, number) for number in range(1, 4)]


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
async def test_of_the_samples_that_wait_the_oldest_are_dropped(here: Side) -> None:
    for number in range(MAX_WAITING + 2):
        here.publish(number)
    assert here.counted == [("asked", "dropped")] * 2


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
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
