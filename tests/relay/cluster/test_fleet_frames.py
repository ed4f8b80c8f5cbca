"""Frames between two relays over a real nats-server, and the leases that a node is sent for all of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from relay.cluster.fleet_frames import SharedLeases
from relay.cluster.messages import PeerMessages
from schemas.errors import Failure, ToolError
from schemas.frame_types import OneWayType
from schemas.payloads import TelemetryLease
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource
from tests.fakes.cluster import HeldNodes, Member
from tests.fakes.cluster_server import FLEET, NatsServer
from tests.fakes.fleet_frames import FrameReader
from tests.fakes.polling import until
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID

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
async def test_a_frame_that_the_node_does_not_take_now_is_sent_again_before_the_next(
    asker: Member, owner: Member
) -> None:
    await connected(asker, owner)
    owner.nodes.refusals = [ToolError(Failure.RATE_LIMITED, retry_after_ms=1) for _ in range(3)]
    asker.part.frames.send(NODE_ID, OneWayType.SESSION_OPEN, OPEN)
    asker.part.frames.send(NODE_ID, OneWayType.SESSION_MESSAGE, said("hello"))
    await until(lambda: len(owner.nodes.sent) == 2)
    assert [type_ for _, type_, _ in owner.nodes.sent] == [
        OneWayType.SESSION_OPEN,
        OneWayType.SESSION_MESSAGE,
    ]


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


@pytest.mark.integration
async def test_samples_are_read_again_after_the_servers_were_away(
    asker: Member, owner: Member, nats: NatsServer
) -> None:
    here, _ = await connected(asker, owner)
    asker.part.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, lease())
    await until(lambda: bool(terms(owner)))
    nats.stop()
    await until(lambda: not (asker.part.connection.is_connected or owner.part.connection.is_connected))
    nats.start()
    number = 0

    def arrived() -> bool:
        nonlocal number
        number += 1
        owner.nodes.receive(NODE_ID, OneWayType.TELEMETRY, sample(number))
        return bool(here.taken)

    await until(arrived)


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
