"""The parts of a relay that does not serve: what depends on the settings, and on the files that are there."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nacl.signing import SigningKey

from relay.audit.log import AuditInUseError, AuditUnavailableError
from relay.audit.refusal_counts import RefusalEvent
from relay.auth.agent_tokens import TokenIssuer
from relay.fleet.facts import WARNINGS
from relay.observability.metrics import Metrics
from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityStateError
from relay.server.app import Relay
from relay.server.status import RelayStatus
from relay.settings.config import ClusterConfig, ExternalIssuerConfig
from relay.state.key_files import load_or_create_key, read_key
from relay.state.people import PeopleLedger, PersonRole
from relay.state.tokens import key_id
from schemas.addresses import mcp_url
from schemas.registry import SchemaRegistry
from schemas.tokens import TokenError
from tests.fakes.disk import full_disk
from tests.fakes.environment import PUBLIC_URL, FakeEnvironment, config, fake_environment
from tests.fakes.issuer import ISSUER, IssuerServer, jwk, outside_token
from tests.fakes.signer import NOW_MS


@pytest.fixture
def fake(tmp_path: Path, registry: SchemaRegistry) -> FakeEnvironment:
    wanted = fake_environment(config(tmp_path), registry)
    CertificateAuthority(tmp_path / "ca", wanted.clock, os.urandom).create()
    return wanted


@pytest_asyncio.fixture
async def server() -> AsyncIterator[IssuerServer]:
    async with IssuerServer.running() as server:
        yield server


@contextmanager
def composed(fake: FakeEnvironment, **settings: Any) -> Iterator[Relay]:
    wanted = replace(fake.environment.config, **settings)
    relay = Relay(replace(fake.environment, config=wanted, metrics=Metrics()))
    try:
        yield relay
    finally:
        relay.audit.close()
        relay.reserve.close()


def token_by(key: SigningKey, registry: SchemaRegistry) -> str:
    return TokenIssuer(key, PUBLIC_URL, mcp_url(PUBLIC_URL), registry).issue(
        sub="agent", tenant="acme", scopes=["tools:call:read_only"], now_s=NOW_MS // 1000, ttl_s=60, jti="j"
    )


def without_key(state: Path) -> None:
    for file in (state / "ca").glob("*.key"):
        file.unlink()


def callers_in_cluster(fake: FakeEnvironment) -> Relay:
    """Return a relay of a cluster, as far as it knows callers: without NATS."""
    cluster = ClusterConfig((), Path("credentials"), None, "main", "edge_main")
    wanted = replace(fake.environment.config, cluster=cluster)
    relay = Relay.__new__(Relay)
    relay.begin(replace(fake.environment, config=wanted))
    relay.open_authority()
    relay.make_token_keys()
    relay.make_authenticator()
    return relay


async def test_the_status_has_every_member_that_the_commands_read(fake: FakeEnvironment) -> None:
    with composed(fake) as relay:
        status = RelayStatus(relay, None)()
    assert status.keys() == {
        *("program", "version", "now_ms", "pid", "uptime_s", "watchdog_s"),
        *("resident_bytes", "open_files", "max_open_files", "tasks"),
        *("ready", "subsystems", "public_url", "listen", "broker", "nodes", "ca", "cluster", "calls"),
        *("certificates", "audit_head"),
    }
    assert status["nodes"].keys() == {"known", "connected", *WARNINGS}
    assert status["broker"].keys() == {"url", "missing", "probe_node"}
    assert status["subsystems"].keys() >= {"audit", "broker", "clock", "calls", "revocations"}


async def test_what_was_refused_is_written_at_the_end(fake: FakeEnvironment, tmp_path: Path) -> None:
    with composed(fake) as relay:
        running = asyncio.create_task(relay.refusals.run())
        await asyncio.sleep(0)  # it has begun
        relay.refusals.count(RefusalEvent.NODE_REFUSED, "192.0.2.1", "chain")
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    assert '"node_refused"' in (tmp_path / "audit.jsonl").read_text("ascii")


def test_calls_are_not_ready_while_they_cannot_be_recorded(fake: FakeEnvironment) -> None:
    with composed(fake) as relay:
        assert relay.health()["audit"].ready is True
        with full_disk(), pytest.raises(AuditUnavailableError):
            relay.audit.write(decision="allow")
        assert relay.health()["audit"].ready is False
        relay.audit.write(decision="allow")
        assert relay.health()["audit"].ready is True


def test_one_relay_at_a_time_has_the_audit(fake: FakeEnvironment) -> None:
    with composed(fake), pytest.raises(AuditInUseError), composed(fake):
        pass
    with composed(fake):
        pass


# --- callers


def test_a_token_that_the_command_issues_is_accepted(
    fake: FakeEnvironment, tmp_path: Path, registry: SchemaRegistry
) -> None:
    with composed(fake) as relay:
        key = read_key(tmp_path / "token.key")
        token = token_by(key, registry)
        principal = relay.authenticator.identify(token)
        kid = key_id(bytes(key.verify_key))
        assert (principal.tenant, principal.sub, principal.kid) == ("acme", "agent", kid)
        fake.clock.advance(60_000)
        with pytest.raises(TokenError, match="expired"):
            relay.authenticator.identify(token)


def test_of_a_key_that_was_removed_no_token_is_accepted_any_more(
    fake: FakeEnvironment, tmp_path: Path, registry: SchemaRegistry
) -> None:
    with composed(fake):
        old = token_by(read_key(tmp_path / "token.key"), registry)
    (tmp_path / "token.key").unlink()
    with composed(fake) as relay:
        relay.authenticator.identify(token_by(read_key(tmp_path / "token.key"), registry))
        with pytest.raises(TokenError, match="unknown_key"):
            relay.authenticator.identify(old)


def test_without_the_cas_key_a_relay_alone_accepts_tokens_by_its_own_key(
    fake: FakeEnvironment, tmp_path: Path, registry: SchemaRegistry
) -> None:
    with composed(fake):
        pass  # which makes what the CA's key signs
    for made in ("token.key", "token_keys.jsonl"):
        (tmp_path / made).unlink()
    without_key(tmp_path)
    with composed(fake) as relay:
        relay.authenticator.identify(token_by(read_key(tmp_path / "token.key"), registry))
    assert not (tmp_path / "token_keys.jsonl").exists()


def test_without_the_cas_key_a_relay_of_a_cluster_has_no_key_that_signs(
    fake: FakeEnvironment, tmp_path: Path, registry: SchemaRegistry
) -> None:
    without_key(tmp_path)
    callers_in_cluster(fake)
    assert not (tmp_path / "token.key").exists()
    # Nor does it accept one that nothing endorses.
    own = load_or_create_key(tmp_path / "token.key", os.urandom)
    with pytest.raises(TokenError, match="unknown_key"):
        callers_in_cluster(fake).authenticator.identify(token_by(own, registry))


async def test_the_keys_of_the_issuer_that_was_named_are_fetched_while_it_runs(
    fake: FakeEnvironment, server: IssuerServer
) -> None:
    with composed(fake, external_issuer=ExternalIssuerConfig(ISSUER, server.url)) as relay:
        running = asyncio.create_task(relay.run())
        await fake.lines.until("outside issuer's keys fetched")
        assert relay.authenticator.identify(outside_token()).issuer == ISSUER
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_the_relays_own_key_is_not_accepted_from_the_other_issuer(
    fake: FakeEnvironment, server: IssuerServer, tmp_path: Path
) -> None:
    own = load_or_create_key(tmp_path / "token.key", os.urandom)
    server.publish(jwk(own, "theirs"))
    with (
        composed(fake, external_issuer=ExternalIssuerConfig(ISSUER, server.url)) as relay,
        pytest.raises(TokenError, match="unknown_key"),
    ):
        await relay.authenticator.recognise(outside_token(own, "theirs"))
    assert len(server.requests) == 1


# --- the CA, and the broker


def test_without_a_ca_the_error_says_what_to_do_first(tmp_path: Path, registry: SchemaRegistry) -> None:
    fake = fake_environment(config(tmp_path), registry)
    with pytest.raises(AuthorityStateError, match="relay ca init"):
        Relay(fake.environment)
    assert not (tmp_path / "audit.jsonl").exists()


def test_what_the_broker_reads_lies_with_the_state_unless_the_operator_names_a_directory(
    fake: FakeEnvironment, tmp_path: Path
) -> None:
    with composed(fake) as relay:
        assert relay.broker_access.refresh()
    assert (tmp_path / "broker" / "roots.pem").exists()
    with composed(fake, broker_directory=tmp_path / "elsewhere") as relay:
        assert relay.broker_access.refresh()
        assert (tmp_path / "elsewhere" / "roots.pem").read_text() == relay.authority.root_pem()


# --- options

_CALLED = """
import asyncio, os, sys
from pathlib import Path
from socket import create_server

