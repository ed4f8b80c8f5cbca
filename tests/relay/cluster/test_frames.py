"""Frames between two relays over a real nats-server, and the leases that a node is sent for all of them."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nats.aio.client import Client

from relay.cluster.frames import (
    MAX_QUEUED_BYTES,
    MAX_WAITING,
    FrameQueues,
    NodeAt,
    QueuedFrame,
    SampleSubjects,
    SharedLeases,
)
from relay.cluster.messages import PeerMessages
from relay.routing.port import NodeRef, NoResponderError, PeerHandler
from schemas.caller_tools import MAX_SESSIONS
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from schemas.payloads import TelemetryLease
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource
from tests.fakes.background import in_background
from tests.fakes.cluster import HeldNodes, Member
from tests.fakes.cluster_server import FLEET, NatsServer
from tests.fakes.fleet_frames import FrameReader
from tests.fakes.lines import LogLines
from tests.fakes.polling import BOUND_S, until
from tests.fakes.relay_keys import link_of
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, TENANT

SESSION = "gogol_20261122_120000_0123abcd"
OPEN = {"session_id": SESSION, "caller_id": "ant", "owner": "a" * 64, "tools": []}
REQUEST = {
    "session_id": SESSION,
    "request_id": "00000000-0000-4000-8000-000000000000",
    "tool": "get_memory",
    "arguments": {"about": "bread"},
}
END = {"session_id": SESSION, "reason": "ended"}


def said(text: str) -> dict[str, Any]:
    """Return what the local agent says in the session."""
    return {"session_id": SESSION, "message": text}


def lease(interval_ms: int = 1000, ttl_ms: int = 30_000, **members: Any) -> dict[str, Any]:
    return {"cap_id": "metrics", "interval_ms": interval_ms, "ttl_ms": ttl_ms, **members}


def sample(number: int) -> dict[str, Any]:
    return {"cap_id": "metrics", "sample": {"number": number}}


def sent(member: Member, type_: OneWayType) -> list[Mapping[str, Any]]:
    """Return the payloads that were sent to the node, of one type."""
    return [payload for _, sent_type, payload in member.nodes.sent if sent_type is type_]


def terms(member: Member) -> list[tuple[int, int]]:
    """Return the leases that were sent to the node: interval, and the seconds that it lasts, rounded."""
    leases = sent(member, OneWayType.TELEMETRY_LEASE)
    return [(sent_lease["interval_ms"], round(sent_lease["ttl_ms"] / 1000)) for sent_lease in leases]


async def connected(asker: Member, owner: Member) -> tuple[FrameReader, FrameReader]:
    """Connect the node to ``owner``, and return what reads frames at both, when both know."""
    here, there = FrameReader(asker.part.frames), FrameReader(owner.part.frames)
    owner.nodes.connect(NODE_ID)
    await here.until_connected(owner.nodes.sessions[NODE_ID])
    return here, there


# --- lent tools


@pytest.mark.integration
async def test_frames_reach_a_node_of_another_relay_in_order_and_its_own_come_back(
    asker: Member, owner: Member
) -> None:
    here, there = await connected(asker, owner)
    asker.part.frames.send(NODE_ID, OneWayType.SESSION_OPEN, OPEN)
    for number in range(20):
        asker.part.frames.send(NODE_ID, OneWayType.SESSION_MESSAGE, said(str(number)))
    await until(lambda: len(owner.nodes.sent) == 21)
    assert sent(owner, OneWayType.SESSION_OPEN) == [OPEN]
    assert sent(owner, OneWayType.SESSION_MESSAGE) == [said(str(number)) for number in range(20)]
    for number in range(20):
        owner.nodes.receive(NODE_ID, OneWayType.SESSION_EVENT, said(str(number)))
    owner.nodes.receive(NODE_ID, OneWayType.CALLER_TOOL, REQUEST)
    await until(lambda: len(here.taken) == 21)
    node = owner.nodes.sessions[NODE_ID]
    assert here.taken == [
        *((node, OneWayType.SESSION_EVENT, said(str(number))) for number in range(20)),
        (node, OneWayType.CALLER_TOOL, REQUEST),
    ]
    assert there.taken == []


@pytest.mark.integration
async def test_a_session_that_no_other_relay_has_opened_is_of_this_relay(
    asker: Member, owner: Member
) -> None:
    here, there = await connected(asker, owner)
    owner.nodes.receive(NODE_ID, OneWayType.CALLER_TOOL, REQUEST)
    asker.part.frames.send(NODE_ID, OneWayType.SESSION_OPEN, OPEN)
    asker.part.frames.send(NODE_ID, OneWayType.SESSION_END, END)
    await until(lambda: bool(sent(owner, OneWayType.SESSION_END)))
    owner.nodes.receive(NODE_ID, OneWayType.SESSION_EVENT, said("late"))
    assert [type_ for _, type_, _ in there.taken] == [OneWayType.CALLER_TOOL, OneWayType.SESSION_EVENT]
    assert here.taken == []


@pytest.mark.integration
async def test_what_no_relay_takes_is_not_sent_twice_and_the_node_is_begun_with_anew(
    asker: Member, owner: Member
) -> None:
    here, _ = await connected(asker, owner)
    node = owner.nodes.sessions[NODE_ID]
    owner.nodes.refusals = [ToolError(Failure.NODE_OFFLINE)]
    asker.part.frames.send(NODE_ID, OneWayType.SESSION_OPEN, OPEN)
    asker.part.frames.send(NODE_ID, OneWayType.SESSION_MESSAGE, said("lost"))
    await until(lambda: here.connections == [(node, True), (node, True)])
    asker.part.frames.send(NODE_ID, OneWayType.SESSION_OPEN, OPEN)
    await until(lambda: bool(owner.nodes.sent))
    assert [type_ for _, type_, _ in owner.nodes.sent] == [OneWayType.SESSION_OPEN]
    assert asker.framed("asked", "lost") == 2


@pytest.mark.integration
async def test_the_end_of_a_session_is_sent_until_it_was_taken_and_before_others_are_opened(
    asker: Member, owner: Member
) -> None:
    here, _ = await connected(asker, owner)
    frames, node = asker.part.frames, owner.nodes.sessions[NODE_ID]
    ends = [{**END, "session_id": f"{SESSION[:-1]}{number}"} for number in range(3)]
    owner.nodes.refusals = [ToolError(Failure.NODE_OFFLINE)]
    frames.send(NODE_ID, OneWayType.SESSION_MESSAGE, said("lost"))
    frames.send(NODE_ID, OneWayType.SESSION_END, ends[0])
    await until(lambda: asker.framed("asked", "lost") == 2)
    with suppress(ToolError):
        frames.send(NODE_ID, OneWayType.SESSION_END, ends[1])
    await until(lambda: here.connections == [(node, True)] * 2)
    await until(lambda: sent(owner, OneWayType.SESSION_END) == ends[:2])
    owner.nodes.lose(NODE_ID)
    await until(lambda: here.connections[-1] == (node, False))
    with pytest.raises(ToolError):
        frames.send(NODE_ID, OneWayType.SESSION_END, ends[2])
    frames.on_connection(lambda *_: frames.send(NODE_ID, OneWayType.SESSION_OPEN, OPEN))
    owner.nodes.connect(NODE_ID, node.session_id)
    await until(lambda: bool(sent(owner, OneWayType.SESSION_OPEN)))
    assert [payload for _, _, payload in owner.nodes.sent] == [*ends, OPEN]


@pytest.mark.integration
async def test_of_the_ends_for_a_node_that_is_away_the_newest_are_kept(asker: Member, owner: Member) -> None:
    ends = [{**END, "session_id": f"{SESSION[:-2]}{number:02x}"} for number in range(MAX_SESSIONS + 1)]
    for end in ends:
        with pytest.raises(ToolError):
            asker.part.frames.send(NODE_ID, OneWayType.SESSION_END, end)
    await connected(asker, owner)
    await until(lambda: sent(owner, OneWayType.SESSION_END)[-1:] == ends[-1:])
    assert sent(owner, OneWayType.SESSION_END) == ends[1:]


@pytest.mark.integration
async def test_the_ends_for_the_nodes_that_were_away_for_longest_are_forgotten(
    asker: Member, owner: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cluster.frames.MAX_ENDED", 1, raising=False)
    for node_id in (NODE_ID, OTHER_NODE_ID):
        with pytest.raises(ToolError):
            asker.part.frames.send(node_id, OneWayType.SESSION_END, END)
    await connected(asker, owner)
    asker.part.frames.send(NODE_ID, OneWayType.SESSION_MESSAGE, said("first"))
    await until(lambda: bool(sent(owner, OneWayType.SESSION_MESSAGE)))
    assert sent(owner, OneWayType.SESSION_END) == []


@pytest.mark.integration
async def test_a_frame_that_does_not_fit_its_document_goes_no_further(asker: Member, owner: Member) -> None:
    await connected(asker, owner)
    asker.part.frames.send(NODE_ID, OneWayType.SESSION_OPEN, {"session_id": "x"})
    await asker.fake.lines.until("frame not taken by another relay")
    assert owner.nodes.sent == []
    assert owner.framed("answered", "invalid") == 1
    with pytest.raises(ToolError) as refused:
        asker.part.frames.send(NODE_ID, OneWayType.SESSION_END, {"session_id": SESSION, "reason": "x" * 2000})
    assert refused.value.failure is Failure.INTERNAL


@pytest.mark.integration
async def test_a_node_that_no_relay_has_is_offline(asker: Member) -> None:
    with pytest.raises(ToolError) as refused:
        asker.part.frames.send(NODE_ID, OneWayType.SESSION_OPEN, OPEN)
    assert refused.value.failure is Failure.NODE_OFFLINE


@pytest.mark.integration
async def test_a_node_that_moves_is_followed(asker: Member, owner: Member) -> None:
    here, there = await connected(asker, owner)
    first = owner.nodes.sessions[NODE_ID]
    asker.nodes.connect(NODE_ID)
    second = asker.nodes.sessions[NODE_ID]
    await until(lambda: (second, True) in there.connections)
    # At the relay that it has left, the end comes first.
    assert there.connections == [(first, True), (first, False), (second, True)]
    assert here.connections == [(first, True), (second, True)]
    owner.part.frames.send(NODE_ID, OneWayType.SESSION_OPEN, OPEN)
    await until(lambda: sent(asker, OneWayType.SESSION_OPEN) == [OPEN])
    asker.nodes.receive(NODE_ID, OneWayType.CALLER_TOOL, REQUEST)
    await until(lambda: there.taken == [(second, OneWayType.CALLER_TOOL, REQUEST)])


@pytest.mark.integration
async def test_a_node_that_resumes_its_session_is_known_again_and_so_are_its_callers(
    asker: Member, owner: Member
) -> None:
    here, _ = await connected(asker, owner)
    node = owner.nodes.sessions[NODE_ID]
    asker.part.frames.send(NODE_ID, OneWayType.SESSION_OPEN, OPEN)
    await until(lambda: bool(owner.nodes.sent))
    owner.nodes.lose(NODE_ID)
    owner.nodes.connect(NODE_ID, node.session_id)
    # Before the other relay sees that it is back.
    owner.nodes.receive(NODE_ID, OneWayType.CALLER_TOOL, REQUEST)
    await until(lambda: here.taken == [(node, OneWayType.CALLER_TOOL, REQUEST)])
    # The bucket is another subject than the frame's: it may tell of the new entry later.
    await until(lambda: len(here.connections) > 1)
    assert here.connections[-1] == (node, True)


@pytest.mark.integration
async def test_a_new_session_of_a_node_has_no_callers_until_they_are_opened_again(
    asker: Member, owner: Member
) -> None:
    here, there = await connected(asker, owner)
    asker.part.frames.send(NODE_ID, OneWayType.SESSION_OPEN, OPEN)
    await until(lambda: bool(owner.nodes.sent))
    owner.nodes.lose(NODE_ID)
    owner.nodes.connect(NODE_ID)
    owner.nodes.receive(NODE_ID, OneWayType.CALLER_TOOL, REQUEST)
    assert [type_ for _, type_, _ in there.taken] == [OneWayType.CALLER_TOOL]
    assert here.taken == []


@pytest.mark.integration
async def test_a_node_that_was_away_for_longer_than_it_keeps_sessions_has_no_callers(
    asker: Member, owner: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cluster.frames.SESSIONS_LAST_S", 0)
    here, there = await connected(asker, owner)
    node = owner.nodes.sessions[NODE_ID]
    asker.part.frames.send(NODE_ID, OneWayType.SESSION_OPEN, OPEN)
    await until(lambda: bool(owner.nodes.sent))
    owner.nodes.lose(NODE_ID)
    owner.nodes.connect(NODE_ID, node.session_id)
    owner.nodes.receive(NODE_ID, OneWayType.CALLER_TOOL, REQUEST)
    assert [type_ for _, type_, _ in there.taken] == [OneWayType.CALLER_TOOL]
    assert here.taken == []


@pytest.mark.integration
async def test_the_sessions_of_a_relay_that_ends_are_ended_at_the_node(
    owner: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    async with Member.joined(nats.config, tmp_path / "ends", registry) as ends:
        await connected(ends, owner)
        ends.part.frames.send(NODE_ID, OneWayType.SESSION_OPEN, OPEN)
        ends.part.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, lease())
        await until(lambda: len(owner.nodes.sent) == 2)
    await until(lambda: sent(owner, OneWayType.SESSION_END) == [{**END, "reason": "unknown"}])
    assert terms(owner) == [(1000, 30), (1000, 0)]


# --- telemetry


@pytest.mark.integration
async def test_one_lease_at_the_node_serves_all_relays(asker: Member, owner: Member) -> None:
    here, there = await connected(asker, owner)
    owner.part.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, lease(5000, include=["cpu"]))
    asker.part.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, lease(1000, include=["mem", "cpu"]))
    await until(lambda: terms(owner) == [(5000, 30), (1000, 30)])
    assert sent(owner, OneWayType.TELEMETRY_LEASE)[-1]["include"] == ["cpu", "mem"]
    for number in range(3):
        owner.nodes.receive(NODE_ID, OneWayType.TELEMETRY, sample(number))
    await until(lambda: len(here.taken) == 3)
    node = owner.nodes.sessions[NODE_ID]
    assert here.taken == there.taken == [(node, OneWayType.TELEMETRY, sample(number)) for number in range(3)]
    # The shortest interval goes, and then the last listener.
    asker.part.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, lease(1000, 0))
    await until(lambda: terms(owner)[2:] == [(5000, 30)])
    owner.nodes.receive(NODE_ID, OneWayType.TELEMETRY, sample(3))
    owner.part.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, lease(5000, 0))
    assert terms(owner)[3:] == [(5000, 0)]
    assert len(there.taken) == 4
    assert len(here.taken) == 3


@pytest.mark.integration
async def test_a_relay_that_has_not_leased_a_node_is_not_handed_its_samples(
    asker: Member, owner: Member
) -> None:
    here, there = await connected(asker, owner)
    asker.part.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, lease())
    await until(lambda: bool(terms(owner)))
    owner.nodes.receive(NODE_ID, OneWayType.TELEMETRY, {"cap_id": "other", "sample": {}})
    owner.nodes.receive(NODE_ID, OneWayType.TELEMETRY, sample(1))
    await until(lambda: bool(here.taken))
    assert [payload for _, _, payload in here.taken] == [sample(1)]
    # What no relay has leased is for this relay to count.
    assert [payload["cap_id"] for _, _, payload in there.taken] == ["other"]


@pytest.mark.integration
async def test_samples_go_on_after_a_move_and_none_comes_from_the_session_before(
    asker: Member, owner: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    here, _ = await connected(asker, owner)
    asker.part.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, lease())
    await until(lambda: bool(terms(owner)))
    first = owner.nodes.sessions[NODE_ID]
    async with Member.joined(nats.config, tmp_path / "third", registry) as third:
        third.nodes.connect(NODE_ID)
        second = third.nodes.sessions[NODE_ID]
        await here.until_connected(second)
        asker.part.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, lease())
        await until(lambda: bool(terms(third)))
        # What the older session still had on its way.
        body = {"node_id": NODE_ID, "session_id": first.session_id, "type": "telemetry", "payload": sample(1)}
        for relay in asker.part.peers.running():
            stale = PeerMessages(registry, relay).ask(relay, body)
            await owner.part.connection.publish(f"edge.{FLEET}.telemetry.{NODE_ID}", stale)
        third.nodes.receive(NODE_ID, OneWayType.TELEMETRY, sample(2))
        await until(lambda: bool(here.taken))
        assert here.taken == [(second, OneWayType.TELEMETRY, sample(2))]


CAP_ID = "metrics"


class Stage:
    """One node, which is connected, and the leases that it is sent."""

    def __init__(self) -> None:
        self.seconds = Seconds()
        self.nodes = HeldNodes(UlidSource(lambda: 0, bytes))
        self.nodes.connect(NODE_ID)
        self.leases = SharedLeases(self.nodes, self.seconds)

    def ask(self, relay: str, interval_ms: int, ttl_s: int = 30, include: list[str] | None = None) -> None:
        lease: TelemetryLease = {"cap_id": CAP_ID, "interval_ms": interval_ms, "ttl_ms": ttl_s * 1000}
        if include is not None:
            lease["include"] = include
        self.leases.ask(relay, NODE_ID, lease)

    def sent(self) -> list[tuple[int, int, list[str] | None]]:
        """Return interval, seconds and parts of what was sent since the last time."""
        found, self.nodes.sent = self.nodes.sent, []
        return [
            (lease["interval_ms"], round(lease["ttl_ms"] / 1000), lease.get("include"))
            for _, _, lease in found
        ]


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_the_shortest_interval_and_all_parts_are_sent_for_as_long_as_the_longest_lease(stage: Stage) -> None:
    stage.ask("A", 60_000, 180, ["cpu"])
    stage.ask("B", 1000, 30, ["mem"])
    stage.ask("C", 5000)
    assert stage.sent() == [
        (60_000, 180, ["cpu"]),
        (1000, 180, ["cpu", "mem"]),
        (1000, 180, None),
    ]


def test_a_lease_that_has_lapsed_counts_no_more(stage: Stage) -> None:
    stage.ask("A", 60_000, 180)
    stage.ask("B", 1000)
    stage.seconds.now += 31
    assert list(stage.leases.relays_of(NODE_ID, CAP_ID)) == ["A"]
    stage.ask("A", 60_000, 180)
    assert stage.sent()[-1] == (60_000, 180, None)


def test_the_last_that_ends_ends_the_nodes(stage: Stage) -> None:
    stage.ask("A", 1000)
    stage.ask("B", 1000)
    stage.ask("A", 1000, 0)
    stage.leases.relay_gone("B")
    assert stage.sent()[2:] == [(1000, 30, None), (1000, 0, None)]
    stage.ask("B", 1000, 0)  # told again: the node may not have been told
    assert stage.sent() == [(1000, 0, None)]


def test_what_was_not_sent_is_as_if_it_had_not_been_asked(stage: Stage) -> None:
    stage.ask("A", 5000)
    stage.nodes.refusals = [ToolError(Failure.RATE_LIMITED), ToolError(Failure.RATE_LIMITED)]
    for relay in ("A", "B"):
        with pytest.raises(ToolError):
            stage.ask(relay, 1000)
    stage.ask("C", 10_000)
    assert stage.sent() == [(5000, 30, None), (5000, 30, None)]
    assert set(stage.leases.relays_of(NODE_ID, CAP_ID)) == {"A", "C"}


def test_an_end_that_was_not_sent_is_an_end(stage: Stage) -> None:
    stage.ask("A", 5000)
    stage.nodes.refusals = [ToolError(Failure.RATE_LIMITED)]
    with pytest.raises(ToolError):
        stage.ask("A", 5000, 0)
    assert not stage.leases.relays_of(NODE_ID, CAP_ID)


def test_a_node_that_connects_has_no_lease(stage: Stage) -> None:
    stage.ask("A", 1000)
    stage.leases.node_changed(NODE_ID)
    assert not stage.leases.relays_of(NODE_ID, CAP_ID)


# --- frames on their way to another relay, which answers as the test says, and samples over a nats-server


NODE_SESSION, NEXT_SESSION = "01HZX9K3M4P7Q8R9S0T1V2W3XC", "01HZX9K3M4P7Q8R9S0T1V2W3XD"
NODE = NodeRef(TENANT, NODE_ID, NODE_SESSION)
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
        self, _relay: str, _kind: str, body: Mapping[str, Any], _timeout_s: float, _token: str = ""
    ) -> Mapping[str, Any]:
        self.asked.append(body["payload"]["number"])
        await self.held.wait()
        if self.ends:
            raise self.ends.pop(0)
        return {}


class Queued:
    """The queues, and what they have told."""

    def __init__(self) -> None:
        self.peers = PlayedPeers()
        self.lines = LogLines()
        self.prepared: list[QueuedFrame] = []
        self.lost: list[tuple[NodeAt, Mapping[str, Any]]] = []
        self.taken: list[tuple[NodeAt, int]] = []
        self.counted: list[str] = []
        self.slept: list[float] = []
        self.queues = FrameQueues(
            self.peers,
            before=self._before,
            lost=lambda where, frame: self.lost.append((where, frame.payload)),
            taken=lambda where, frame: self.taken.append((where, frame.payload["number"])),
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
def queued() -> Queued:
    return Queued()


async def test_frames_go_one_by_one_in_their_order(queued: Queued) -> None:
    queued.peers.held.clear()
    for number in range(3):
        queued.put(number)
    await until(lambda: queued.peers.asked)
    assert queued.peers.asked == [0]
    queued.peers.held.set()
    await until(lambda: queued.counted == ["ok"] * 3)
    assert queued.peers.asked == [0, 1, 2]
    assert queued.taken == [(AT, 0), (AT, 1), (AT, 2)]
    assert [frame.payload["number"] for frame in queued.prepared] == [0, 1, 2]
    assert queued.lost == []


async def test_what_is_refused_for_now_is_sent_again_before_the_next(queued: Queued) -> None:
    queued.peers.ends = [BUSY, BUSY]
    queued.put(0)
    queued.put(1)
    await until(lambda: queued.counted == ["ok"] * 2)
    assert queued.peers.asked == [0, 0, 0, 1]
    assert queued.slept == [0.07, 0.07]


async def test_what_is_refused_for_good_is_left_out_and_logged(queued: Queued) -> None:
    queued.peers.ends = [ToolError(Failure.INTERNAL)]
    queued.put(0)
    queued.put(1)
    await until(lambda: queued.counted == ["refused", "ok"])
    assert queued.peers.asked == [0, 1]
    (line,) = queued.lines.entries("frame not taken by another relay")
    assert line["type"] == "session_message"
    assert (line["node_id"], line["relay"]) == (AT.node.node_id, AT.relay)


async def test_what_is_refused_again_and_again_is_given_up(
    queued: Queued, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cluster.frames._MOST_TRIES", 3)
    queued.peers.ends = [BUSY] * 3
    queued.put(0)
    await until(lambda: queued.counted == ["refused"])
    assert queued.peers.asked == [0, 0, 0]


@pytest.mark.parametrize(
    "end", [TimeoutError(), NoResponderError("none"), ToolError(Failure.NODE_OFFLINE)], ids=type
)
async def test_what_may_have_arrived_is_not_sent_again_and_its_loss_is_told(
    queued: Queued, end: Exception
) -> None:
    queued.peers.ends = [end]
    queued.put(0)
    queued.put(1)
    await until(lambda: queued.lost)
    assert queued.lost == [(AT, {"number": 0, "text": ""})]
    assert queued.counted == ["lost"] * 2
    assert queued.peers.asked == [0]
    queued.put(2)
    await until(lambda: queued.peers.asked == [0, 2])


async def test_a_queue_that_broke_takes_nothing_until_that_was_told(
    queued: Queued, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = asyncio.Event()

    async def waits(_seconds: float) -> None:
        await told.wait()

    monkeypatch.setattr(queued.queues, "_sleep", waits)
    queued.peers.ends = [TimeoutError()]
    queued.put(0)
    await until(lambda: queued.counted == ["lost"])
    with pytest.raises(ToolError) as refused:
        queued.put(1)
    assert refused.value.failure is Failure.NODE_OFFLINE
    queued.put(2, NodeAt(NodeRef(TENANT, OTHER_NODE_ID, NODE_SESSION), AT.relay))
    await until(lambda: queued.peers.asked == [0, 2])
    told.set()
    await until(lambda: queued.lost)


async def test_no_more_waits_than_the_bound(queued: Queued) -> None:
    queued.peers.held.clear()
    text = "x" * (MAX_QUEUED_BYTES // 10)
    for number in range(10):
        queued.put(number, text=text)
    with pytest.raises(ToolError) as refused:
        queued.put(10, text=text)
    assert refused.value.failure is Failure.RATE_LIMITED
    assert refused.value.retry_after_ms == 1000
    assert queued.counted == ["refused"]
    await queued.queues.close()


async def test_what_waits_for_a_node_that_has_gone_is_dropped_but_for_its_session(queued: Queued) -> None:
    queued.peers.held.clear()
    later = NodeAt(NodeRef(TENANT, NODE_ID, NEXT_SESSION), AT.relay)
    for where, number in ((AT, 0), (later, 1)):
        queued.put(number, where)
        queued.put(number + 2, where)
    await until(lambda: len(queued.peers.asked) == 2)
    queued.queues.drop(NODE_ID, but=later.node)
    queued.peers.held.set()
    await until(lambda: queued.counted == ["ok"] * 2)
    assert sorted(queued.peers.asked) == [0, 1, 3]
    assert queued.lost == []


async def test_a_fault_of_our_own_ends_one_queue_and_is_logged(queued: Queued) -> None:
    queued.peers.ends = [LookupError("planted")]
    queued.put(0)
    fault = await queued.lines.until("frames not sent")
    assert "LookupError: planted" in fault["exception"]
    queued.put(1)
    await until(lambda: queued.counted == ["ok"])


OTHER_NODE = NodeRef(TENANT, OTHER_NODE_ID, NODE_SESSION)


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
            link=link_of(self.relay),
            messages=PeerMessages(self.registry, self.relay),
            take=self._take,
            ulids=UlidSource(lambda: time.time_ns() // 1_000_000, os.urandom),
            count=lambda _kind, side, event: self.counted.append((side, event)),
            log=make_logger("relay", self.lines),
        )

    def _take(self, relay: str, body: Mapping[str, Any]) -> None:
        self.taken.append((relay, body["node_id"], body["payload"]["number"]))

    def publish(self, number: int, node: NodeRef = NODE) -> None:
        self.subjects.publish(node, {"number": number}, [])

    @asynccontextmanager
    async def connected(self, nats: NatsServer) -> AsyncIterator[Client]:
        """Serve by a connection of its own until the end of the block."""
        async with nats.connected() as client, in_background(self.subjects.serve(client)):
            yield client

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
    async with here.connected(nats), side.connected(nats):
        yield side


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
    body = {
        "node_id": OTHER_NODE_ID,
        "session_id": NODE_SESSION,
        "type": "telemetry",
        "payload": {"number": 1},
    }
    async with there.connected(nats) as client:
        misplaced = PeerMessages(registry, there.relay).ask(NODE_SESSION, body)
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
