"""Frames on their way to another relay, which answers as the test says."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from relay.cluster.frame_queues import MAX_QUEUED_BYTES, FrameQueues, NodeAt, QueuedFrame
from relay.routing.peers import NoResponderError, PeerHandler
from relay.routing.port import NodeRef
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from schemas.process.logs import make_logger
from tests.fakes.lines import LogLines
from tests.fakes.polling import until
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
