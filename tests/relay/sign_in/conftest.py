"""A relay with sign-in on its own clock, asked in this process; people are invited as the command does it."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import pytest_asyncio

from relay.cli.backup.commands import restore, save_for_another_relay
from relay.pki.authority import CertificateAuthority
from relay.server.app import Relay
from relay.settings.config import ClusterConfig, StateFiles
from relay.settings.environment import ticks_ms
from relay.settings.kept import KeptSettings
from relay.sign_in.authorization import challenge_of
from relay.state.people import PersonRole
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource
from tests.fakes.clock import FakeClock
from tests.fakes.environment import PUBLIC_URL, FakeEnvironment, config, fake_environment
from tests.fakes.person import Browser, answered
from tests.fakes.polling import until
from tests.fakes.signer import NOW_MS, TENANT
from tests.fakes.small_fleet import SmallFleet, small_fleet

REDIRECT = "https://client.example/callback"
LOOPBACK = "http://127.0.0.1:41234/callback"
VERIFIER = "v" * 43
RESOURCE = f"{PUBLIC_URL}/mcp/kinds"


@dataclass
class Stage:
    """One relay, and what asks it. ``http`` is a program without cookies."""

    relay: Relay
    fake: FakeEnvironment
    http: httpx2.AsyncClient
    state: Path

    def link(self, name: str = "ada", role: PersonRole = PersonRole.OPERATOR, tenant: str = TENANT) -> str:
        """Invite a person, as the command does; the relay has noticed it."""
        _, secret = self.relay.people.invite(name, role, tenant)
        self.relay.offer_sign_in(self.relay.people.read())
        return f"{PUBLIC_URL}/invitation#{secret}"

    async def person(
        self, name: str = "ada", role: PersonRole = PersonRole.OPERATOR, tenant: str = TENANT
    ) -> Browser:
        """Return the browser of a person who has made a passkey, and is signed in."""
        browser = Browser(self.http, PUBLIC_URL)
        made = await browser.accept_invitation(self.link(name, role, tenant))
        assert made.status_code == 200, (made.text, self.fake.lines.entries()[-3:])
        return browser

    async def registered(self, *uris: str, name: str = "A Client") -> str:
        body = {"client_name": name, "redirect_uris": list(uris) or [REDIRECT]}
        answer = await self.http.post("/register", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["client_id"])

    def query(self, client_id: str, redirect: str = REDIRECT, **members: str | None) -> str:
        """Return the path of an authorization; ``members`` replace, and with None remove, its usual ones."""
        usual: dict[str, str | None] = {
            "response_type": "code",
            "client_id": client_id,
            "redirect_uri": redirect,
            "state": "a state",
            "code_challenge": challenge_of(VERIFIER),
            "code_challenge_method": "S256",
            "resource": RESOURCE,
            "scope": "tools:call:read_only",
        }
        sent = {name: value for name, value in (usual | members).items() if value is not None}
        return f"/authorize?{urlencode(sent)}"

    async def code(self, browser: Browser, client_id: str, redirect: str = REDIRECT, **form: Any) -> str:
        answer = answered(await browser.allow(self.query(client_id, redirect), **form))
        assert answer["state"] == "a state"
        assert answer["iss"] == PUBLIC_URL
        return answer["code"]

    async def token(self, **form: str | None) -> httpx2.Response:
        """Send a token request; by default one that redeems ``code``."""
        usual: dict[str, str | None] = {
            "grant_type": "authorization_code",
            "redirect_uri": REDIRECT,
            "code_verifier": VERIFIER,
            "resource": RESOURCE,
        }
        sent = {name: value for name, value in (usual | form).items() if value is not None}
        return await self.http.post("/token", data=sent)

    async def tokens(self, browser: Browser, client_id: str, **form: Any) -> Mapping[str, Any]:
        answer = await self.token(code=await self.code(browser, client_id, **form), client_id=client_id)
        assert answer.status_code == 200, answer.text
        members: Mapping[str, Any] = answer.json()
        return members

    async def refresh(self, token: str, client_id: str) -> httpx2.Response:
        form = {"grant_type": "refresh_token", "refresh_token": token, "client_id": client_id}
        return await self.http.post("/token", data=form)

    async def is_accepted(self, token: str) -> bool:
        """Return whether MCP accepts an access token."""
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        answer = await self.http.post("/mcp", content=b"{}", headers=headers)
        return answer.status_code != 401

    def ended(self) -> list[str]:
        """Return the agents whose grants have ended, as the audit has it."""
        lines = map(json.loads, (self.state / "audit.jsonl").read_text("ascii").splitlines())
        return [line["sub"] for line in lines if line.get("event") == "grant_ended"]

    def applied(self) -> None:
        """Have the relay apply what was revoked, as its watcher does within a second."""
        self.relay.authenticator.revoke(self.relay.revoked_tokens.jtis())


@dataclass
class RelayOfAFleet(Stage):
    """A relay of a fleet, with all of its own parts, that runs."""

    running: asyncio.Task[None] | None = None

    @classmethod
    @asynccontextmanager
    async def joined(
        cls, cluster: ClusterConfig, state: Path, registry: SchemaRegistry
    ) -> AsyncIterator["RelayOfAFleet"]:
        """Hold the relay whose files are in ``state``, once it is connected to NATS."""
        fake = fake_environment(replace(config(state), broker=None, cluster=cluster), registry)
        environment = replace(
            fake.environment,
            ulids=UlidSource(lambda: time.time_ns() // 1_000_000, os.urandom),
            monotonic=time.monotonic,
            ticks_ms=ticks_ms,
        )
        relay = Relay(environment)
        running = asyncio.create_task(relay.run())
        try:
            await until(lambda: running.done() or (relay.cluster is not None and relay.cluster.shares()))
            async with asking(relay) as http:
                yield cls(relay, fake, http, state, running=running)
            assert not running.done(), running.exception()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await relay.end()

    async def reaches(self, *others: "RelayOfAFleet") -> None:
        """Return once this relay knows of the others, and asks by a channel."""
        cluster = self.relay.cluster
        assert cluster is not None
        wanted = {each.relay.cluster.relay for each in others if each.relay.cluster is not None}
        await until(lambda: cluster.link.is_sealed and wanted <= set(cluster.presence.others()))


def another_relay(first: Path, directory: Path) -> Path:
    """Return the state of another relay of the fleet of ``first``, as `relay ca backup` makes it."""
    state, clock = StateFiles(first), FakeClock(NOW_MS)
    ca = CertificateAuthority(state.ca, clock, os.urandom)
    archive = save_for_another_relay(state, ca, KeptSettings(PUBLIC_URL), NOW_MS, os.urandom)
    restore(archive, StateFiles(directory))
    return directory


def asking(relay: Relay, address: str = "127.0.0.1") -> httpx2.AsyncClient:
    """Return what asks ``relay`` from ``address``."""
    transport = httpx2.ASGITransport(relay.application, client=(address, 1))
    return httpx2.AsyncClient(transport=transport, base_url=PUBLIC_URL)


@asynccontextmanager
async def staged(fake: FakeEnvironment, state: Path) -> AsyncIterator[Stage]:
    """Hold a relay whose CA is in ``state``, made if it is not."""
    if not (state / "ca").exists():
        CertificateAuthority(state / "ca", fake.clock, os.urandom).create()
    relay = Relay(fake.environment)
    async with asking(relay) as http:
        yield Stage(relay, fake, http, state)
    await relay.end()


@pytest_asyncio.fixture
async def stage(tmp_path: Path, registry: SchemaRegistry) -> AsyncIterator[Stage]:
    async with staged(fake_environment(replace(config(tmp_path), broker=None), registry), tmp_path) as stage:
        yield stage


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[SmallFleet]:
    async with small_fleet(tmp_path, host="localhost") as fleet:
        yield fleet


@pytest_asyncio.fixture
async def own() -> AsyncIterator[str]:
    """The URL of a client that is a page: at the relay's own site, so that it has the relay's cookie."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 23\r\nconnection: close\r\n\r\n"
        )
        writer.write(head + b"<title>A client</title>")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://localhost:{server.sockets[0].getsockname()[1]}"
