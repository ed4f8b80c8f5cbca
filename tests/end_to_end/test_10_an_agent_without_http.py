"""10. An agent's client speaks MCP on standard input and output only.

Steps: start `relay stdio` as the client does · list and call in each era · kill the relay in the middle and
start it again · write lines by hand and read what comes.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from mcp.client.client import Client
from mcp.client.session import IncomingMessage
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import ToolListChangedNotification

from relay.cli.demo.local_system import LocalSystem, relay_command
from tests.fakes.demo import Demo, error_of, local_system, restart_relay
from tests.fakes.polling import before_asking_again

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 60
# What a relay may say while the node is on its way back, and who asks all the time.
HONEST = {"E_NODE_OFFLINE", "E_MANIFEST_NOT_FOUND", "E_SAFETY_DENIED", "E_RATE_LIMITED"}
ERAS = pytest.mark.parametrize("era", ["2026-07-28", "legacy"])


@asynccontextmanager
async def agent(
    url: str, token_file: Path, era: str, *options: str, **arguments: Any
) -> AsyncIterator[Client]:
    """Hold the official client, which starts the program by itself."""
    program = StdioServerParameters(
        command=sys.executable,
        args=["-P", "-m", "relay", "stdio", "--url", url, "--token-file", str(token_file), *options],
    )
    async with Client(stdio_client(program), mode=era, **arguments) as client:
        yield client


def private(directory: Path, token: str) -> Path:
    file = directory / "token"
    file.touch(mode=0o600)
    file.write_text(token)
    return file


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalSystem]:
    async with local_system(tmp_path_factory.mktemp("system"), 0) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def system(started: LocalSystem) -> LocalSystem:
    """The system whose relay each test kills and starts, with its node connected again."""
    async with asyncio.timeout(BOUND_S):
        await started.until_listed()
    return started


@pytest.mark.parametrize("era", ["2026-07-28", "legacy", "auto"])
async def test_the_tools_and_the_errors_are_those_of_http(demo: Demo, tmp_path: Path, era: str) -> None:
    token = private(tmp_path, demo.facts["token"])
    name = f"sysecho-{demo.real_node}-echo-invoke"
    async with (
        agent(demo.base_url, token, era, "--names", "dashed") as here,
        demo.client(era, "?names=dashed") as there,
    ):
        assert (await here.list_tools()).tools == (await there.list_tools()).tools
        result = await here.call_tool(name, {"message": "from a pipe"})
        assert (result.structured_content or {})["message"] == "from a pipe"
        wrong = [error_of(await client.call_tool(name, {"other": 1})) for client in (here, there)]
    assert [error.pop("correlation_id") is not None for error in wrong] == [True, True]
    assert wrong[0] == wrong[1]


@ERAS
@pytest.mark.parametrize(
    ("path", "options"), [("", ("--names", "dashed", "--view", "kinds")), ("/mcp/kinds", ())]
)
async def test_the_view_is_an_option_of_the_program_or_a_path_of_its_url(
    demo: Demo, tmp_path: Path, era: str, path: str, options: tuple[str, ...]
) -> None:
    token = private(tmp_path, demo.facts["token"])
    async with agent(demo.base_url + path, token, era, *options) as client:
        assert {"find_nodes", "sysecho-invoke"} <= {tool.name for tool in (await client.list_tools()).tools}
        result = await client.call_tool("sysecho-invoke", {"message": "by kind", "node": demo.real_node})
    assert (result.structured_content or {})["node_id"] == demo.real_node


@pytest.mark.long
@ERAS
async def test_a_relay_that_dies_and_comes_back_is_no_more_than_a_slow_call(
    system: LocalSystem, tmp_path: Path, era: str
) -> None:
    token = private(tmp_path, system.token)
    name = f"sysecho.{system.real_node}.echo.invoke"
    async with asyncio.timeout(BOUND_S), agent(system.plan.public_url, token, era) as client:
        await client.list_tools()
        assert not (await client.call_tool(name, {"message": "before"})).is_error
        await system.processes.kill("relay")
        # Asked while there is no relay, and answered once there is one.
        listing = asyncio.create_task(client.list_tools())
        await system.processes.start("relay", relay_command(system.plan))
        await listing
        while True:
            result = await client.call_tool(name, {"message": "after"})
            if not result.is_error:
                break
            assert error_of(result)["code"] in HONEST
            await before_asking_again()
        assert (result.structured_content or {})["message"] == "after"


@pytest.mark.long
@ERAS
async def test_who_follows_the_tools_is_told_that_they_may_have_changed_meanwhile(
    system: LocalSystem, tmp_path: Path, era: str
) -> None:
    changed = asyncio.Event()

    async def heard(message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            changed.set()

    token = private(tmp_path, system.token)
    url = system.plan.public_url
    async with asyncio.timeout(BOUND_S), agent(url, token, era, message_handler=heard) as client:
        await client.list_tools()
        if era == "legacy":
            await restart_relay(system)
            await changed.wait()
            return
        async with client.listen(tools_list_changed=True) as changes:
            await restart_relay(system)
            await anext(aiter(changes))


async def test_nothing_but_messages_comes_out_whatever_goes_in(demo: Demo) -> None:
    lines = [b"", b"hello?", b"{}", b'{"jsonrpc":"2.0","id":1,"id":2,"method":"ping"}', b"x" * 2_000_000]
    name = f"sysecho.{demo.real_node}.echo.invoke"
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    call = {"name": name, "arguments": {"message": "by hand"}, "_meta": meta}
    lines.append(json.dumps({"jsonrpc": "2.0", "id": "c", "method": "tools/call", "params": call}).encode())
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "relay", "stdio", "--url", demo.base_url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={"EDGE_TOKEN": demo.facts["token"]},
    )
    output, _ = await asyncio.wait_for(process.communicate(b"\n".join(lines)), BOUND_S)
    assert process.returncode == 0
    messages = [json.loads(line) for line in output.splitlines()]
    assert all(message["jsonrpc"] == "2.0" for message in messages)
    [answer] = [message for message in messages if message["id"] == "c"]
    assert answer["result"]["structuredContent"]["message"] == "by hand"
    refusals = [message["error"]["code"] for message in messages if message["id"] is None]
    assert len(refusals) == 4
    assert set(refusals) <= {-32700, -32600, -32602}
