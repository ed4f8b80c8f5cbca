"""5. Something is killed, and the rest stays right: a caller meanwhile gets the true cause.

Steps: kill the node, the relay, the broker · call · start it again · call again. Each without ceremony: the
processes get a SIGKILL. All steps are made on one system, which each leaves whole.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from relay.cli.demo.local_system import (
    LocalSystem,
    kubelet_command,
    relay_command,
    start_broker,
)
from tests.fakes.demo import error_of, local_system, restart_relay
from tests.fakes.polling import before_asking_again, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 60


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalSystem]:
    async with local_system(tmp_path_factory.mktemp("system"), 0) as started:
        yield started


async def until_echo_answers(system: LocalSystem) -> dict[str, Any]:
    """Call until the node answers: each refusal on the way must be an honest one."""
    async with asyncio.timeout(BOUND_S):
        while True:
            # The relay itself may be away.
            with suppress(httpx2.HTTPError, ExceptionGroup):
                async with system.client() as client:
                    result = await client.call_tool(
                        f"sysecho.{system.real_node}.echo.invoke", {"message": "back"}
                    )
                if not result.is_error:
                    return dict(result.structured_content or {})
                assert error_of(result)["code"] in {
                    "E_NODE_OFFLINE",
                    "E_MANIFEST_NOT_FOUND",
                    "E_DEADLINE_EXCEEDED",
                    "E_RATE_LIMITED",  # asked more often than echo bears
                }
            await before_asking_again()


@pytest.mark.holds("RFC-0005/8/errors")
async def test_a_node_that_died_is_offline_at_once_and_welcome_when_it_returns(system: LocalSystem) -> None:
    def events() -> list[str]:
        lines = (system.plan.directory / "relay.log").read_text("utf-8").splitlines()
        seen = [line for line in map(json.loads, lines) if line.get("node_id") == system.real_node]
        return [line["event"] for line in seen if line["event"] in {"node connected", "node disconnected"}]

    # A thread writes the log, a moment later.
    await until(lambda: events()[-1:] == ["node connected"])
    before = events()
    await system.processes.kill("kubelet")
    async with asyncio.timeout(BOUND_S), system.client() as client:
        while True:
            result = await client.call_tool(f"sysecho.{system.real_node}.echo.invoke", {"message": "hello?"})
            if result.is_error and error_of(result)["code"] == "E_NODE_OFFLINE":
                break
            await before_asking_again()
        assert "is not connected since" in error_of(result)["message"]
        # Its tools stay listed for a grace: a node that reconnects should not make every client list again.
        assert any(system.real_node in tool.name for tool in (await client.list_tools()).tools)
    await system.processes.start("kubelet", kubelet_command(system.plan))
    assert (await until_echo_answers(system))["message"] == "back"
    await until(lambda: events() == [*before, "node disconnected", "node connected"])


@pytest.mark.long
async def test_a_relay_that_died_comes_back_with_the_same_nodes(system: LocalSystem) -> None:
    await restart_relay(system)
    assert (await until_echo_answers(system))["node_id"] == system.real_node


@pytest.mark.holds("RFC-0001/1/retained-announce")
@pytest.mark.long
async def test_a_broker_that_lost_everything_has_it_again_when_it_is_back(system: LocalSystem) -> None:
    await system.processes.kill("broker")
    # The session suffices meanwhile: the broker carries manifests, not calls.
    assert (await until_echo_answers(system))["message"] == "back"
    shutil.rmtree(system.plan.directory / "broker")
    await start_broker(system.plan, system.processes)
    loopback = f"http://127.0.0.1:{system.plan.loopback_port}/readyz"
    async with asyncio.timeout(BOUND_S), httpx2.AsyncClient() as http:
        while (await http.get(loopback)).json()["subsystems"]["broker"]["ready"] is not True:
            await before_asking_again()
        while not (await http.get(system.plan.public_url + "/readyz")).json()["ready"]:
            await before_asking_again()
    # A relay that knows nothing yet learns the node from the broker: what was lost was announced again.
    await restart_relay(system)
    assert (await until_echo_answers(system))["node_id"] == system.real_node


@pytest.mark.long
async def test_a_node_waits_for_broker_and_relay_and_shows_that_it_does(system: LocalSystem) -> None:
    plan, processes = system.plan, system.processes
    for name in ("kubelet", "relay", "broker"):
        await processes.kill(name)
    await processes.start("kubelet", kubelet_command(plan))
    loopback = f"http://127.0.0.1:{plan.loopback_port}"
    async with asyncio.timeout(BOUND_S), httpx2.AsyncClient(base_url=loopback) as http:
        while True:
            try:
                waiting = await http.get("/readyz")
                break
            except httpx2.HTTPError:  # the daemon is still starting
                await before_asking_again()
        assert waiting.status_code == 503
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/.well-known/mcp.json")).status_code == 404
        subsystems = waiting.json()["subsystems"]
        assert [subsystems[name]["state"] for name in ("broker", "relay")] == ["connecting", "connecting"]

        await start_broker(plan, processes)
        await processes.start("relay", relay_command(plan))
        while (await http.get("/readyz")).status_code != 200:
            await before_asking_again()
    assert (await until_echo_answers(system))["node_id"] == system.real_node
