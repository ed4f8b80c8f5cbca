import asyncio
import json
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from relay.calls.idempotency import IdempotencyStore, KeyedCommands
from relay.calls.results import refused_by_node
from relay.cluster import commands as command_owner
from relay.cluster.messages import AskedCommand, command_subject
from relay.routing.port import Idempotency
from relay.sessions.node_sessions import CapabilityLimits
from relay.settings.config import ClusterServer
from schemas.errors import Failure, ToolError
from schemas.frames import MAX_FRAME_BYTES
from schemas.payloads import CmdAck, CmdRefused
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import HeldNodes, Member, echo
from tests.fakes.cluster_server import FLEET, NatsServer, UnsubscribeGate
from tests.fakes.hub import Hub
from tests.fakes.polling import BOUND_S, until
from tests.fakes.routers import HeldRouter, ScriptedRouter, echoed
from tests.fakes.seconds import Seconds
from tests.fakes.signer import ECHO, NODE_ID, OTHER_NODE_ID

pytestmark = pytest.mark.integration

AGENT = "ab" * 32
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
COMMAND = {
    "relay": "01HZX9K3M4P7Q8R9S0T1V2W3XD",
    "node_id": NODE_ID,
    "tool": f"sysecho.{NODE_ID}.echo.invoke",
    "arguments": {"message": "ping"},
    "deadline_ms": 400,
    "sent_at_ms": 1,
    "correlation_id": "01HZX9K3M4P7Q8R9S0T1V2W3XF",
    "cost": 1,
}
"""As one relay asks another."""


async def test_a_command_for_a_node_of_another_relay_is_answered_there(asker: Member, owner: Member) -> None:
    await owner.hold(NODE_ID, asker)
    asked = echo(NODE_ID, traceparent=TRACE, cost=0.5, caller=AGENT)
    answer = asyncio.create_task(asker.part.router.run(asked))
    command = await owner.echoes()
    assert await answer == echoed(asked)
    # All of it has arrived; of the budget, what the way has taken is gone.
    assert command.traceparent == TRACE
    assert command.correlation_id == asked.correlation_id
    assert command.cost == 0.5
    assert command.caller == AGENT
    assert 0 < command.deadline_ms <= asked.deadline_ms
    assert asker.counted("asked", "ok") == 1
    assert owner.counted("answered", "ok") == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"Edge-Caller": AGENT[:-1]},
        {"Edge-Caller": AGENT.upper()},
        {"Edge-Caller": "\u00fc" * 64},
        {"A": AGENT},
    ],
)
async def test_a_header_that_names_no_agent_as_a_digest_names_none(
    asker: Member, owner: Member, headers: dict[str, str]
) -> None:
    await owner.hold(NODE_ID, asker)
    asked = asker.part.messages.command(AskedCommand(echo(NODE_ID), "01HZX9K3M4P7Q8R9S0T1V2W3XD", 1))
    subject = command_subject(FLEET, NODE_ID)
    answer = asyncio.create_task(asker.part.connection.request(subject, asked, BOUND_S, headers))
    command = await owner.echoes()
    assert asker.part.messages.read_answer(await answer) == echoed(command)
    assert command.caller is None


async def test_a_relay_that_reads_the_document_alone_answers_a_command_that_names_its_agent(
    asker: Member, nats: NatsServer, registry: SchemaRegistry
) -> None:
    """A relay of the version before, on the client of the library: it knows of no header."""
    read: list[bytes] = []

    async def answer(message: Msg) -> None:
        read.append(message.data)
        await older.publish(message.reply, asker.part.messages.ack(echoed(echo(NODE_ID))))

    async with nats.connected() as older:
        await older.subscribe(command_subject(FLEET, NODE_ID), cb=answer)
        await asker.until_reached(NODE_ID)
        read.clear()
        assert await asker.part.router.run(echo(NODE_ID, caller=AGENT)) == echoed(echo(NODE_ID))
    registry.load("cluster.cmd@1.0.0").check(json.loads(read[0]))


