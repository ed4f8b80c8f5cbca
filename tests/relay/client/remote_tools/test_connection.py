"""The connection: stdio in both protocol eras, its end, its reopening, and a program's environment."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from relay.remote_tools import (
    BearerToken,
    HttpServer,
    Reason,
    RemoteToolError,
    StdioServer,
    ToolInvalidArguments,
    ToolProviderFailure,
    ToolRule,
    ToolTimeout,
    ToolUnauthorized,
)
from tests.fakes.guarded import guarded, over_http
from tests.fakes.mcp_server import FakeMcpServer, HttpAnswer, jsonrpc_error

PING = {"message": "ping"}
ROOT = Path(__file__).parents[3]
REPEATABLE = (ToolRule("*", idempotent=True, deadline_s=20),)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "calls"


@pytest.fixture(params=[pytest.param(era, marks=pytest.mark.integration) for era in ("modern", "legacy")])
def server(request: pytest.FixtureRequest, log: Path) -> StdioServer:
    python, *arguments = [sys.executable, "-P", "-m", "tests.fakes.mcp_server", str(log), request.param]
    return StdioServer(python, tuple(arguments), {"PYTHONPATH": str(ROOT)})


def received(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


async def test_a_call_over_stdio_has_a_result_and_carries_its_ids(server: StdioServer, log: Path) -> None:
    async with guarded(server) as client:
        assert "add" in {contract.name for contract in await client.tools.list_tools()}
        result = await client.tools.execute("add", {"a": 1, "b": 2}, correlation_id="order-17")
        assert result.structured == {"sum": 3}
    [call] = received(log)
    assert call["_meta"]["edge-kubelet/correlation-id"] == "order-17"
    assert call["_meta"]["traceparent"].startswith("00-")
    assert [record["event"] for record in client.records] == ["started", "ended"]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("server", "said"),
    [
        (StdioServer("/nonexistent/program"), "/nonexistent/program: No such file or directory"),
        (
            HttpServer("https://127.0.0.1:9/mcp", root=Path("/nonexistent/ca")),
            "/nonexistent/ca: No such",
        ),
        (HttpServer("https://127.0.0.1:9/mcp"), "cannot be reached: Connection refused; nothing was sent"),
    ],
    ids=["program", "root", "port"],
)
async def test_a_server_that_cannot_be_connected_to_is_an_error_with_the_cause(
    server: HttpServer | StdioServer, said: str
) -> None:
    async with guarded(server) as client:
        with pytest.raises(ToolProviderFailure, match=said) as caught:
            await client.tools.list_tools()
    assert (caught.value.reason, caught.value.may_have_run) == (Reason.UNREACHABLE, False)


async def test_a_token_that_cannot_be_read_is_an_error_with_its_file() -> None:
    server = HttpServer("https://127.0.0.1:9/mcp", BearerToken(Path("/nonexistent/token")))
    async with guarded(server) as client:
        with pytest.raises(ToolUnauthorized, match="/nonexistent/token cannot be read as a token: No such"):
            await client.tools.list_tools()


@pytest.mark.parametrize(
    ("name", "expected", "reason"),
    [
        ("drop", ToolProviderFailure, Reason.CONNECTION_LOST),
        ("disconnect", ToolProviderFailure, Reason.CONNECTION_LOST),
        ("wrong_output", ToolProviderFailure, Reason.RESULT),
        ("failing", ToolProviderFailure, Reason.TOOL_ERROR),
        ("garbage", ToolTimeout, Reason.DEADLINE),
        ("delay", ToolTimeout, Reason.DEADLINE),
    ],
)
async def test_a_fault_over_stdio_is_a_typed_error_and_the_call_is_sent_once(
    server: StdioServer, log: Path, name: str, expected: type[RemoteToolError], reason: Reason
) -> None:
    rules = (ToolRule(name, deadline_s=0.3 if expected is ToolTimeout else 20),)
    async with guarded(server, rules=rules) as client:
        await client.tools.list_tools()
        with pytest.raises(expected) as caught:
            await client.tools.execute(name)
        assert (caught.value.reason, len(received(log))) == (reason, 1)
        # A process that ended is started again; one that lives goes on.
        assert (await client.tools.execute("echo", PING)).structured == PING


async def test_an_idempotent_call_is_repeated_to_a_process_that_was_started_again(
    server: StdioServer, log: Path
) -> None:
    async with guarded(server, rules=REPEATABLE) as client:
        with pytest.raises(ToolProviderFailure):
            await client.tools.execute("drop")
    assert len(received(log)) == 4


@pytest.mark.integration
async def test_a_program_that_is_not_there_is_a_failure_that_sent_nothing() -> None:
    async with guarded(StdioServer("no-such-program-anywhere")) as client:
        with pytest.raises(ToolProviderFailure) as caught:
            await client.tools.execute("echo", PING)
    assert (caught.value.reason, caught.value.may_have_run) == (Reason.UNREACHABLE, False)


@pytest.mark.integration
async def test_a_program_gets_no_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_TOKEN", "a-secret")
    shown = tmp_path / "environment"
    code = f"import json, os; open({str(shown)!r}, 'w').write(json.dumps(dict(os.environ)))"
    python, *arguments = [sys.executable, "-P", "-c", code]
    async with guarded(StdioServer(python, tuple(arguments), {"GIVEN": "1"})) as client:
        with pytest.raises(RemoteToolError):
            await client.tools.list_tools()
    environment = json.loads(shown.read_text())
    assert environment["GIVEN"] == "1"
    assert "EDGE_TOKEN" not in environment


UNKNOWN_SESSION = [
    HttpAnswer(404),
    # npm's reference server, and others made from the TypeScript SDK's example.
    HttpAnswer(
        400, json.dumps({"jsonrpc": "2.0", "id": None, **jsonrpc_error(-32000, "No valid session")}).encode()
    ),
    HttpAnswer(400, b"Bad Request: No valid session ID provided", {"Content-Type": "text/plain"}),
]


@pytest.mark.integration
@pytest.mark.parametrize("answer", UNKNOWN_SESSION, ids=["404", "400", "400-text"])
async def test_a_session_of_the_old_era_that_ended_is_opened_again(answer: HttpAnswer) -> None:
    fake = FakeMcpServer(legacy=True)
    async with over_http(fake) as client:
        await client.tools.execute("echo", PING)
        fake.next_answer = answer
        with pytest.raises(ToolProviderFailure) as caught:
            await client.tools.execute("echo", PING)
        assert caught.value.reason is Reason.CONNECTION_LOST
        assert (await client.tools.execute("echo", PING)).structured == PING
        # What a server says of this one call does not end the session.
        fake.next_answer = HttpAnswer(
            400, json.dumps({"jsonrpc": "2.0", "id": None, **jsonrpc_error(-32602, "no")}).encode()
        )
        with pytest.raises(ToolInvalidArguments):
            await client.tools.execute("echo", PING)
        assert (await client.tools.execute("echo", PING)).structured == PING
    assert fake.opened == 2


@pytest.mark.integration
async def test_an_idempotent_call_is_repeated_in_the_next_session() -> None:
    fake = FakeMcpServer(legacy=True)
    async with over_http(fake, rules=REPEATABLE) as client:
        await client.tools.execute("echo", PING)
        fake.next_answer = UNKNOWN_SESSION[1]
        assert (await client.tools.execute("echo", PING)).structured == PING
    assert fake.opened == 2


@pytest.mark.integration
async def test_a_session_that_a_listing_finds_ended_is_opened_again() -> None:
    fake = FakeMcpServer(legacy=True)
    async with over_http(fake) as client:
        await client.tools.list_tools()
        fake.next_list = UNKNOWN_SESSION[1]
        assert await client.tools.list_tools()
    assert fake.opened == 2


@pytest.mark.integration
async def test_the_tools_are_listed_again_after_the_server_announces_a_change() -> None:
    fake = FakeMcpServer()
    async with over_http(fake) as client:
        await client.tools.execute("echo", PING)
        listed = fake.listed
        await client.tools.execute("echo", PING)
        assert fake.listed == listed
        fake.announces = True
        await client.tools.execute("echo", PING)
        await client.tools.execute("echo", PING)
        assert fake.listed == listed + 1


async def test_a_root_that_is_no_certificate_is_the_operators_error(tmp_path: Path) -> None:
    root = tmp_path / "root.pem"
    root.write_text("no certificate")
    async with guarded(HttpServer("https://127.0.0.1:9/mcp", root=root)) as client:
        with pytest.raises(ToolProviderFailure) as caught:
            await client.tools.execute("echo", PING)
    assert caught.value.reason is Reason.UNREACHABLE
    assert "credential" not in caught.value.suggested_fix
    assert f"{root} holds no certificate in PEM" in str(caught.value)
