"""12. The relay's machine is lost, and another one takes its place from a backup.

Steps: revoke a node and a token, make a join token · `relay ca backup` while the relay runs · lose the
state · `relay ca restore` into an empty directory · start the relay: nodes and tokens that were good are, and
what was revoked is out · try it a second time.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx2
import pyrage  # type: ignore[import-untyped]  # the library brings no types
import pytest

from relay.cli.demo.local_system import (
    LocalSystem,
    list_tools,
    page_of_nodes,
    relay_command,
    until_listed,
)
from relay.cli.demo.processes import StartError
from relay.settings.config import StateFiles
from schemas.addresses import mcp_url
from schemas.files import PRIVATE, write_atomic
from tests.fakes.demo import jti_of, relay_output

pytestmark = pytest.mark.long

BOUND_S = 60
LISTING = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}


async def relay(system: LocalSystem, *arguments: str | Path) -> str:
    return (await relay_output(system, *arguments)).strip()


async def status_of(system: LocalSystem, token: str) -> int:
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json, text/event-stream"}
    async with httpx2.AsyncClient() as http:
        answer = await http.post(mcp_url(system.plan.public_url), json=LISTING, headers=headers)
    return answer.status_code


async def test_another_machine_takes_the_relays_place(system: LocalSystem, tmp_path: Path) -> None:
    [revoked] = system.mock_nodes
    url = ["--public-url", system.plan.public_url]
    void = await relay(system, "token", "issue", "--sub", "other", "--tenant", "demo", *url)
    await relay(system, "token", "revoke", jti_of(void))
    await relay(system, "ca", "revoke", revoked)
    await relay(system, "join-token", "create", *url)
    join_tokens = await relay(system, "join-token", "list", "--json")

    key = pyrage.x25519.Identity.generate()
    write_atomic(tmp_path / "key.txt", f"{key}\n", PRIVATE)
    await relay(system, "ca", "backup", tmp_path / "relay.age", "--recipient", str(key.to_public()))
    await system.processes.kill("relay")
    await asyncio.to_thread(system.plan.state.root.rename, tmp_path / "lost")

    moved = replace(system, plan=replace(system.plan, state=StateFiles(tmp_path / "another-machine")))
    await relay(moved, "ca", "restore", tmp_path / "relay.age", "--identity", tmp_path / "key.txt")
    await system.processes.start("relay", relay_command(moved.plan))
    await system.processes.until_listening(moved.plan.relay_port)
    async with asyncio.timeout(BOUND_S), moved.client() as client:
        await until_listed(client, {moved.real_node}, moved.processes.check)
        result = await client.call_tool(f"sysecho.{moved.real_node}.echo.invoke", {"message": "still there?"})
        assert not result.is_error, result
        assert revoked not in {tool.name.split(".")[1] for tool in await list_tools(client)}
        connected, _ = await page_of_nodes(client)
        assert revoked not in connected
    assert await status_of(moved, void) == 401
    assert await relay(moved, "join-token", "list", "--json") == join_tokens

    with pytest.raises(StartError, match="is not empty"):
        await relay(moved, "ca", "restore", tmp_path / "relay.age", "--identity", tmp_path / "key.txt")
