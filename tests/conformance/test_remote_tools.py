"""The guarded client against servers that run: npm's reference server, which others wrote, and this relay."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relay.remote_tools import (
    BearerToken,
    HttpServer,
    Permissions,
    Reason,
    Risk,
    RiskSource,
    StdioServer,
    ToolInvalidArguments,
    ToolNotFound,
    ToolProviderFailure,
    ToolResult,
    ToolRule,
    ToolUnauthorized,
)
from tests.fakes.demo import Demo
from tests.fakes.guarded import Guarded, guarded
from tests.fakes.npm import NpmPrograms
from tests.fakes.ports import unused_port

pytestmark = pytest.mark.long

READ = Permissions(("*",), Risk.READ, frozenset({"tools:call:read_only"}))


@asynccontextmanager
async def reference(npm: NpmPrograms, transport: str) -> AsyncIterator[Guarded]:
    """Hold a client of npm's reference server."""
    if transport == "stdio":
        command, *arguments = npm.command("mcp-server-everything", "stdio")
        server = StdioServer(command, tuple(arguments), npm.environment())
        async with guarded(server, trust_annotations=True) as client:
            yield client
        return
    async with (
        npm.everything_over_http(unused_port(), transport) as url,
        guarded(url, trust_annotations=True) as client,
    ):
        yield client


OVER_HTTP = ["streamableHttp", "sse"]
TRANSPORTS = pytest.mark.parametrize("transport", ["stdio", *OVER_HTTP])


@pytest.mark.holds(
    "SPEC-0004/2.1/discovery",
    "SPEC-0004/2.1/execution",
    "SPEC-0004/2.2/compatibility",
    "SPEC-0004/4/b-interop",
    "SPEC-0004/5/interop-conformance",
)
@TRANSPORTS
async def test_the_reference_server_is_listed_and_called(npm: NpmPrograms, transport: str) -> None:
    async with reference(npm, transport) as client:
        contracts = {contract.name: contract for contract in await client.tools.list_tools()}
        assert (contracts["echo"].risk, contracts["echo"].risk_source) == (Risk.READ, RiskSource.ANNOTATIONS)
        assert contracts["gzip-file-as-resource"].risk is Risk.WRITE
        assert (await client.tools.execute("echo", {"message": "ping"})).text == "Echo: ping"
        assert "5" in (await client.tools.execute("get-sum", {"a": 2, "b": 3})).text
        weather = await client.tools.execute("get-structured-content", {"location": "Chicago"})
        assert {"temperature", "conditions", "humidity"} <= set(weather.structured)
        with pytest.raises(ToolInvalidArguments):
            await client.tools.execute("get-sum", {"a": "two"})
        events = [record["event"] for record in client.records]
        assert events == ["started", "ended"] * 3 + ["refused"]


@pytest.mark.holds("SPEC-0004/5/interop-conformance")
@TRANSPORTS
async def test_the_reference_servers_progress_is_passed_on(npm: NpmPrograms, transport: str) -> None:
    seen: list[float] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:  # noqa: ARG001
        seen.append(progress)

    async with reference(npm, transport) as client:
        arguments = {"duration": 0.2, "steps": 2}
        await client.tools.execute("trigger-long-running-operation", arguments, on_progress=note)
    assert seen == [1, 2]


