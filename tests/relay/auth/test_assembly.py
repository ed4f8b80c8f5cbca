"""The assembled package that identifies callers."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from nacl.signing import SigningKey

from relay.auth.agent_tokens import TokenIssuer
from relay.auth.assembly import AuthPart, assemble
from relay.pki.authority import CertificateAuthority
from relay.settings.config import ClusterConfig, ExternalIssuerConfig
from relay.settings.environment import RelayEnvironment
from relay.state.key_files import load_or_create_key, read_key
from relay.state.tokens import key_id
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


@pytest.fixture
def ca(tmp_path: Path, fake: FakeEnvironment) -> CertificateAuthority:
    made = CertificateAuthority(tmp_path / "ca", fake.clock, os.urandom)
    made.create()
    return made


def with_issuer(fake: FakeEnvironment, ca: CertificateAuthority, server: IssuerServer) -> AuthPart:
    named = ExternalIssuerConfig(ISSUER, server.url)
    wanted = replace(fake.environment.config, external_issuer=named)
    return assemble(replace(fake.environment, config=wanted), ca)


def test_a_token_that_the_command_issues_is_accepted(
    fake: FakeEnvironment, ca: CertificateAuthority, tmp_path: Path, registry: SchemaRegistry
) -> None:
    part = assemble(fake.environment, ca)
    key = load_or_create_key(tmp_path / "token.key", os.urandom)
    token = token_by(key, registry)
    principal = part.authenticator.identify(token)
    assert (principal.tenant, principal.sub, principal.kid) == (
        "acme",
        "agent",
        key_id(bytes(key.verify_key)),
    )
    fake.clock.advance(60_000)
    with pytest.raises(TokenError, match="expired"):
        part.authenticator.identify(token)


def token_by(key: SigningKey, registry: SchemaRegistry) -> str:
    return TokenIssuer(key, PUBLIC_URL, mcp_url(PUBLIC_URL), registry).issue(
        sub="agent", tenant="acme", scopes=["tools:call:read_only"], now_s=NOW_MS // 1000, ttl_s=60, jti="j"
    )


def in_cluster(fake: FakeEnvironment, tmp_path: Path) -> RelayEnvironment:
    cluster = ClusterConfig((), tmp_path / "credentials", None, "main")
    return replace(fake.environment, config=replace(fake.environment.config, cluster=cluster))


def without_key(tmp_path: Path) -> None:
    for file in (tmp_path / "ca").glob("*.key"):
        file.unlink()


def test_of_a_key_that_was_removed_no_token_is_accepted_any_more(
    fake: FakeEnvironment, ca: CertificateAuthority, tmp_path: Path, registry: SchemaRegistry
) -> None:
    assemble(fake.environment, ca)
    old = token_by(read_key(tmp_path / "token.key"), registry)
    (tmp_path / "token.key").unlink()
    part = assemble(fake.environment, ca)
    part.authenticator.identify(token_by(read_key(tmp_path / "token.key"), registry))
    with pytest.raises(TokenError, match="unknown_key"):
        part.authenticator.identify(old)


def test_without_the_cas_key_a_relay_alone_accepts_tokens_by_its_own_key(
    fake: FakeEnvironment, ca: CertificateAuthority, tmp_path: Path, registry: SchemaRegistry
) -> None:
    without_key(tmp_path)
    part = assemble(fake.environment, ca)
    part.authenticator.identify(token_by(read_key(tmp_path / "token.key"), registry))
    assert not (tmp_path / "token_keys.jsonl").exists()


def test_without_the_cas_key_a_relay_of_a_cluster_has_no_key_that_signs(
    fake: FakeEnvironment, ca: CertificateAuthority, tmp_path: Path, registry: SchemaRegistry
) -> None:
    without_key(tmp_path)
    assemble(in_cluster(fake, tmp_path), ca)
    assert not (tmp_path / "token.key").exists()
    # Nor does it accept one that nothing endorses.
    own = load_or_create_key(tmp_path / "token.key", os.urandom)
    with pytest.raises(TokenError, match="unknown_key"):
        assemble(in_cluster(fake, tmp_path), ca).authenticator.identify(token_by(own, registry))


async def test_without_another_issuer_it_has_no_keys_to_fetch_and_does_not_end(
    fake: FakeEnvironment, ca: CertificateAuthority
) -> None:
    part = assemble(fake.environment, ca)
    assert part.external is None
    running = asyncio.create_task(part.run())
    await asyncio.sleep(0)
    assert not running.done()
    running.cancel()


async def test_the_keys_of_the_issuer_that_was_named_are_fetched_while_it_runs(
    fake: FakeEnvironment, ca: CertificateAuthority, server: IssuerServer
) -> None:
    part = with_issuer(fake, ca, server)
    running = asyncio.create_task(part.run())
    await fake.lines.until("outside issuer's keys fetched")
    assert part.authenticator.identify(outside_token()).issuer == ISSUER
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_the_relays_own_key_is_not_accepted_from_the_other_issuer(
    fake: FakeEnvironment, ca: CertificateAuthority, server: IssuerServer, tmp_path: Path
) -> None:
    own = load_or_create_key(tmp_path / "token.key", os.urandom)
    server.publish(jwk(own, "theirs"))
    part = with_issuer(fake, ca, server)
    with pytest.raises(TokenError, match="unknown_key"):
        await part.authenticator.recognise(outside_token(own, "theirs"))
    assert len(server.requests) == 1
