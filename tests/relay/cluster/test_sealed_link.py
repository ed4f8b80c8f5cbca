"""Relays of one fleet that is sealed, on a real server: what each does, hears and believes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from relay.audit.log import AuditUnavailableError
from relay.cluster.channel import _FINISH
from relay.cluster.connection import ClusterConnection
from relay.cluster.messages import AskedCommand, command_subject
from relay.routing.port import Asker, Command
from relay.settings.environment import ticks_ms
from schemas.certificates import is_relay_name
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Member, echo
from tests.fakes.cluster_server import FLEET, NatsServer
from tests.fakes.polling import BOUND_S, until
from tests.fakes.relay_keys import RelayCa
from tests.fakes.routers import HeldRouter, echoed
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID

pytestmark = pytest.mark.integration

AGENT = "ab" * 32


@pytest.fixture
def ca() -> RelayCa:
    return RelayCa()


@pytest_asyncio.fixture
async def owner(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry, ca: RelayCa
) -> AsyncIterator[Member]:
    joined = Member.joined(nats.config, tmp_path / "owner", registry, HeldRouter(), ca=ca, sealed=True)
    async with joined as member:
        yield member


@pytest_asyncio.fixture
async def asker(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry, ca: RelayCa
) -> AsyncIterator[Member]:
    async with Member.joined(nats.config, tmp_path / "asker", registry, ca=ca, sealed=True) as member:
        yield member


@pytest_asyncio.fixture
async def third(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry, ca: RelayCa
) -> AsyncIterator[Member]:
    async with Member.joined(nats.config, tmp_path / "third", registry, ca=ca, sealed=True) as member:
        yield member


async def know_each_other(*members: Member) -> None:
    for member in members:
        await until(lambda member=member: len(member.part.peers.running()) == len(members) - 1)  # type: ignore[misc]


async def answered(asker: Member, owner: Member, asked: Command | None = None) -> Command:
    """Have ``owner`` answer a command of ``asker``; return the command as it has arrived."""
    asked = asked or echo(NODE_ID)
    answer = asyncio.create_task(asker.part.router.run(asked))
    command = await owner.echoes()
    assert await answer == echoed(asked)
    return command


async def hold(owner: Member, asker: Member, *others: Member) -> None:
    """Let the node connect to ``owner`` once all know each other, and return when ``asker`` knows it."""
    await know_each_other(owner, asker, *others)
    owner.nodes.connect(NODE_ID)
    await until(lambda: asker.part.presence.relay_of(NODE_ID) == owner.part.relay)


async def test_a_command_is_answered_by_the_relay_that_presence_names_and_recorded_there(
    asker: Member, owner: Member, third: Member
) -> None:
    await hold(owner, asker, third)
    asked = echo(NODE_ID, caller=AGENT, cost=0.5)
    command = await answered(asker, owner, asked)
    assert (command.caller, command.cost) == (AGENT, 0.5)
    assert 0 < command.deadline_ms <= asked.deadline_ms
    ((name, recorded),) = owner.recorded
    assert (name, recorded.tool) == (asker.part.name(), asked.tool)
    assert not third.recorded
    assert (asker.counted("asked", "ok"), owner.counted("answered", "ok")) == (1, 1)


async def test_a_relay_that_does_not_hold_the_node_says_so_and_the_next_is_asked(
    asker: Member, owner: Member, third: Member
) -> None:
    await hold(third, asker, owner)
    # It has moved, and nothing has told the asking relay yet.
    third.part.owner._held.clear()  # noqa: SLF001 - as between the loss of a session and its entry
    owner.part.owner._held.add(NODE_ID)  # noqa: SLF001 - as between a session and its entry
    await answered(asker, owner)
    assert not third.recorded


async def test_a_node_that_no_relay_holds_is_offline_before_anything_is_run(
    asker: Member, owner: Member
) -> None:
    await know_each_other(asker, owner)
    assert (await asker.refused(echo(OTHER_NODE_ID))).failure is Failure.NODE_OFFLINE
    assert not owner.recorded


class HeldBack:
    """Carries what the relay asks once its channel is made only when it is told to, as servers can."""

    def __init__(self, carried_by: ClusterConnection) -> None:
        self._carried_by = carried_by
        self.held = list[tuple[str, bytes]]()

    async def request(self, subject: str, payload: bytes, timeout_s: float, **options: Any) -> bytes:
        if payload[0] <= _FINISH:
            return await self._carried_by.request(subject, payload, timeout_s, **options)
        self.held.append((subject, payload))
        async with asyncio.timeout(timeout_s):
            await asyncio.Event().wait()
        raise AssertionError


async def test_a_first_command_that_the_servers_hold_back_beyond_its_deadline_is_not_run(
    asker: Member, owner: Member
) -> None:
    await hold(owner, asker)
    servers = HeldBack(asker.part.connection)
    asker.part.link.requests = servers  # type: ignore[assignment]  # what carries it
    assert (await asker.refused(echo(NODE_ID, deadline_ms=1_000))).failure is Failure.DEADLINE_EXCEEDED
    ((subject, payload),) = servers.held
    await asker.part.connection.publish(subject, payload)
    await until(lambda: owner.counted("answered", Failure.DEADLINE_EXCEEDED.value.code) == 1)
    assert not owner.recorded
    assert owner.held.waiting.empty()


async def test_after_the_clock_of_a_relay_has_stood_still_one_command_is_refused_and_the_next_is_run(
    asker: Member, owner: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hold(owner, asker)
    await answered(asker, owner)
    for part in (owner.part.owner, owner.part.link):
        monkeypatch.setattr(part, "_ticks_ms", lambda: ticks_ms() + 60_000)
    owner.part.owner._gauges.clear()  # noqa: SLF001 - as after two of its windows
    assert (await asker.refused(echo(NODE_ID))).failure is Failure.NODE_OFFLINE
    assert len(owner.recorded) == 1
    await answered(asker, owner)


async def test_a_command_that_is_not_needed_is_cancelled_there(asker: Member, owner: Member) -> None:
    await hold(owner, asker)
    answer = asyncio.create_task(asker.part.router.run(echo(NODE_ID)))
    _, waiter = await owner.held.next()
    answer.cancel()
    await until(waiter.cancelled)


async def test_a_command_that_cannot_be_recorded_is_not_run(
    asker: Member, owner: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_relay: str, _command: object) -> None:
        raise AuditUnavailableError("No space left on device")

    await hold(owner, asker)
    monkeypatch.setattr(owner.part.owner, "_record", full)
    assert (await asker.refused(echo(NODE_ID))).failure is Failure.INTERNAL
    assert owner.fake.lines.entries("command of another relay not recorded")


async def test_a_question_is_answered_with_the_token_that_goes_along(asker: Member, owner: Member) -> None:
    async def told(asker: Asker, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"asked_by": asker.relay, "token": asker.token, **body}

    await know_each_other(asker, owner)
    owner.part.peers.answer("told", told)
    asked = asker.part.peers.ask(owner.part.relay, "told", {"some": 1}, BOUND_S, "a.token")
    assert await asked == {"asked_by": asker.part.relay, "token": "a.token", "some": 1}
    with pytest.raises(ToolError):
        await asker.part.peers.ask(owner.part.relay, "unknown", {}, BOUND_S)


async def test_a_sample_reaches_each_relay_that_has_leased_it(
    asker: Member, owner: Member, third: Member
) -> None:
    await hold(owner, asker, third)
    taken: list[Mapping[str, Any]] = []
    asker.part.frames.on_frame(OneWayType.TELEMETRY, lambda _node, payload: taken.append(payload))
    lease = {"cap_id": "metrics", "interval_ms": 1000, "ttl_ms": 30_000}
    asker.part.frames.send(NODE_ID, OneWayType.TELEMETRY_LEASE, lease)
    await until(lambda: bool(owner.nodes.sent))
    sample = {"cap_id": "metrics", "sample": {"number": 1}}
    # The first makes the channel; what is told before there is one is lost, as a sample may be.
    async with asyncio.timeout(BOUND_S):
        while not taken:
            owner.nodes.receive(NODE_ID, OneWayType.TELEMETRY, sample)
            await asyncio.sleep(0.01)
    assert taken[0]["cap_id"] == "metrics"
    assert third.framed("answered", "ok") == 0


async def test_what_is_said_between_two_relays_is_not_on_the_wire(
    asker: Member, owner: Member, nats: NatsServer
) -> None:
    await know_each_other(asker, owner)
    seen: list[bytes] = []

    async def see(message: Any) -> None:
        seen.append(message.data)

    async with nats.connected() as stranger:
        await stranger.subscribe("edge.main.>", cb=see)
        await stranger.flush()
        await hold(owner, asker)
        secret = echo(NODE_ID, arguments={"message": "not for others"})
        await answered(asker, owner, secret)
        await stranger.flush()
    assert len(seen) >= 6  # a handshake, the command and its answer
    assert not [data for data in seen if b"not for others" in data or b"echo" in data]


async def test_a_relay_that_is_revoked_is_neither_heard_nor_asked(
    asker: Member, owner: Member, ca: RelayCa
) -> None:
    await hold(owner, asker)
    await answered(asker, owner)
    ca.revoked.add(asker.part.name())
    assert (await asker.refused(echo(NODE_ID, deadline_ms=500))).failure in {
        Failure.DEADLINE_EXCEEDED,
        Failure.NODE_OFFLINE,
    }
    # Nor by a new channel.
    asker.part.link.relay_gone(owner.part.relay)
    assert (await asker.refused(echo(NODE_ID, deadline_ms=500))).failure is Failure.NODE_OFFLINE
    assert len(owner.recorded) == 1


async def test_a_relay_without_a_certificate_reaches_none(
    owner: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    async with Member.joined(nats.config, tmp_path / "older", registry, sealed=True) as older:
        assert "without-ca-key" in str(older.part.connection.problem)
        owner.nodes.connect(NODE_ID)
        assert (await older.refused(echo(NODE_ID))).failure is Failure.NODE_OFFLINE
        assert not owner.recorded


async def test_a_relay_that_becomes_sealed_joins_anew_and_says_so(
    owner: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry, ca: RelayCa
) -> None:
    async with Member.joined(nats.config, tmp_path / "later", registry, ca=ca) as later:
        await later.hold(OTHER_NODE_ID, later)
        later.part.seal()
        # Nor is anything else heard while the connection from before lasts.
        asked = later.part.messages.command(AskedCommand(echo(OTHER_NODE_ID), owner.part.relay, 1))
        async with nats.connected() as stranger:
            with pytest.raises((NatsTimeoutError, NoRespondersError)):
                await stranger.request(command_subject(FLEET, OTHER_NODE_ID), asked, 0.5)
        assert not later.recorded
        await later.fake.lines.until("this relay seals what it says to others from now on")
        await until(lambda: len(later.fake.lines.entries("cluster connected")) == 2)
        await hold(owner, later)
        await answered(later, owner)


@pytest.mark.parametrize("sealed", [False, True], ids=["not sealed", "sealed"])
async def test_relays_know_each_others_names(
    nats: NatsServer,
    tmp_path: Path,
    registry: SchemaRegistry,
    ca: RelayCa,
    sealed: bool,  # noqa: FBT001 - a parameter
) -> None:
    async with (
        Member.joined(nats.config, tmp_path / "one", registry, ca=ca, sealed=sealed) as one,
        Member.joined(nats.config, tmp_path / "other", registry, ca=ca, sealed=sealed) as other,
    ):
        await know_each_other(one, other)
        name = other.part.status()["name"]
        assert is_relay_name(name)
        await until(lambda: [each["name"] for each in one.part.status()["others"]] == [name])