from relay.pki.authority import CertificateAuthority
from relay.server.serving import run_relay
from relay.settings.config import RelayConfig, StateFiles
from relay.settings.environment import now_ms
from relay.state.key_files import read_key
from relay.auth.agent_tokens import TokenIssuer
from schemas.addresses import HostPort, mcp_url
from schemas.registry import SchemaRegistry
from tests.fakes.lines import LogLines
from tests.fakes.raw_http import exchange
from tests.fakes.served_relay import mcp_request, parsed


async def main(state):
    CertificateAuthority(state / "ca", now_ms, os.urandom).create()
    lines, listener = LogLines(), create_server(("127.0.0.1", 0))
    listen = HostPort(*listener.getsockname())
    url = f"http://{listen}"
    config = RelayConfig(None, url, listen, StateFiles(state))
    running = asyncio.create_task(run_relay(config, listener, lines))
    await lines.until("relay started")
    issuer = TokenIssuer(read_key(state / "token.key"), url, mcp_url(url), SchemaRegistry())
    scopes = ["tools:call:read_only"]
    token = issuer.issue(sub="a", tenant="t", scopes=scopes, now_s=now_ms() // 1000, ttl_s=60, jti="j")
    body, headers = mcp_request("tools/call", {"name": "find_nodes", "arguments": {}})
    headers += [("Host", str(listen)), ("Authorization", f"Bearer {token}"), ("Connection", "close")]
    head = [f"{name}: {value}" for name, value in [*headers, ("Content-Length", len(body))]]
    raw = "\\r\\n".join(["POST /mcp HTTP/1.1", *head, "", ""]).encode() + body
    answer = parsed(await exchange(listen.port, raw)).json()
    assert answer["result"]["structuredContent"]["nodes"] == [], answer
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


asyncio.run(main(Path(sys.argv[1])))
options = ("relay.cluster", "relay.broker", "relay.client", "relay.remote_tools", "relay.sign_in")
options += ("relay.cli", "fido2", "jinja2")
print(*sorted(name for name in sys.modules if name.startswith(options)))
"""


@pytest.mark.integration
def test_a_relay_without_options_loads_none_of_them(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", _CALLED, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, check=False, text=True, timeout=60, cwd=Path(__file__).parents[3]
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


async def test_people_can_sign_in_once_the_disk_has_room_again(fake: FakeEnvironment) -> None:
    with composed(fake, broker=None, public_url="https://relay.example") as relay:
        state = relay.environment.config.state
        PeopleLedger(state.people, fake.clock, os.urandom).invite("ada", PersonRole.MEMBER, "acme")
        with full_disk():
            await relay.watcher.poll()
        assert not fake.lines.entries("people can sign in")
        await relay.watcher.poll()
        assert fake.lines.entries("people can sign in")
