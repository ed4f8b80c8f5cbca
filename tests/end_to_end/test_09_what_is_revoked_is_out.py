"""9. A node or a token is stolen: one command, and it is revoked.

Steps: list, and have calls under way · `relay ca revoke NODE`, or `relay token revoke JTI` · what was under
way ends, what was listed is gone, and subscribers are notified · start the relay again: it is still out. The
node is stopped while calls are under way, so that none of them can be answered.
"""

import asyncio
import json
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.subscriptions import ToolsListChanged
from mcp.shared.exceptions import MCPError

from kubelet.session.link import LinkState
from relay.cli.demo.local_system import LocalSystem, list_tools, until_listed
from relay.settings.environment import now_ms
from relay.state.tokens import RevokedTokens
from tests.fakes.demo import called, jti_of, relay_output, restart_relay
from tests.fakes.polling import before_asking_again

pytestmark = pytest.mark.long

BOUND_S = 60
AT_ONCE = 3
UNDER_WAY = "E_DEADLINE_EXCEEDED"


async def listed(client: Client) -> set[str]:
    """Return the nodes whose tools are listed."""
    return {tool.name.split(".")[1] for tool in await list_tools(client)}


async def echo_until_it_ends_otherwise(client: Client, node_id: str) -> str:
    """Have a call under way, always, until one ends otherwise than for want of an answer."""
    while (code := await called(client, node_id)) == UNDER_WAY:
        pass
    return code


async def echo_once_connected(client: Client, node_id: str) -> str:
    """As ``called``: a relay lists a node by its retained manifest before the node is connected."""
    while (code := await called(client, node_id)) in {"E_NODE_OFFLINE", "E_RATE_LIMITED"}:
        await before_asking_again()
    return code


@asynccontextmanager
async def stopped(system: LocalSystem) -> AsyncIterator[None]:
    """Keep this machine's kubelet from running for a while, without its connection noticing."""
    pid = system.processes.pid("kubelet")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def outcomes(system: LocalSystem, jti: str) -> list[str]:
    """Return how the calls with the token ended that had been let through."""
    lines = map(json.loads, system.plan.state.audit.read_text("ascii").splitlines())
    return [line["code"] for line in lines if "outcome" in line and line["jti"] == jti]


def events(system: LocalSystem, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, system.plan.state.audit.read_text("ascii").splitlines())
    return [line for line in lines if line.get("event") == event]


async def until_under_way(system: LocalSystem, jti: str) -> None:
    """Wait until calls have been let through that the stopped node cannot answer."""
    while UNDER_WAY not in outcomes(system, jti):  # noqa: ASYNC110 - the audit is a file, it has no callback
        await asyncio.sleep(0.05)


async def until_relay_state(system: LocalSystem, state: LinkState) -> None:
    """Wait until this machine's kubelet shows ``state``."""
    url = f"http://127.0.0.1:{system.plan.loopback_port}/readyz"
    async with httpx2.AsyncClient(trust_env=False) as http:
        while (await http.get(url)).json()["subsystems"]["relay"]["state"] != state.value:
            await before_asking_again()


async def test_a_revoked_node_is_out_and_stays_out(system: LocalSystem) -> None:
    revoked, (other,) = system.real_node, system.mock_nodes
    jti = jti_of(system.token)
    async with asyncio.timeout(BOUND_S):
        async with system.client() as client, client.listen(tools_list_changed=True) as changes:
            assert await listed(client) == {revoked, other}
            async with stopped(system), asyncio.TaskGroup() as tasks:
                calls = [
                    tasks.create_task(echo_until_it_ends_otherwise(client, revoked)) for _ in range(AT_ONCE)
                ]
                await until_under_way(system, jti)
                (kid,) = (await relay_output(system, "ca", "revoke", revoked)).split()
                assert isinstance(await anext(changes), ToolsListChanged)
                assert await listed(client) == {other}
            assert {call.result() for call in calls} == {"E_ATTESTATION_FAILED"}
            # Not only refused from then on: what was under way has ended so.
            assert "E_ATTESTATION_FAILED" in outcomes(system, jti)
            assert [line["kid"] for line in events(system, "leaf_revoked")] == [kid]
            await until_relay_state(system, LinkState.REVOKED)
            assert await called(client, other) == "ok"

        await restart_relay(system)
        async with system.client() as client:
            await until_listed(client, {other}, system.processes.check)
            assert await listed(client) == {other}
            assert await called(client, revoked) not in {"ok", UNDER_WAY}
            assert await echo_once_connected(client, other) == "ok"
            await system.processes.kill("kubelet")