async def test_an_answer_that_fits_a_nodes_frame_fits_also_where_ascii_is_three_times_as_long(
    asker: Member, owner: Member
) -> None:
    await owner.hold(NODE_ID, asker)
    answer = asyncio.create_task(asker.part.router.run(echo(NODE_ID)))
    _, waiter = await owner.held.next()
    ack: CmdAck = {"ok": True, "result": {"text": "\u00fc" * ((MAX_FRAME_BYTES - 1024) // 2)}}
    waiter.set_result(ack)
    assert await answer == ack


async def test_an_answer_that_is_too_large_for_a_message_fails_at_once_and_is_seen(
    asker: Member, owner: Member
) -> None:
    await owner.hold(NODE_ID, asker)
    answer = asyncio.create_task(asker.part.router.run(echo(NODE_ID)))
    _, waiter = await owner.held.next()
    # Escaped, this character takes six bytes.
    waiter.set_result({"ok": True, "result": {"text": "\x7f" * (MAX_FRAME_BYTES - 1024)}})
    with pytest.raises(ToolError) as refused:
        await answer
    assert refused.value.failure is Failure.RESULT_INVALID
    assert owner.counted("answered", "ok") == 0
    (line,) = owner.fake.lines.entries("answer too large for another relay")
    assert line["correlation_id"] == echo(NODE_ID).correlation_id


async def test_a_node_of_this_relay_is_reached_without_the_others(asker: Member) -> None:
    asker.nodes.connect(NODE_ID)
    assert await asker.part.router.run(echo(NODE_ID)) == echoed(echo(NODE_ID))
    assert asker.counted("asked", "ok") == 0


async def test_a_node_that_was_lost_is_offline(asker: Member, owner: Member) -> None:
    await owner.hold(NODE_ID, asker)
    owner.nodes.lose(NODE_ID)
    await asker.until_reached(NODE_ID, reached=False)
    assert (await asker.refused(echo(NODE_ID))).failure is Failure.NODE_OFFLINE


async def test_a_command_that_the_server_sends_before_it_reads_that_the_node_was_lost_is_answered(
    asker: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    async with UnsubscribeGate(nats.address).running() as gate:
        behind = replace(nats.config, servers=(ClusterServer("127.0.0.1", gate.port, tls=False),))
        async with Member.joined(behind, tmp_path / "behind", registry, HeldRouter()) as owner:
            for node_id in (NODE_ID, OTHER_NODE_ID):
                await owner.hold(node_id, asker)
            gate.arm()
            owner.nodes.lose(NODE_ID)
            await gate.holds.wait()
            # After a command of another node, all that the server has answered before has arrived too.
            asked = [echo(OTHER_NODE_ID), echo(NODE_ID, correlation_id="01HZX9K3M4P7Q8R9S0T1V2W3XD")]
            answers = []
            for command in asked:
                answers.append(asyncio.create_task(asker.part.router.run(command)))
                await owner.echoes()
            gate.open()
            assert await asyncio.gather(*answers) == [echoed(command) for command in asked]
            await asker.until_reached(NODE_ID, reached=False)


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (ToolError(Failure.RATE_LIMITED, retry_after_ms=70), Failure.RATE_LIMITED),
        (ToolError(Failure.NODE_OFFLINE), Failure.NODE_OFFLINE),
        (ToolError(Failure.ATTESTATION_FAILED), Failure.ATTESTATION_FAILED),
        (ToolError(Failure.DEADLINE_EXCEEDED, "a text of its own"), Failure.DEADLINE_EXCEEDED),
        (ToolError(Failure.SAFETY_DENIED), Failure.INTERNAL),
        (ValueError("a bug"), Failure.INTERNAL),
    ],
)
async def test_why_it_has_failed_there_is_told(
    asker: Member, owner: Member, failure: Exception, told: Failure
) -> None:
    await owner.hold(NODE_ID, asker)
    answer = asyncio.create_task(asker.part.router.run(echo(NODE_ID)))
    _, waiter = await owner.held.next()
    waiter.set_exception(failure)
    with pytest.raises(ToolError) as refused:
        await answer
    assert refused.value.failure is told
    assert refused.value.detail is None
    assert refused.value.retry_after_ms == getattr(failure, "retry_after_ms", None)
    bugs = [entry["exception"] for entry in owner.fake.lines.entries("command failed")]
    assert ["ValueError" in bug for bug in bugs] == ([True] if isinstance(failure, ValueError) else [])


async def test_what_the_boards_owner_denies_there_is_told_apart_from_what_a_token_does_not_allow(
    asker: Member, owner: Member
) -> None:
    await owner.hold(NODE_ID, asker)
    error = ToolError(Failure.OUTSIDE_CEILING).envelope()
    without: CmdRefused = {"ok": False, "error": error}
    marked: CmdRefused = {"ok": False, "error": error, "denied_by": "owner"}
    for said, told in ((marked, Failure.OUTSIDE_CEILING), (without, Failure.INTERNAL)):
        answer = asyncio.create_task(asker.part.router.run(echo(NODE_ID)))
        _, waiter = await owner.held.next()
        waiter.set_result(said)
        ack = await answer
        assert not ack["ok"]
        assert refused_by_node(ack).failure is told


async def test_cancelling_cancels_the_command_there(asker: Member, owner: Member) -> None:
    await owner.hold(NODE_ID, asker)
    asking = asyncio.create_task(asker.part.router.run(echo(NODE_ID)))
    _, waiter = await owner.held.next()
    asking.cancel()
    await until(waiter.cancelled)
    await until(lambda: owner.counted("answered", "cancelled") == 1)


async def test_the_asker_is_answered_at_the_deadline(asker: Member, owner: Member) -> None:
    await owner.hold(NODE_ID, asker)
    assert (await asker.refused(echo(NODE_ID, deadline_ms=50))).failure is Failure.DEADLINE_EXCEEDED


async def test_a_command_whose_budget_was_spent_on_the_way_is_not_run(asker: Member, owner: Member) -> None:
    await owner.hold(NODE_ID, asker)
    messages, connection = asker.part.messages, asker.part.connection
    subject = command_subject(FLEET, NODE_ID)

    async def ask(sent_at_ms: int, correlation_id: str) -> bytes:
        message = COMMAND | {"sent_at_ms": sent_at_ms, "correlation_id": correlation_id}
        return await connection.request(subject, json.dumps(message).encode(), BOUND_S)

    first = asyncio.create_task(ask(5_000_000, "01HZX9K3M4P7Q8R9S0T1V2W3XE"))
    await owner.echoes()
    await first
    # Sent a second earlier by the same clock, and it arrives now.
    with pytest.raises(ToolError) as refused:
        messages.read_answer(await ask(4_999_000, "01HZX9K3M4P7Q8R9S0T1V2W3XF"))
    assert refused.value.failure is Failure.DEADLINE_EXCEEDED
    assert owner.held.waiting.empty()


async def test_more_commands_than_run_at_once_are_refused(
    asker: Member, owner: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    await owner.hold(NODE_ID, asker)
    monkeypatch.setattr(command_owner, "MAX_IN_FLIGHT", 1)
    running = asyncio.create_task(asker.part.router.run(echo(NODE_ID)))
    _, waiter = await owner.held.next()
    refused = await asker.refused(echo(NODE_ID, correlation_id="01HZX9K3M4P7Q8R9S0T1V2W3XE"))
    assert refused.failure is Failure.RATE_LIMITED
    assert refused.retry_after_ms is not None
    waiter.set_result(echoed(echo(NODE_ID)))
    assert await running == echoed(echo(NODE_ID))


async def test_more_than_can_be_refused_at_once_is_left_to_its_deadline(
    asker: Member, owner: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    await owner.hold(NODE_ID, asker)
    monkeypatch.setattr(command_owner, "MAX_IN_FLIGHT", 0)
    assert (await asker.refused(echo(NODE_ID, deadline_ms=50))).failure is Failure.DEADLINE_EXCEEDED
    await until(lambda: owner.counted("answered", "dropped") == 1)


async def test_of_two_relays_that_believe_to_hold_a_node_one_is_asked(
    asker: Member,
    nats: NatsServer,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hold_on(_nodes: HeldNodes, _node_id: str) -> None:
        """Go on with the session, as until presence has settled which of two is newer."""

    monkeypatch.setattr(HeldNodes, "lose", hold_on)
    registry = asker.fake.environment.registry
    first, second = ScriptedRouter(), ScriptedRouter()
    asked = 0
    async with (
        Member.joined(nats.config, tmp_path_factory.mktemp("first"), registry, first) as one,
        Member.joined(nats.config, tmp_path_factory.mktemp("second"), registry, second) as other,
        asyncio.timeout(BOUND_S),
    ):
        await one.hold(NODE_ID, asker)
        await other.hold(NODE_ID, asker)
        # The server picks one each time. Once each was picked both are subscribed, and some more are asked.
        more = 10
        while more > 0:
            await asker.part.router.run(echo(NODE_ID))
            asked += 1
            more -= bool(first.commands and second.commands)
    assert len(first.commands) + len(second.commands) == asked


@pytest.mark.parametrize(
    "changed",
    [
        {"node_id": OTHER_NODE_ID},
        {"tool": f"sysecho.{OTHER_NODE_ID}.echo.invoke"},
        {"deadline_ms": 0},
        {"stray": 1},
    ],
)
async def test_what_is_no_command_for_the_node_reaches_none(
    asker: Member, owner: Member, changed: dict[str, object]
) -> None:
    await owner.hold(NODE_ID, asker)
    before = len(owner.fake.lines.entries("command of another relay dropped"))
    data = json.dumps(COMMAND | changed).encode()
    answer = await asker.part.connection.request(command_subject(FLEET, NODE_ID), data, BOUND_S)
    assert json.loads(answer) == {"failure": {"name": "INTERNAL"}}
    assert owner.held.waiting.empty()
    assert len(owner.fake.lines.entries("command of another relay dropped")) == before + 1


async def test_a_retry_by_way_of_another_relay_finds_the_first_call(
    asker: Member, nats: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    registry, node = asker.fake.environment.registry, ScriptedRouter()
    keyed = KeyedCommands(node, IdempotencyStore[str](time.monotonic), time.monotonic)
    key = Idempotency(("https://relay.example", "acme", "agent"), "ab" * 32, "cd" * 32, repeatable=False)
    first = echo(NODE_ID, idempotency=key)
    retry = echo(NODE_ID, idempotency=key, correlation_id="01HZX9K3M4P7Q8R9S0T1V2W3XE")
    async with (
        Member.joined(nats.config, tmp_path_factory.mktemp("owner"), registry, keyed) as owner,
        Member.joined(nats.config, tmp_path_factory.mktemp("other"), registry) as other,
    ):
        await owner.hold(NODE_ID, asker)
        answers = [
            await asker.part.router.run(first),
            await other.part.router.run(retry),
            await owner.part.router.run(retry),
        ]
        reused = echo(NODE_ID, idempotency=replace(key, arguments="ef" * 32))
        refused = await other.refused(reused)
    assert answers == [echoed(first)] * 3
    assert len(node.commands) == 1
    assert refused.failure is Failure.ENVELOPE_INVALID


async def test_a_rate_is_divided_among_agents_however_many_relays_they_call(
    asker: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry, hub: Hub
) -> None:
    seconds, node = Seconds(), ScriptedRouter()
    hub.connect(hub.ca.issue(), capabilities=[{**ECHO, "constraints": {"rate_limit_rps": 10}}])
    limits = CapabilityLimits(hub.fleet, node, seconds)

    async def served(by: Member, agent: bytes) -> bool:
        ulid = hub.ulids.new()
        try:
            await by.part.router.run(echo(NODE_ID, correlation_id=ulid, caller=sha256(agent).hexdigest()))
        except ToolError as error:
            return error.failure is not Failure.RATE_LIMITED
        return True

    async with Member.joined(nats.config, tmp_path / "limits", registry, limits) as owner:
        await owner.hold(NODE_ID, asker)
        modest = []
        for _ in range(15):
            for _ in range(8):
                seconds.now += 0.2 / 8
                await served(asker, b"greedy")
            modest.append(await served(owner, b"modest"))
        assert all(modest)
        assert await served(asker, b"modest")


async def test_the_concurrency_of_a_capability_is_exact_however_many_relays_call_it(
    asker: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry, hub: Hub
) -> None:
    node = HeldRouter()
    limited = {**ECHO, "constraints": {"rate_limit_rps": 9, "max_concurrency": 2}}
    hub.connect(hub.ca.issue(), capabilities=[limited])
    limits = CapabilityLimits(hub.fleet, node, Seconds())
    commands = [echo(NODE_ID, correlation_id=f"01HZX9K3M4P7Q8R9S0T1V2W3X{number}") for number in range(5)]
    async with Member.joined(nats.config, tmp_path / "limits", registry, limits) as owner:
        await owner.hold(NODE_ID, asker)
        by_both = zip((owner, asker), commands, strict=False)
        running = [asyncio.create_task(by.part.router.run(command)) for by, command in by_both]
        held_there = [await node.next() for _ in running]
        for by, command in zip((owner, asker), commands[2:], strict=False):
            assert (await by.refused(command)).failure is Failure.RATE_LIMITED
        for command, waiter in held_there:
            waiter.set_result(echoed(command))
        assert [answer["ok"] for answer in await asyncio.gather(*running)] == [True, True]
        # What has ended makes room, for the other relay too.
        last = asyncio.create_task(asker.part.router.run(commands[4]))
        command, waiter = await node.next()
        waiter.set_result(echoed(command))
        assert (await last)["ok"]


async def test_a_command_that_hangs_at_its_node_ends_at_its_deadline_when_the_owner_ends(
    asker: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    router = HeldRouter()
    async with Member.joined(nats.config, tmp_path / "ends", registry, router) as ends:
        await ends.hold(NODE_ID, asker)
        call = asyncio.create_task(asker.part.router.run(echo(NODE_ID, deadline_ms=1500)))
        await router.next()
    async with Member.joined(nats.config, tmp_path / "next", registry) as later:
        await later.hold(NODE_ID, asker)
        with pytest.raises(ToolError) as unknown:
            await call
        assert unknown.value.failure is Failure.DEADLINE_EXCEEDED
        assert isinstance(later.local, ScriptedRouter)
        assert later.local.commands == []
