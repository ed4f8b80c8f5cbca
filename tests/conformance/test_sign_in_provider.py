"""People sign in at an OpenID Connect provider that others wrote, in a real browser: npm's oidc-provider.

From the client's URL alone to the answer of a tool call; who is revoked; and who is in no group that may.
"""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from playwright.async_api import Page, Route

from relay.cli.demo.processes import Processes
from tests.end_to_end.test_30_people_sign_in import Memory, signed_in
from tests.fakes.chromium import CHROMIUM, Chromium, chromium
from tests.fakes.cluster_server import NatsServer
from tests.fakes.npm import TIMEOUT_S, NpmPrograms
from tests.fakes.ports import unused_port
from tests.fakes.small_fleet import SmallFleet, small_fleet

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

BOUND_S = 60
CLIENT_ID, SECRET = "edge-relay", "a-secret-of-the-client"


@asynccontextmanager
async def real_provider(npm: NpmPrograms, public_url: str) -> AsyncIterator[str]:
    """Run oidc-provider during the block; the value is its issuer."""
    port = unused_port()
    redirect = f"{public_url}/sign-in/provider/answer"
    process = await asyncio.create_subprocess_exec(
        *npm.command("openid_provider.mjs", str(port), CLIENT_ID, SECRET, redirect),
        env=npm.environment(),
        cwd=npm.home,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while b"listening" not in (line := await process.stdout.readline()):
                assert line, "the provider ended by itself"
        yield f"http://localhost:{port}"
    finally:
        process.terminate()
        await process.communicate()


class Visitor:
    """A person who signs in at the provider as ``name``, and then allows the client."""

    def __init__(self, browser: Chromium, name: str) -> None:
        self._browser, self._name = browser, name

    async def accept_invitation(self, link: str) -> object:
        raise AssertionError(link)

    async def at_the_provider(self, url: str) -> Page:
        """Open ``url``, and follow the provider's own pages back."""
        page = self._browser.page
        await page.goto(url)
        assert await page.get_by_role("button", name="passkey").count() == 0
        await page.get_by_role("link", name="Sign in with localhost").click()
        await page.locator("input[name=login]").fill(self._name)
        await page.locator("input[name=password]").fill("any")
        await page.get_by_role("button", name="Sign-in").click()
        await page.get_by_role("button", name="Continue").click()
        return page

    async def allowed(self, url: str) -> str:
        sent_to: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def client(route: Route) -> None:
            if not sent_to.done():
                sent_to.set_result(route.request.url)
            await route.fulfill(body="signed in")

        await self._browser.context.route(re.compile(r"^http://127\.0\.0\.1:"), client)
        page = await self.at_the_provider(url)
        await page.get_by_role("button", name="Allow").click()
        return await asyncio.wait_for(sent_to, BOUND_S)


def written_settings(fleet: SmallFleet, issuer: str, *, has_secret: bool = True) -> Path:
    """Write what the operator does: the client's secret, and the table."""
    secret, settings = fleet.directory / "oidc.secret", fleet.directory / "relay.toml"
    if has_secret:
        secret.write_text(SECRET)
        secret.chmod(0o600)
    settings.write_text(
        f'["people.oidc"]\nissuer = "{issuer}"\nclient_id = "{CLIENT_ID}"\nsecret_file = "{secret}"\n'
        'scopes = ["groups"]\nallow = ["groups=boards:operator:*"]\n'
    )
    settings.chmod(0o600)
    return settings


@pytest.mark.skipif(CHROMIUM is None and os.environ.get("CI") != "true", reason="no chromium here")
async def test_from_the_url_alone_to_the_answer_of_a_tool(tmp_path: Path, npm: NpmPrograms) -> None:
    async with small_fleet(tmp_path, host="localhost") as fleet, real_provider(npm, fleet.url) as issuer:
        settings = str(written_settings(fleet, issuer))
        await fleet.start_relay("--no-broker", "--config", settings)
        node = await fleet.enrol("kitchen")
        await fleet.start_node("kitchen")
        lines = (await fleet.relay("doctor", "--config", settings, "--json")).splitlines()
        rows = {row["check"]: row for row in map(json.loads, lines)}
        assert rows["provider"]["found"] == f"{issuer} answers, with 1 key"

        memory = Memory()
        async with chromium() as browser:
            visitor = Visitor(browser, "boards-ada")
            async with asyncio.timeout(BOUND_S), signed_in(fleet, visitor, memory) as client:
                answer = None
                while answer is None or answer.is_error:
                    arguments = {"node": node["node_id"], "message": "hello"}
                    answer = await client.call_tool("sysecho-invoke", arguments)
                assert "hello" in json.dumps(answer.structured_content)
            # The provider's own pages load a font, which is not had everywhere.
            assert [each for each in browser.problems if "Security Policy" in each] == []

        [person] = json.loads(await fleet.relay("people", "list", "--json"))
        assert person["name"] == "boards-ada"
        assert (person["issuer"], person["state"]) == (issuer, "active")
        await fleet.relay("people", "revoke", "boards-ada")
        assert memory.tokens is not None
        headers = {"Authorization": f"Bearer {memory.tokens.access_token}"}
        async with httpx2.AsyncClient(base_url=fleet.url, trust_env=False, headers=headers) as http:
            async with asyncio.timeout(BOUND_S):
                while (await http.post("/mcp/kinds", json={})).status_code != 401:
                    fleet.processes.check()
        async with chromium() as browser:
            page = await Visitor(browser, "cooks-bob").at_the_provider(f"{fleet.url}/sign-in")
            await page.get_by_text("its groups do not let you").wait_for()


@asynccontextmanager
async def two_relays(directory: Path, nats: NatsServer) -> AsyncIterator[tuple[SmallFleet, SmallFleet]]:
    """Hold the relay with the CA's key, and another, at which people and clients of the fleet arrive."""
    one, two = directory / "one", directory / "two"
    one.mkdir()
    two.mkdir()
    options = ("--no-broker", "--cluster", nats.url, "--cluster-credentials", str(nats.credentials))
    async with small_fleet(one) as first, Processes.running(two) as processes:
        other = SmallFleet(two, processes, options, host="localhost")
        first.options, first.public_url = options, other.url
        yield first, other


@pytest.mark.skipif(CHROMIUM is None and os.environ.get("CI") != "true", reason="no chromium here")
async def test_a_relay_without_the_cas_key_forwards_the_way_to_the_provider_and_back(
    tmp_path: Path, npm: NpmPrograms
) -> None:
    with NatsServer.running(tmp_path) as nats:
        async with two_relays(tmp_path, nats) as (first, other), real_provider(npm, other.url) as issuer:
            settings = str(written_settings(first, issuer))
            await first.start_relay(*first.options, "--config", settings)
            await first.relay("cluster", "seal", "--yes")
            archive = str(tmp_path / "other.age")
            await first.relay("ca", "backup", archive, "--without-ca-key", "--plain")
            await other.relay("ca", "restore", archive, "--plain")
            # It has the table, and not the secret.
            settings = str(written_settings(other, issuer, has_secret=False))
            await other.start_relay(*other.options, "--config", settings)
            lines = (await other.relay("doctor", "--config", settings, "--json")).splitlines()
            rows = {row["check"]: row for row in map(json.loads, lines)}
            assert rows["provider"]["found"] == "the relay with the CA's key asks it, and has its secret"

            async with asyncio.timeout(BOUND_S), httpx2.AsyncClient(trust_env=False) as http:
                while (await http.get(f"{other.url}/sign-in")).status_code != 200:
                    other.processes.check()
            await first.enrol("kitchen")  # by way of the other one, as all of the fleet

            memory = Memory()
            async with chromium() as browser:
                visitor = Visitor(browser, "boards-ada")
                async with asyncio.timeout(BOUND_S), signed_in(other, visitor, memory) as client:
                    assert (await client.list_tools()).tools
                assert [each for each in browser.problems if "Security Policy" in each] == []
                assert await other.metric('edge_relay_sign_ins_total{event="forwarded"}') > 0
                async with asyncio.timeout(BOUND_S):
                    while "boards-ada" not in await other.relay("people", "list"):  # it travels by the stream
                        other.processes.check()
                await other.relay("people", "revoke", "boards-ada")
                assert memory.tokens is not None
                headers = {"Authorization": f"Bearer {memory.tokens.access_token}"}
                async with (
                    asyncio.timeout(BOUND_S),
                    httpx2.AsyncClient(base_url=other.url, trust_env=False, headers=headers) as http,
                ):
                    while (await http.post("/mcp/kinds", json={})).status_code != 401:
                        other.processes.check()
            async with chromium() as browser:
                page = await Visitor(browser, "boards-ada").at_the_provider(f"{other.url}/sign-in")
                await page.get_by_text("has revoked you").wait_for()
