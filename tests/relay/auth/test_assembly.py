"""The assembled package that identifies callers."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from relay.auth.agent_tokens import TokenIssuer, key_id
from relay.auth.assembly import AuthPart, assemble
from relay.auth.ledger_freshness import LIMIT_S, SOURCES
from relay.config import ExternalIssuerConfig
from relay.key_files import load_or_create_key
from schemas.addresses import mcp_url
from schemas.registry import SchemaRegistry
from schemas.tokens import TokenError
from tests.fakes.environment import PUBLIC_URL, FakeEnvironment, config, fake_environment
from tests.fakes.issuer import ISSUER, IssuerServer, jwk, outside_token
from tests.fakes.signer import NOW_MS


@pytest.fixture
def fake(tmp_path: Path, registry: SchemaRegistry) -> FakeEnvironment:
    return fake_environment(config(tmp_path), registry)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[IssuerServer]:
    async with IssuerServer.running() as server:
        yield server


def with_issuer(fake: FakeEnvironment, server: IssuerServer) -> AuthPart:
    named = ExternalIssuerConfig(ISSUER, server.url)
    wanted = replace(fake.environment.config, external_issuer=named)
    return assemble(replace(fake.environment, config=wanted))


def test_a_token_that_the_command_issues_is_accepted(
    fake: FakeEnvironment, tmp_path: Path, registry: SchemaRegistry
) -> None:
    part = assemble(fake.environment)
    key = load_or_create_key(tmp_path / "token.key", os.urandom)
    token = TokenIssuer(key, PUBLIC_URL, mcp_url(PUBLIC_URL), registry).issue(
        sub="agent", tenant="acme", scopes=["tools:call:read_only"], now_s=NOW_MS // 1000, ttl_s=60, jti="j"
    )
    principal = part.authenticator.identify(token)
    assert (principal.tenant, principal.sub, principal.kid) == (
        "acme",
        "agent",
        key_id(bytes(key.verify_key)),
    )
    fake.clock.advance(60_000)
    with pytest.raises(TokenError, match="expired"):
        part.authenticator.identify(token)


def test_calls_are_not_ready_before_every_ledger_was_read_and_while_one_is_old(
    fake: FakeEnvironment,
) -> None:
    part = assemble(fake.environment)
    for source in SOURCES:
        assert part.health()["revocations"].ready is False
        part.freshness.read(source)
    assert part.health()["revocations"].ready is True
    fake.seconds.now += LIMIT_S
    assert part.health()["revocations"].ready is False


async def test_without_another_issuer_it_has_no_keys_to_fetch_and_does_not_end(fake: FakeEnvironment) -> None:
    part = assemble(fake.environment)
    assert part.external is None
    running = asyncio.create_task(part.run())
    await asyncio.sleep(0)
    assert not running.done()
    running.cancel()


async def test_the_keys_of_the_issuer_that_was_named_are_fetched_while_it_runs(
    fake: FakeEnvironment, server: IssuerServer
) -> None:
    part = with_issuer(fake, server)
    running = asyncio.create_task(part.run())
    await fake.lines.until("outside issuer's keys fetched")
    assert part.authenticator.identify(outside_token()).issuer == ISSUER
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_the_relays_own_key_is_not_accepted_from_the_other_issuer(
    fake: FakeEnvironment, server: IssuerServer, tmp_path: Path
) -> None:
    own = load_or_create_key(tmp_path / "token.key", os.urandom)
    server.publish(jwk(own, "theirs"))
    part = with_issuer(fake, server)
    with pytest.raises(TokenError, match="unknown_key"):
        await part.authenticator.recognise(outside_token(own, "theirs"))
    assert len(server.requests) == 1