async def test_the_reference_server_sees_no_secret_of_the_environment(
    npm: NpmPrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_TOKEN", "a-secret-of-the-runtime")
    async with reference(npm, "stdio") as client:
        shown = json.loads((await client.tools.execute("get-env")).text)
    assert "EDGE_TOKEN" not in shown


@pytest.mark.holds("SPEC-0004/4/b-interop")
@pytest.mark.parametrize("transport", OVER_HTTP)
async def test_the_reference_server_is_called_again_after_it_was_restarted(
    npm: NpmPrograms, transport: str
) -> None:
    port = unused_port()
    rules = (ToolRule("echo", risk=Risk.READ, idempotent=True),)
    path = "sse" if transport == "sse" else "mcp"
    async with guarded(f"http://127.0.0.1:{port}/{path}", rules=rules) as client:
        for _ in range(2):
            async with npm.everything_over_http(port, transport):
                assert (await client.tools.execute("echo", {"message": "ping"})).text == "Echo: ping"


@pytest.mark.holds("SPEC-0004/3.3/tool-not-found", "SPEC-0004/3.3/invalid-arguments")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize("sdk", ["python", "typescript-1", "typescript-2"])
async def test_what_the_official_sdks_reject_is_typed(npm: NpmPrograms, sdk: str, mode: str) -> None:
    language, _, version = sdk.partition("-")
    python = [sys.executable, "-P", "-m", "tests.fakes.sdk_server"]
    command, *arguments = python if language == "python" else npm.command("sdk_server.mjs", version)
    environment = {**npm.environment(), "PYTHONPATH": str(Path(__file__).parents[2])}
    async with guarded(StdioServer(command, tuple(arguments), environment), mode=mode) as client:
        await client.tools.execute("even", {"n": 2})
        with pytest.raises(ToolInvalidArguments, match="it is odd"):
            await client.tools.execute("even", {"n": 3})
        await client.tools.execute("once")
        with pytest.raises(ToolNotFound, match="once"):
            await client.tools.execute("once")
        with pytest.raises(ToolProviderFailure, match="another"):
            await client.tools.execute("fails")


def is_result(item: object) -> bool:
    return isinstance(item, ToolResult)


def relay_of(demo: Demo) -> HttpServer:
    return HttpServer(demo.mcp_url, BearerToken(demo.facts["token"]))


@pytest.mark.holds("SPEC-0004/4/c-high-security", "SPEC-0004/5/interop-conformance")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_this_relay_is_verified_and_called_without_trusting_it(demo: Demo, mode: str) -> None:
    root = Path(demo.facts["ca_root"])
    name = f"sysecho.{demo.real_node}.echo.invoke"
    async with guarded(relay_of(demo), permissions=READ, verify_manifests=root, mode=mode) as client:
        contracts = {contract.name: contract for contract in await client.tools.list_tools()}
        assert set(contracts) == set(demo.tool_names)
        assert {contract.risk_source for contract in contracts.values()} == {RiskSource.MANIFEST}
        assert (contracts[name].version, contracts[name].idempotent) == ("1.0.0", True)
        result = await client.tools.execute(name, {"message": "ping"})
        assert result.structured["message"] == "ping"
        assert result.structured["node_id"] == demo.real_node


async def test_a_tool_of_this_relay_is_refused_unless_something_supports_its_risk(demo: Demo) -> None:
    async with guarded(relay_of(demo), permissions=READ) as client:
        assert await client.tools.list_tools() == []
        with pytest.raises(ToolUnauthorized) as caught:
            await client.tools.execute(demo.tool_names[0], {})
    assert caught.value.reason is Reason.RISK


async def test_an_error_of_this_relay_keeps_its_code_and_correlation_id(demo: Demo) -> None:
    permissions = Permissions(("*",), Risk.ADMIN, scopes=None)
    async with guarded(relay_of(demo), permissions=permissions) as client:
        echo = f"sysecho.{demo.real_node}.echo.invoke"
        # More at once than the capability admits.
        calls = (client.tools.execute(echo, {"message": "ping"}) for _ in range(40))
        errors = [
            item for item in await asyncio.gather(*calls, return_exceptions=True) if not is_result(item)
        ]
    assert errors
    audited = {line.get("correlation_id") for line in demo.audit()}
    for error in errors:
        assert isinstance(error, ToolProviderFailure)
        assert (error.code, error.retryable) == ("E_RATE_LIMITED", True)
        assert error.retry_after_ms
        assert error.remote_correlation_id in audited


def call_echo(demo: Demo, state: Path, **token: str) -> "subprocess.CompletedProcess[str]":
    arguments = json.dumps({"node": demo.real_node, "message": "ping"})
    return subprocess.run(
        [
            *(sys.executable, "-P", "-m", "relay", "call", "sysecho-invoke", arguments, "-o", "message"),
            *("--url", demo.base_url, "--verify-manifests", demo.facts["ca_root"], "--max-risk", "read"),
        ],
        env={"PATH": "", "XDG_STATE_HOME": str(state), **token},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_line_calls_this_relay(demo: Demo, tmp_path: Path) -> None:
    # By its kinds view, for its URL has no path.
    done = call_echo(demo, tmp_path, EDGE_TOKEN=demo.facts["token"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "ping\n", "")


def test_the_command_line_without_a_token_shows_the_words_of_this_relay(demo: Demo, tmp_path: Path) -> None:
    done = call_echo(demo, tmp_path)
    assert (done.returncode, done.stdout) == (11, "")
    said, fix, correlation = done.stderr.splitlines()
    assert said == "relay: ToolUnauthorized [401]: The request has no bearer token."
    # That of the relay: our client's own would not name its command.
    assert fix.endswith("issues one with: relay token issue --sub NAME")
    assert correlation.startswith("  correlation id ")
