"""Clients that others wrote, from the relay's URL alone to the answer of a tool call, by a real browser.

mcp-remote; Codex and Claude Code, whose models are scripted; MCP Inspector, on the command line and as a
page; the Python SDK of major version 1; FastMCP. The document of Claude Code cannot be fetched here, so that
the table of known clients counts. The Python SDK of today is in tests/end_to_end. The official suite for
authorization servers calls no tool.
"""

import asyncio
import json
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import NoReturn, TextIO

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from schemas.addresses import KINDS_PATH, mcp_url
from tests.fakes.chromium import CHROMIUM, Chromium, chromium
from tests.fakes.npm import NpmPrograms
from tests.fakes.person import Browser
from tests.fakes.ports import unused_port
from tests.fakes.scripted_model import ScriptedModel, ask_claude_code, ask_codex, scripted_model
from tests.fakes.small_fleet import SmallFleet, small_fleet

pytestmark = pytest.mark.long

BOUND_S = 60
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
_AUTHORIZE = re.compile(r"(http://localhost:\d+/authorize\?[^\s\x1b\"]+)[\s\x1b\"]")


@dataclass
class Site:
    """A relay, and a person who is signed in to it."""

    fleet: SmallFleet
    ada: Browser
    npm: NpmPrograms

    @property
    def url(self) -> str:
        return mcp_url(self.fleet.url, KINDS_PATH)

    async def _allowed(self, url: str) -> str:
        """Allow what is asked for at ``url``, and return where the browser was sent."""
        return str((await self.ada.allow(url)).headers["location"])

    async def run(
        self, command: Sequence[str], answer: str = "", person: Chromium | None = None, **environment: str
    ) -> tuple[int, str]:
        """Run a client; where it prints the URL of an authorization, allow that. Return its code and output.

        ``answer``: what is sent to its input after that, with the place that the browser was sent to.
        ``person`` has a real browser, which goes there by itself.
        """
        allowed = person.allowed if person is not None else self._allowed
        process = await asyncio.create_subprocess_exec(
            *command,
            env=self.npm.environment() | environment,
            cwd=self.npm.home,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        assert process.stdin is not None
        output, visited = "", False
        try:
            async with asyncio.timeout(BOUND_S):
                while piece := await process.stdout.read(4096):
                    output += piece.decode()
                    found = _AUTHORIZE.search(output)
                    if found is not None and not visited:
                        visited = True
                        place = await allowed(found[1])
                        if answer:
                            process.stdin.write(answer.format(place).encode())
                        elif person is None:
                            await self._follow(place)
                return await process.wait(), output
        except TimeoutError:
            pytest.fail(output)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def asked(self, ask: Callable[[NpmPrograms, ScriptedModel], CompletedProcess[str]]) -> None:
        """Have a client that is signed in call a tool for its model, and show it the answer."""
        with scripted_model("find_nodes", {}) as model:
            done = await asyncio.to_thread(ask, self.npm, model)
        assert done.returncode == 0, done.stdout + done.stderr
        assert model.answers, done.stdout + done.stderr
        assert model.answer["total"] == 0

    async def _follow(self, place: str) -> None:
        """Go where the browser was sent: the client may not listen there yet."""
        async with httpx2.AsyncClient(trust_env=False) as http:
            while True:
                try:
                    await http.get(place)
                except httpx2.ConnectError:
                    self.fleet.processes.check()
                else:
                    return


def in_terminal(command: str) -> list[str]:
    """Return what runs a shell's ``command`` in a terminal, so wide that no URL is broken into lines."""
    return ["script", "-qec", f"stty cols 5000; {command}", "/dev/null"]


@pytest.fixture
async def site(tmp_path: Path, npm: NpmPrograms) -> AsyncIterator[Site]:
    async with signed_in(tmp_path, npm) as site:
        yield site


@asynccontextmanager
async def signed_in(directory: Path, npm: NpmPrograms) -> AsyncIterator[Site]:
    async with small_fleet(directory, host="localhost") as fleet:
        invite = ("people", "invite", "ada", "--role", "operator", "--public-url", fleet.url)
        link = (await fleet.relay(*invite)).strip()
        await fleet.start_relay("--no-broker")
        async with httpx2.AsyncClient(base_url=fleet.url, trust_env=False) as http:
            ada = Browser(http, fleet.url)
            await ada.accept_invitation(link)
            yield Site(fleet, ada, npm)


async def test_the_official_suite_for_authorization_servers_finds_no_failure(site: Site) -> None:
    port = unused_port()
    body = {"client_name": "Conformance", "redirect_uris": ["http://127.0.0.1/callback"]}
    client_id = (await site.ada.http.post("/register", json=body)).json()["client_id"]
    options = ("--url", site.fleet.url, "--client-id", client_id, "--resource", site.url, "--port", str(port))
    code, output = await site.run(site.npm.command("conformance", "authorization", *options))
    assert code == 0, output
    assert "authorization-code-grant" in output
    assert "FAIL" not in output.upper().replace("0 FAILED", "").replace("FAILED: 0", ""), output


@pytest.fixture
async def person(site: Site) -> AsyncIterator[Chromium]:
    """Somebody with a real browser, who has just been invited."""
    if CHROMIUM is None:
        without("chromium")
    link = (await site.fleet.relay("people", "invite", "grace")).strip()
    async with chromium() as person:
        await person.accept_invitation(link)
        yield person
        assert person.problems == []


def without(what: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"not installed: {what}")
    pytest.skip(f"not installed: {what}")


def python_client(lock: str, program: str) -> str:
    """Return a program of the environment that is made from ``lock``."""
    path = ROOT / ".venv" / "clients" / lock / "bin" / program
    if not path.exists():
        without(f"{lock}. Run: make .venv/.clients-ready")
    return str(path)


async def test_mcp_remote(site: Site, person: Chromium) -> None:
    """It is a bridge: a client that cannot sign in starts it, and calls a tool through it."""
    node, *arguments = site.npm.command("mcp-remote", site.url, "--allow-http")
    server = StdioServerParameters(command=node, args=arguments, env=site.npm.environment())
    async with (
        asyncio.timeout(BOUND_S),
        errors_of_a_program() as (output, errors),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(allow_what_is_shown(output, person))
        async with Client(stdio_client(server, errors)) as agent:
            answer = await agent.call_tool("find_nodes", {})
    assert (answer.is_error, (answer.structured_content or {})["total"]) == (False, 0)


@asynccontextmanager
async def errors_of_a_program() -> AsyncIterator[tuple[asyncio.StreamReader, TextIO]]:
    """Open a pipe: what comes out of it, and the file that a program writes its errors to."""
    source, sink = os.pipe()
    output = asyncio.StreamReader()
    with os.fdopen(sink, "w") as errors:
        reading, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(source, "rb")
        )
        try:
            yield output, errors
        finally:
            reading.close()


async def allow_what_is_shown(output: asyncio.StreamReader, person: Chromium) -> None:
    """Wait for the URL of an authorization, and allow what it asks for."""
    async for line in output:
        if found := _AUTHORIZE.search(line.decode()):
            await person.allowed(found[1])
            return
        sys.stderr.write(line.decode())


async def test_codex(site: Site, person: Chromium) -> None:
    await site.run(site.npm.command("codex", "mcp", "add", "edge", "--url", site.url))
    code, output = await site.run(site.npm.command("codex", "mcp", "login", "edge"), "", person)
    assert code == 0, output
    assert "Successfully logged in" in output
    await site.asked(ask_codex)


async def test_claude_code(site: Site, person: Chromium) -> None:
    program = site.npm.claude_code()
    await site.run([program, "mcp", "add", "--transport", "http", "edge", site.url])
    # It asks for a terminal, into which the place that the browser was sent to is pasted.
    login = f"{shlex.quote(program)} mcp login --no-browser edge"
    code, output = await site.run(in_terminal(login), "{}\r", person)
    assert code == 0, output
    await site.asked(ask_claude_code)
    (grant,) = json.loads(await site.fleet.relay("people", "show", "grace", "--json"))["grants"]
    assert (grant["client"], grant["origin"]) == ("Claude Code", "claude.ai")


async def test_the_python_sdk_of_major_version_1(site: Site, person: Chromium) -> None:
    program = [python_client("python-sdk-1", "python"), "-P", str(HERE / "python_sdk_1.py")]
    code, output = await site.run([*program, site.url, "find_nodes"], "{}\n", person)
    assert code == 0, output
    answer = json.loads(output.splitlines()[-1])
    assert (answer["isError"], answer["structuredContent"]["total"]) == (False, 0)


async def test_fastmcp(site: Site, person: Chromium) -> None:
    call = ["call", site.url, "find_nodes", "--auth", "oauth", "--json"]
    # It opens a browser: this one prints what it is given. Its log would break the URL into lines.
    quiet = {"BROWSER": "echo %s", "FASTMCP_LOG_ENABLED": "false"}
    code, output = await site.run([python_client("fastmcp", "fastmcp"), *call], "", person, **quiet)
    assert code == 0, output
    assert '"total": 0' in output


async def test_the_inspector_on_the_command_line(site: Site, person: Chromium) -> None:
    callback = f"http://127.0.0.1:{unused_port()}/oauth/callback"
    call = ["--cli", site.url, "--transport", "http", "--method", "tools/call", "--tool-name", "find_nodes"]
    command = site.npm.command("mcp-inspector", *call, "--callback-url", callback, "--format", "json")
    code, output = await site.run(in_terminal(shlex.join(command)), "", person)
    assert code == 0, output
    assert '"total":0' in output.replace(" ", "")


async def test_the_inspector_as_a_page(site: Site, person: Chromium) -> None:
    port = unused_port()
    process = await asyncio.create_subprocess_exec(
        *site.npm.command("mcp-inspector", "--web", "--server-url", site.url, "--transport", "http"),
        env=site.npm.environment()
        | {"CLIENT_PORT": str(port), "HOST": "localhost", "MCP_AUTO_OPEN_ENABLED": "false"},
        cwd=site.npm.home,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    output = ""
    try:
        async with asyncio.timeout(BOUND_S):
            while (place := re.search(rf"http://localhost:{port}\S+", output)) is None:
                output = (await process.stdout.readline()).decode()
                assert output, "the Inspector ended by itself"
        page = person.page
        await page.goto(place[0])
        # Hidden below its picture, so that a mouse never meets it.
        await page.get_by_role("switch", name="Connect").dispatch_event("click")
        await person.allow()
        await page.get_by_text("Tools", exact=True).click()
        await page.get_by_text("find_nodes").click()
        await page.get_by_role("button", name="Execute Tool").click()
        await page.get_by_text(re.compile(r'"total":\s*0')).first.wait_for()
        # Its page would complain that its program ends.
        await page.goto("about:blank")
    finally:
        process.kill()
        await process.wait()