async def test_a_revoked_token_is_void_and_stays_void(system: LocalSystem) -> None:
    issue = ["token", "issue", "--sub", "other-agent", "--tenant", "demo"]
    other_token = (await relay_output(system, *issue, "--public-url", system.plan.public_url)).strip()
    jti, node = jti_of(system.token), system.real_node
    other = LocalSystem(system.plan, system.processes, other_token, node, system.mock_nodes)
    async with asyncio.timeout(BOUND_S):
        async with other.client() as others_client:
            async with system.client() as client, client.listen(tools_list_changed=True) as changes:
                async with stopped(system), asyncio.TaskGroup() as tasks:
                    call = tasks.create_task(until_denied(client, node))
                    await until_under_way(system, jti)
                    await relay_output(system, "token", "revoke", jti, "--foreign")
                    assert [change async for change in changes] == []  # it ends, in good order
                assert call.result() == "E_SAFETY_DENIED"
            assert outcomes(system, jti)[-1] == "E_SAFETY_DENIED"
            assert [line["jti"] for line in events(system, "token_revoked")] == [jti]
            assert await status_of(system, system.token) == 401
            assert await echo_until_it_ends_otherwise(others_client, node) == "ok"
        await restart_relay(system)
        assert await status_of(system, system.token) == 401
        async with other.client() as others_client:
            await until_listed(others_client, {node}, system.processes.check)
            assert await echo_once_connected(others_client, node) == "ok"


async def until_denied(client: Client, node_id: str) -> str:
    """As ``echo_until_it_ends_otherwise``, whose next call would not even be admitted."""
    try:
        return await echo_until_it_ends_otherwise(client, node_id)
    except MCPError as error:
        return str(error)


async def status_of(system: LocalSystem, token: str) -> int:
    """Return the HTTP status that a request with ``token`` gets."""
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json, text/event-stream"}
    async with httpx2.AsyncClient(headers=headers, trust_env=False) as http:
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        return (await http.post(f"{system.plan.public_url}/mcp", json=body)).status_code


async def test_a_token_is_void_though_strangers_hold_every_descriptor(system: LocalSystem) -> None:
    relay, strangers = (
        system.processes.pid("relay"),
        list[tuple[asyncio.StreamReader, asyncio.StreamWriter]](),
    )
    headers = {"Authorization": f"Bearer {system.token}", "Accept": "application/json, text/event-stream"}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    url, only = f"{system.plan.public_url}/mcp", httpx2.Limits(max_connections=1)
    async with (
        asyncio.timeout(BOUND_S),
        httpx2.AsyncClient(headers=headers, trust_env=False, limits=only) as agent,
    ):
        assert (await agent.post(url, json=body)).status_code != 401
        limit = max(descriptors(relay)) + 8
        resource.prlimit(relay, resource.RLIMIT_NOFILE, (limit, limit))
        while len(descriptors(relay)) < limit:
            if len(strangers) < 4 * limit:
                strangers.append(await asyncio.open_connection("127.0.0.1", system.plan.relay_port))
            await asyncio.sleep(0.01)  # the kernel connects, also while a busy relay accepts nothing
        # As the command does, which takes so long to start that the relay would have ended strangers by then.
        RevokedTokens(system.plan.state.revoked_tokens).revoke(jti_of(system.token), now_ms=now_ms())
        while (await agent.post(url, json=body)).status_code != 401:  # noqa: ASYNC110 - asked over HTTP
            await asyncio.sleep(0.05)
        assert not any(reader.at_eof() for reader, _ in strangers)
        assert [line["jti"] for line in events(system, "token_revoked")] == [jti_of(system.token)]
    for _, writer in strangers:
        writer.close()


def descriptors(pid: int) -> list[int]:
    """Return the descriptors that a process has open."""
    return [int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()]
