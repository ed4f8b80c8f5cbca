"""A thief has what one relay shows to the servers of NATS, and no certificate of the fleet.

What that gives in a fleet that is not sealed is tried first: else the same attempt would prove nothing of one
that is.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from relay.cluster.channel import Asking
from relay.cluster.messages import AskedCommand, command_subject
from relay.routing.port import Asker
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource
from tests.fakes.cluster import Machine, Member, echo
from tests.fakes.cluster_server import FLEET, NatsServer
from tests.fakes.hub import Hub
from tests.fakes.polling import BOUND_S, before_asking_again, until
from tests.fakes.relay_keys import RelayCa
from tests.fakes.routers import ScriptedRouter, echoed
from tests.fakes.signer import NODE_ID

pytestmark = pytest.mark.integration

THIEF = "01HZX9K3M4P7Q8R9S0T1V2W3XD"
CALLS = 20
FORGED = b'{"ack":{"ok":true,"result":{"message":"forged"}}}'
in_both = pytest.mark.parametrize("sealed", [False, True], ids=["not sealed", "sealed"])


@dataclass
class Stage:
    """A fleet of two: ``owner`` holds the node, ``asker`` is called by an agent."""

    asker: Member
    owner: Member
    thief: Client


@asynccontextmanager
async def staged(
    nats: NatsServer, directory: Path, registry: SchemaRegistry, *, sealed: bool
) -> AsyncIterator[Stage]:
    ca = RelayCa()

    async with (
        Member.joined(nats.config, directory / "asker", registry, ca=ca, sealed=sealed) as asker,
        Member.joined(nats.config, directory / "owner", registry, ca=ca, sealed=sealed) as owner,
        nats.connected() as thief,
    ):
        owner.nodes.connect(NODE_ID)
        await until(lambda: asker.part.presence.relay_of(NODE_ID) == owner.part.relay)
        if not sealed:
            await owner.hold(NODE_ID, asker)
        yield Stage(asker, owner, thief)


async def answered(stage: Stage, ulids: UlidSource) -> CmdAck:
    """Call until it was sent: on a slow machine a handshake may not end within its time."""
    while True:
        try:
            return await stage.asker.part.router.run(echo(NODE_ID, correlation_id=ulids.new()))
        except ToolError as error:
            if error.failure is not Failure.NODE_OFFLINE:
                raise
            await before_asking_again()


@in_both
async def test_it_answers_in_a_nodes_place(
    nats: NatsServer,
    tmp_path: Path,
    registry: SchemaRegistry,
    sealed: bool,  # noqa: FBT001 - a parameter
) -> None:
    async with staged(nats, tmp_path, registry, sealed=sealed) as stage:

        async def forge(message: Msg) -> None:
            if message.reply:
                # As an answer, as that no relay listens, and as it was sent.
                for answer in (FORGED, b"", message.data):
                    await stage.thief.publish(message.reply, answer)

        async def forge_answers(message: Msg) -> None:
            if message.data not in {FORGED, b""}:
                await stage.thief.publish(message.subject, FORGED)

        await stage.thief.subscribe(command_subject(FLEET, NODE_ID), queue="owner", cb=forge)
        await stage.thief.subscribe("edge.main.sealed.>", cb=forge)
        await stage.thief.subscribe("edge.main.inbox.>", cb=forge_answers)
        await stage.thief.flush()
        ulids = UlidSource(lambda: time.time_ns() // 1_000_000, os.urandom)
        async with asyncio.timeout(BOUND_S):
            answers = [await answered(stage, ulids) for _ in range(CALLS)]
        honest = answers.count(echoed(echo(NODE_ID)))
        assert (honest == CALLS) is sealed
        if sealed:
            assert len(stage.owner.recorded) == CALLS


@in_both
async def test_it_has_a_command_run(
    nats: NatsServer,
    tmp_path: Path,
    registry: SchemaRegistry,
    sealed: bool,  # noqa: FBT001 - a parameter
) -> None:
    async with staged(nats, tmp_path, registry, sealed=sealed) as stage:
        asked = stage.asker.part.messages.command(AskedCommand(echo(NODE_ID), THIEF, 1))
        try:
            await stage.thief.request(command_subject(FLEET, NODE_ID), asked, 1)
        except (NoRespondersError, NatsTimeoutError):
            assert sealed
        # By a certificate of its own making, it gets no channel either.
        other = RelayCa("the thief's own").key("thief")
        hello = Asking.begun(
            other, to=stage.owner.part.relay, relay=THIEF, fleet=FLEET, random_bytes=lambda n: b"7" * n
        ).hello
        subject = f"edge.main.sealed.{stage.owner.part.relay}"
        with pytest.raises(NatsTimeoutError):
            await stage.thief.request(subject, hello, 0.5)
        for repeated in (asked, b"", b"\x05" + bytes(80)):
            await stage.thief.publish(subject, repeated)
        await stage.thief.flush()
        # What was run is recorded at the owner, whatever else is.
        assert isinstance(stage.owner.local, ScriptedRouter)
        assert len(stage.owner.recorded) == (0 if sealed else 1)


@in_both
async def test_it_asks_for_an_agent_by_a_token_that_was_never_issued(
    nats: NatsServer,
    tmp_path: Path,
    registry: SchemaRegistry,
    sealed: bool,  # noqa: FBT001 - a parameter
    hub: Hub,
) -> None:
    token = hub.token()
    authentic = hub.authenticator.identify(token)
    facts = {**authentic.facts(), "jti": "never issued"}
    read: list[str] = []

    async def session(asker: Asker, body: object) -> dict[str, object]:
        del body
        principal = await hub.authenticator.of_asker(asker.token, facts)
        read.append(principal.jti)
        return {}

    async with staged(nats, tmp_path, registry, sealed=sealed) as stage:
        stage.owner.part.peers.answer("asked_for_an_agent", session)
        body = json.dumps({"relay": THIEF, "id": THIEF, "body": {}}).encode()
        subject = f"edge.main.relay.{stage.owner.part.relay}.asked_for_an_agent"
        try:
            await stage.thief.request(subject, body, 1)
        except (NoRespondersError, NatsTimeoutError):
            assert sealed
        assert read == ([] if sealed else ["never issued"])
        if sealed:
            # Nor does a relay of the fleet read it, whose word alone does not count.
            for shown in ("", f"{token}x"):
                with pytest.raises(Exception, match="E_"):
                    await stage.asker.part.peers.ask(
                        stage.owner.part.relay, "asked_for_an_agent", {}, BOUND_S, shown
                    )
            assert not read
            await stage.asker.part.peers.ask(stage.owner.part.relay, "asked_for_an_agent", {}, BOUND_S, token)
            assert read == [authentic.jti]


async def test_what_the_token_says_counts_and_not_the_relay_that_sends_it(hub: Hub) -> None:
    narrowed = hub.token(kinds=["system.*"])
    facts = {**hub.authenticator.identify(hub.token()).facts(), "scopes": ["read_only", "reversible"]}
    principal = await hub.authenticator.of_asker(narrowed, facts)
    assert principal == hub.authenticator.identify(narrowed)
    assert principal.kinds == ("system.*",)
    hub.authenticator.revoke(frozenset({principal.jti}))
    with pytest.raises(ToolError, match="E_SAFETY_DENIED"):
        await hub.authenticator.of_asker(narrowed, facts)


@in_both
async def test_it_revokes_an_agents_token_by_one_entry(
    nats: NatsServer,
    tmp_path: Path,
    registry: SchemaRegistry,
    sealed: bool,  # noqa: FBT001 - a parameter
) -> None:
    machine, ca = Machine.made(tmp_path / "one", issues=True), RelayCa()
    async with (
        machine.joined(nats.config, registry, ca, sealed=sealed) as member,
        nats.connected() as thief,
    ):
        await until(lambda: member.part.ledgers.is_current)
        machine.tokens.revoke("revoked by the operator", now_ms=1)
        member.part.ledgers.changed("token_revocation")
        await until(lambda: member.counted_entries("appended", "token_revocation") == 1)
        jti = "an agent's"
        subject = f"edge.main.ledger.token_revocation.{sha256(jti.encode()).hexdigest()}"
        await thief.jetstream().publish(subject, json.dumps({"jti": jti, "revoked_ms": 1}).encode())
        if sealed:
            await until(lambda: member.counted_entries("not_signed", "token_revocation") == 1)
        else:
            await until(lambda: jti in machine.tokens.jtis())
        assert (jti in machine.tokens.jtis()) is not sealed
        assert member.part.ledgers.understands


ENTRY = b"edge.main.ledger.revocation"


def put(subject: bytes, reply: bytes = b"", headers: bytes = b"") -> bytes:
    """Return a message as a client writes it, whatever is in it."""
    kind, size = (b"HPUB", b"%d %d" % (len(headers), len(headers) + 1)) if headers else (b"PUB", b"1")
    return b"%b %b %b %b\r\n%bx\r\n" % (kind, subject, reply, size, headers)


@asynccontextmanager
async def running(
    nats: NatsServer, directory: Path, registry: SchemaRegistry
) -> AsyncIterator[tuple[Machine, Member, Machine, Member, Client]]:
    """Hold two machines, each with its relay, of which the first issues tokens; and the thief."""
    one, other = (Machine.made(directory / name, issues=name == "one") for name in ("one", "other"))
    ca = RelayCa()
    async with (
        one.joined(nats.config, registry, ca, sealed=True) as first,
        other.joined(nats.config, registry, ca, sealed=True) as second,
        nats.connected() as thief,
    ):
        await until(lambda: first.part.health().ready and second.part.health().ready)
        yield one, first, other, second, thief


@pytest.mark.parametrize(
    "message",
    [
        put(b"edge.main.sealed.RELAY", b"\xff"),
        put(b"edge.main.identity", b"\xff"),
        put(b"edge.main.identity", headers=b"NATS/1.0 \xff\xff\xff\r\n\r\n"),
        put(ENTRY + b".a", headers=b"NATS/1.0 \xff\xff\xff\r\n\r\n"),
        put(ENTRY + b".\xff"),
        put(ENTRY + b".a\x0bb"),
        put(b"$KV.edge_main_presence.node.\xff"),
    ],
    ids=[
        *("answer to no text", "identity to no text", "identity of a status"),
        *("entry of a status", "entry of no text", "entry of two words", "place of no text"),
    ],
)
async def test_it_writes_what_the_library_of_nats_cannot_read(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry, message: bytes
) -> None:
    async with running(nats, tmp_path, registry) as (one, first, other, second, thief):
        transport: Any = thief._transport  # noqa: SLF001 - the library would refuse it
        transport.write(message.replace(b"RELAY", second.part.relay.encode()))
        await thief.flush()
        one.tokens.revoke("meanwhile", now_ms=1)
        first.part.ledgers.changed("token_revocation")
        await until(lambda: "meanwhile" in other.tokens.jtis())
        second.nodes.connect(NODE_ID)
        await until(lambda: first.part.presence.relay_of(NODE_ID) == second.part.relay)
        for member in (first, second):
            assert len(member.fake.lines.entries("cluster connected")) == 1
            assert member.part.ledgers.understands
            assert member.part.presence.is_current


async def test_it_sends_a_reader_of_the_stream_what_is_not_in_it(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    async with running(nats, tmp_path, registry) as (one, first, other, second, thief):
        names = await thief.request("$JS.API.CONSUMER.NAMES.edge_main_ledger", b"")
        for name in json.loads(names.data)["consumers"]:
            reader = await thief.jetstream().consumer_info("edge_main_ledger", name)
            await thief.publish(reader.config.deliver_subject or "", b"x", "a.b")
        await thief.flush()
        one.tokens.revoke("meanwhile", now_ms=1)
        first.part.ledgers.changed("token_revocation")
        await until(lambda: "meanwhile" in other.tokens.jtis())
        for member in (first, second):
            assert len(member.fake.lines.entries("cluster connected")) == 1


async def test_it_says_more_than_a_relay_reads(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    async with (
        Member.joined(nats.config, tmp_path / "one", registry, ca=RelayCa(), sealed=True) as member,
        nats.connected() as thief,
    ):
        for _ in range(5000):
            await thief.publish("edge.main.identity", b"x")
        await thief.flush()
        await member.fake.lines.until("cluster reports")
        assert member.part.connection.is_connected
        assert len(member.fake.lines.entries("cluster reports")) < 100
