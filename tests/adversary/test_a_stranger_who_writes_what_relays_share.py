"""A stranger has the credentials of a relay, and writes the stream. That admits no agent and no node."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.js import JetStreamContext

from relay.auth.agent_tokens import AcceptedKeys, Authenticator, TokenIssuer
from relay.pki.authority import CertificateAuthority
from relay.pki.enrolments import CountedUses, EnrolmentInfo, EnrolmentRefusedError
from relay.state.tokens import TokenKeys, key_of
from schemas.addresses import mcp_url
from schemas.certificates import make_csr
from schemas.enrolment import NODE, JoinToken, proven
from schemas.keys import base64url
from schemas.registry import SchemaRegistry
from schemas.tokens import AGENT_REF, TokenError, TokenVerifier
from tests.fakes.clock import FakeClock
from tests.fakes.cluster import TENANT, Machine, Member
from tests.fakes.cluster_server import NatsServer
from tests.fakes.enrolling import enrolments_of
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.hub import Hub
from tests.fakes.polling import until
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, key_named

OURS, THEIRS = key_named("the key of agents' tokens"), key_named("the stranger's key")
AUDIENCE = mcp_url(PUBLIC_URL)
SUBJECT = "edge.main.ledger"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine.made(tmp_path / "relay", issues=True)
    made.keys.add(bytes(OURS.verify_key), NOW_MS)
    return made


@pytest_asyncio.fixture
async def nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    with NatsServer.running(tmp_path) as server:
        yield server


@asynccontextmanager
async def stranger_at(nats: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = Client()
    seed = nats.credentials.read_text()
    await client.connect(nats.url, nkeys_seed_str=seed, inbox_prefix="edge.main.inbox")
    yield client.jetstream()
    await client.close()


def forged(machine: Machine, tmp_path: Path) -> list[dict[str, Any]]:
    """Return what may make a relay accept the stranger's key."""
    (good,) = machine.keys.entries().values()
    own_ca = CertificateAuthority(tmp_path / "stranger", FakeClock(NOW_MS), os.urandom)
    own_ca.create()
    own = TokenKeys(tmp_path / "stranger.jsonl", own_ca, FakeClock(NOW_MS))
    own.add(bytes(THEIRS.verify_key), NOW_MS)
    (of_own_ca,) = own.entries().values()
    key = {"public_key": bytes(THEIRS.verify_key).hex()}
    by_itself = base64url(THEIRS.sign(b"edge-kubelet token key\n").signature)
    later = {"made_ms": NOW_MS + 1, "others_until_ms": 0}
    return [
        of_own_ca,
        of_own_ca | {"root": good["root"]},
        good | key,
        good | key | later,
        good | key | {"signature": base64url(bytes(64))},
        good | key | {"signature": by_itself},
    ]


def judge(machine: Machine, registry: SchemaRegistry) -> Authenticator:
    keys = AcceptedKeys(FakeClock(NOW_MS))
    keys.accept(machine.keys.accepted())
    verifier = TokenVerifier(registry, AGENT_REF)
    return Authenticator(verifier, keys, PUBLIC_URL, frozenset({AUDIENCE}), FakeClock(NOW_MS))


def token(key: Any, registry: SchemaRegistry) -> str:
    return TokenIssuer(key, PUBLIC_URL, AUDIENCE, registry).issue(
        sub="agent", tenant=TENANT, scopes=["tools:call:read_only"], now_s=NOW_MS // 1000, ttl_s=60, jti="j"
    )


async def test_no_key_that_it_writes_verifies_a_token(
    machine: Machine, nats: NatsServer, registry: SchemaRegistry, tmp_path: Path
) -> None:
    other = Machine.like(machine, tmp_path / "other")
    async with machine.joined(nats.config, registry), other.joined(nats.config, registry) as member:
        await until(lambda: other.keys.accepted() == machine.keys.accepted() != {})
        entries = forged(machine, tmp_path)

        def refused(count: int) -> bool:
            return min(machine.refused, other.refused) >= count

        async with stranger_at(nats) as stranger:
            for count, entry in enumerate(entries, 1):
                await stranger.publish(f"{SUBJECT}.token_key.{key_of(entry)}", json.dumps(entry).encode())
                # One by one: of several with one key, a relay may judge the last alone.
                await until(partial(refused, count))
            (good,) = machine.keys.entries().values()
            ended = good | {"others_until_ms": NOW_MS, "made_ms": NOW_MS}
            await stranger.publish(f"{SUBJECT}.token_key.{key_of(good)}", json.dumps(ended).encode())
        assert member.part.ledgers.understands
    for relay in (machine, other):
        judging = judge(relay, registry)
        assert judging.identify(token(OURS, registry)).sub == "agent"
        with pytest.raises(TokenError, match="unknown_key"):
            judging.identify(token(THEIRS, registry))
        assert len(relay.keys.entries()) == 1


def request_of(join: JoinToken, node_id: str) -> Any:
    csr = make_csr(key_named(node_id), node_id)
    return proven({"join_id": join.id, "csr": csr, "nonce": base64url(os.urandom(32))}, join.key, NODE)


async def test_a_token_that_was_used_enrols_no_node_that_it_names(
    hub: Hub, machine: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    """It has the token of a node that has enrolled, and says that the use was its own node's."""
    join = machine.join_tokens.create(TENANT, 3600, 1, machine.ca.root_pem())

    async def enrol(member: Member, node_id: str) -> None:
        uses = CountedUses(machine.join_tokens)
        uses.connect(member.part.ledgers)
        info = EnrolmentInfo(PUBLIC_URL, None, own_root=True)
        names = machine.names.name_new
        enrolments = enrolments_of(hub, machine.ca, machine.join_tokens, names, info, uses)
        await enrolments.enrol(request_of(join, node_id))

    async with machine.joined(nats.config, registry) as member:
        await enrol(member, NODE_ID)
        async with stranger_at(nats) as stranger:
            held = await stranger.stream_info("edge_main_ledger", subjects_filter=f"{SUBJECT}.>")
            (subject,) = [each for each in held.state.subjects or {} if ".join_token_use." in each]
            token_digest = subject.split(".")[-1].removesuffix("-1")
            theirs = {"token": token_digest, "use": 1, "node_id": OTHER_NODE_ID, "expires_at_ms": NOW_MS}
            await stranger.publish(subject, json.dumps(theirs).encode())
        with pytest.raises(EnrolmentRefusedError) as refused:
            await enrol(member, OTHER_NODE_ID)
    assert refused.value.reason == "used_up"
    # As after a restart: what is kept says whose the use was.
    async with Machine.at(machine.directory, issues=True).joined(nats.config, registry) as member:
        await until(lambda: member.part.ledgers.is_current)
        with pytest.raises(EnrolmentRefusedError):
            await enrol(member, OTHER_NODE_ID)
