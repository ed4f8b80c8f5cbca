"""A node or an agent reaches the servers of the cluster. It must read and write nothing of the relays'.

Tried with what each has, and without anything: at servers of the relays alone, and at servers that are the
MQTT broker too, whose further users are those that the relay writes for a broker.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import nkeys  # type: ignore[import-untyped]  # the library brings no types
import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from relay.auth.agent_tokens import TokenIssuer
from relay.cluster.credentials import new_nkey
from relay.cluster.messages import command_subject
from relay.pki.broker_access import nats_users
from schemas.addresses import mcp_url
from schemas.certificates import RELAY_NAME
from schemas.files import PRIVATE, write_atomic
from schemas.keys import private_key_to_pem
from schemas.registry import SchemaRegistry
from schemas.tls import client_context
from tests.fakes.callers import TOKEN_KEY
from tests.fakes.cluster import TENANT, Member, echo
from tests.fakes.cluster_server import FLEET, NatsServer, TlsNatsServer
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.polling import BOUND_S, until
from tests.fakes.routers import ScriptedRouter
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, SimulatedCa, key_named

NODE, OF_THE_BROKER = "a node", "the relay at its broker"
SUBJECTS = [
    ">",
    "*.>",
    "edge.>",
    "edge.main.>",
    "edge.main.inbox.>",
    "edge.main.cancel",
    f"edge.main.cmd.{NODE_ID}",
    "edge.*.cmd.*",
    "edge.main.relay.*.*",
    "edge.*.telemetry.*",
    "edge.main.ledger.>",
    "$KV.>",
    "$KV.edge_main_presence.>",
    "$JS.>",
    "$JS.API.>",
    "$SYS.>",
    "_INBOX.>",
]
PUBLISHED = [
    command_subject(FLEET, NODE_ID),
    command_subject(FLEET, OTHER_NODE_ID),
    "edge.main.cancel",
    f"edge.main.relay.{NODE_ID.upper()}.session_call",
    f"edge.main.telemetry.{NODE_ID}",
    "edge.main.inbox.guessed",
    f"$KV.edge_main_presence.node.{NODE_ID}",
    "$KV.edge_main_presence.relay.01HZX9K3M4P7Q8R9S0T1V2W3XD",
    "$JS.API.STREAM.DELETE.KV_edge_main_presence",
    f"edge.main.ledger.revocation.{'ab' * 32}",
    f"edge.main.ledger.token_key.{'ab' * 32}",
    "$JS.API.INFO",
    "$JS.API.STREAM.LIST",
    "$JS.API.STREAM.INFO.edge_main_ledger",
    "$JS.API.STREAM.MSG.GET.edge_main_ledger",
    "$JS.API.DIRECT.GET.edge_main_ledger",
    "$JS.API.CONSUMER.CREATE.edge_main_ledger.x",
    "$JS.API.STREAM.PURGE.edge_main_ledger",
]

DROPPED = "command of another relay dropped"


@cache
def nodes_ca() -> SimulatedCa:
    """Return the CA of the nodes, which issues by the functions of the relay's own."""
    return SimulatedCa("of the nodes", time.time_ns() // 1_000_000)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TlsNatsServer]:
    """A server of the relays that is the broker too, with the users that the relay writes for it."""
    users = [line for line in nats_users([NODE_ID, OTHER_NODE_ID]).splitlines() if line.startswith("    {")]
    assert len(users) == 3
    others = "".join(("authorization {\n  users: [\n", *(f"{user}\n" for user in users), "  ]\n}\n"))
    with TlsNatsServer.trusting(tmp_path, nodes_ca().root_pem, others) as server:
        yield server


@pytest.fixture
def own(tmp_path: Path) -> Iterator[TlsNatsServer]:
    """A server of the relays alone, which nevertheless trusts the root of the nodes."""
    with TlsNatsServer.trusting(tmp_path, nodes_ca().root_pem) as server:
        yield server


async def connected(server: NatsServer, **shown: Any) -> tuple[Client, list[str]]:
    """Return a client of ``server``, and what it is refused.

    Raises:
        NatsError, OSError: it is not admitted.
    """
    client, refused = Client(), list[str]()

    async def failed(error: Exception) -> None:
        refused.append(str(error).lower())

    try:
        await client.connect(server.url, error_cb=failed, allow_reconnect=False, **shown)
    except (NatsError, OSError):
        await client.close()
        raise
    return client, refused


def over_tls(server: TlsNatsServer, certificate: Path | None) -> dict[str, Any]:
    """Return how a client of ``server`` connects that shows ``certificate``."""
    shown = None if certificate is None else (certificate, certificate)
    context = client_context(server.root.read_text("ascii"), shown)
    return {"tls": context, "tls_handshake_first": True, "tls_hostname": server.address.host}


def certificate_of(who: str, server: TlsNatsServer) -> Path:
    """Return the file with the certificate and the key by which ``who`` is admitted to the broker."""
    now_ms = time.time_ns() // 1_000_000
    if who == OF_THE_BROKER:
        return server.credentials_of(RELAY_NAME, nodes_ca(), now_ms)
    node = nodes_ca().issue(NODE_ID, now_ms=now_ms)
    file = server.directory / "node.pem"
    write_atomic(file, node.leaf_pem + private_key_to_pem(node.key), PRIVATE)
    return file


async def stranger(who: str, server: TlsNatsServer) -> tuple[Client, list[str]]:
    return await connected(server, **over_tls(server, certificate_of(who, server)))


# --- who is not admitted at all


def agents_token(registry: SchemaRegistry) -> str:
    issuer = TokenIssuer(TOKEN_KEY, PUBLIC_URL, mcp_url(PUBLIC_URL), registry)
    now_s = time.time_ns() // 1_000_000_000
    return issuer.issue(
        sub="agent", tenant=TENANT, scopes=["tools:call:read_only"], now_s=now_s, ttl_s=60, jti="j"
    )


def of_nodes_key() -> str:
    """Return the key of a node as NATS spells the seed of a user."""
    return str(nkeys.encode_seed(bytes(key_named(f"node {NODE_ID}")), nkeys.PREFIX_BYTE_USER), "ascii")


async def test_what_an_agent_or_a_node_has_admits_it_nowhere(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    tried: list[Mapping[str, Any]] = [
        {},
        {"token": agents_token(registry)},
        {"user": "agent", "password": agents_token(registry)},
        {"user": "CN=relay-1", "password": ""},
        {"user": f"CN={NODE_ID}", "password": ""},
        {"nkeys_seed_str": of_nodes_key()},
        {"nkeys_seed_str": new_nkey(os.urandom)[0]},
    ]
    for shown in tried:
        with pytest.raises(NatsError, match=r"(?i)authorization violation"):
            await connected(nats, **shown)


@pytest.mark.parametrize("who", [NODE, OF_THE_BROKER])
async def test_a_certificate_for_the_broker_admits_to_no_server_of_the_relays_alone(
    own: TlsNatsServer, who: str
) -> None:
    with pytest.raises(NatsError, match=r"(?i)authorization violation"):
        await stranger(who, own)


async def test_without_a_certificate_nothing_is_admitted(
    broker: TlsNatsServer, registry: SchemaRegistry
) -> None:
    for shown in ({}, {"token": agents_token(registry)}, {"user": "CN=relay-1", "password": ""}):
        with pytest.raises((NatsError, OSError)):
            await connected(broker, **over_tls(broker, None), **shown)


# --- who is admitted to the broker


@pytest.mark.parametrize("who", [NODE, OF_THE_BROKER])
async def test_a_user_of_the_broker_hears_nothing_of_a_call(
    broker: TlsNatsServer, who: str, tmp_path: Path, registry: SchemaRegistry
) -> None:
    heard: list[str] = []

    async def hear(message: object) -> None:
        heard.append(repr(message))

    client, refused = await stranger(who, broker)
    for subject in SUBJECTS:
        await client.subscribe(subject, cb=hear)
    await until(lambda: len(refused) == len(SUBJECTS))
    assert all("permissions violation for subscription" in text for text in refused)
    async with (
        Member.joined(broker.config, tmp_path / "one", registry) as asker,
        Member.joined(broker.config, tmp_path / "other", registry) as owner,
    ):
        await owner.hold(NODE_ID, asker)
        await asker.part.router.run(echo(NODE_ID))
        await client.flush()
    assert heard == []
    await client.close()


@pytest.mark.parametrize("who", [NODE, OF_THE_BROKER])
async def test_a_user_of_the_broker_asks_cancels_and_writes_nothing(
    broker: TlsNatsServer, who: str, tmp_path: Path, registry: SchemaRegistry
) -> None:
    client, refused = await stranger(who, broker)
    local = ScriptedRouter()
    async with (
        Member.joined(broker.config, tmp_path / "one", registry) as asker,
        Member.joined(broker.config, tmp_path / "other", registry, local) as owner,
    ):
        await owner.hold(NODE_ID, asker)
        dropped = len(owner.fake.lines.entries(DROPPED))
        for subject in PUBLISHED:
            await client.publish(subject, b"{}", reply=f"$devices.{NODE_ID}.answer")
        await until(lambda: len(refused) == len(PUBLISHED))
        assert all("permissions violation for publish" in text for text in refused)
        async with asyncio.timeout(BOUND_S):
            await asker.part.router.run(echo(NODE_ID))
        holder = owner.part.presence.relay_of(NODE_ID)
        await until(lambda: asker.part.presence.relay_of(NODE_ID) == holder is not None)
        assert len(owner.fake.lines.entries(DROPPED)) == dropped
    assert len(local.commands) == 1
    await client.close()
