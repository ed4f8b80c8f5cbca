"""33. An agent uses one relay, and the node is connected to another: the agent notices no difference.

Steps, each with clients of both eras: tools come, change and go at the other relay, and are told and listed ·
the node is followed, by a call and as a resource, subscribed to at either relay · its local agent calls a
tool that an agent of the first relay lends, and is answered.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import ToolListChangedNotification

from relay.cli.demo.local_system import (
    TENANT,
    LocalSystem,
    fleet_command,
    issue_token,
    kubelet_command,
    list_tools,
    start_cluster_server,
    start_more_relays,
    start_system,
    until_listed,
)
from relay.cli.demo.processes import Processes
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms
from schemas.addresses import BrokerAddress, mcp_url
from tests.fakes.agents import (
    LEGACY,
    MEMBERS,
    NEW,
    SECOND,
    FollowingAgent,
    LendingCaller,
    NodeAgent,
    checked,
    error_of,
    text_of,
)
from tests.fakes.caller_stage import SCOPE
from tests.fakes.demo import TIMEOUT, plan_below, relay_output
from tests.fakes.kind_package import KIND, KindPackage
from tests.fakes.mqtt_listener import MqttListener

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

BOUND_S = 60
ERAS = pytest.mark.parametrize("era", [pytest.param(LEGACY, id="2025"), pytest.param(NEW, id="2026")])
LABEL = "greenhouse pi"


@dataclass(frozen=True)
class TwoRelays:
    """Agents use ``near``, ``far`` has the CA's key and the node."""

    processes: Processes
    near: LocalSystem
    far: LocalSystem

    @property
    def node(self) -> str:
        return self.far.real_node

    def url(self, system: LocalSystem) -> str:
        return mcp_url(system.plan.url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relays(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TwoRelays]:
    directory, packages = tmp_path_factory.mktemp("relays"), tmp_path_factory.mktemp("packages")
    KindPackage().install(packages)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(packages), prepend=os.pathsep)
        async with Processes.running(directory) as processes, asyncio.timeout(BOUND_S) as starting:
            plan = await start_cluster_server(replace(plan_below(directory), kinds=(KIND,)), processes)
            far = await start_system(plan, 0, processes, print)
            (near,) = await start_more_relays(plan, 1, processes, print)
            async with near.client() as client:
                await until_listed(client, {far.real_node, near.real_node}, processes.check)
            starting.reschedule(None)
            yield TwoRelays(processes, near, far)


# --- tools that come, change and go


class ListingClient:
    """A client that lists the tools again whenever it is told that they have changed."""

    def __init__(self, client: Client, on_change: Callable[[], Awaitable[object]]) -> None:
        self._client = client
        self._on_change = on_change

    @classmethod
    @asynccontextmanager
    async def connected(cls, system: LocalSystem, era: str) -> AsyncIterator["ListingClient"]:
        """Hold a client of ``era``."""
        changes: asyncio.Queue[object] = asyncio.Queue()

        async def noted(message: object) -> None:
            if isinstance(message, ToolListChangedNotification):
                changes.put_nowait(message)

        headers = {"Authorization": f"Bearer {system.token}"}
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(
                httpx2.AsyncClient(headers=headers, timeout=TIMEOUT, trust_env=False)
            )
            transport = streamable_http_client(mcp_url(system.plan.url), http_client=http)
            client = await stack.enter_async_context(Client(transport, mode=era, message_handler=noted))
            if era == NEW:
                events = await stack.enter_async_context(client.listen(tools_list_changed=True))
                yield cls(client, lambda: anext(aiter(events)))
            else:
                yield cls(client, changes.get)

    async def until(self, is_listed: Callable[[set[str | None]], bool]) -> None:
        """Wait until ``is_listed`` is true of the titles and names of what is listed after a change."""
        while True:
            await self._on_change()
            tools = await list_tools(self._client)
            if is_listed({text for tool in tools for text in (tool.name, tool.title)}):
                return


async def test_tools_that_come_change_and_go_at_one_relay_are_told_at_another(
    relays: TwoRelays, tmp_path: Path
) -> None:
    far, node, processes = relays.far, relays.node, relays.processes
    async with (
        asyncio.timeout(BOUND_S * 2),
        ListingClient.connected(relays.near, NEW) as new,
        ListingClient.connected(relays.near, LEGACY) as old,
    ):

        async def both(is_listed: Callable[[set[str | None]], bool]) -> None:
            await asyncio.gather(new.until(is_listed), old.until(is_listed))

        late = replace(far.plan, directory=tmp_path)
        ca = CertificateAuthority(far.plan.state.ca, now_ms, os.urandom)
        (comes,) = ca.issue_mock(1, late.mocks, TENANT)
        await processes.start("late", fleet_command(late))
        await both(lambda listed: f"sysecho.{comes}.echo.invoke" in listed)

        await processes.stop("late")  # its tools stay listed for 30 s
        await relay_output(far, "node", "label", node, LABEL)
        await both(lambda listed: f"{LABEL}: Echo" in listed)

        switch = f"acmerb.{node}.relays.set"
        await processes.stop("kubelet")
        (far.plan.kubelet_state / "run.json").unlink()  # what it was told before, the kinds among it
        await processes.start("kubelet", kubelet_command(replace(far.plan, kinds=())))
        await both(lambda listed: switch not in listed and f"sysecho.{node}.echo.invoke" in listed)
        await processes.stop("kubelet")
        await processes.start("kubelet", kubelet_command(far.plan))
        await both(lambda listed: switch in listed)

        await both(lambda listed: f"sysecho.{comes}.echo.invoke" not in listed)


# --- telemetry


@pytest.mark.filterwarnings("ignore:resources/:mcp.shared.exceptions.MCPDeprecationWarning")
@ERAS
async def test_a_node_of_one_relay_is_followed_at_another(relays: TwoRelays, era: str) -> None:
    node = relays.node
    broker = BrokerAddress("127.0.0.1", relays.far.plan.broker_port)
    listener = MqttListener(broker, f"$devices/{node}/telemetry")
    async with (
        asyncio.timeout(BOUND_S),
        listener.listening(),
        FollowingAgent.connected(relays.near, era, node) as near,
        FollowingAgent.connected(relays.far, era, node) as far,
    ):
        samples = await near.progress(4)
        assert [number for number, _ in samples] == [1, 2, 3, 4]
        times = [sample["ts_ms"] for _, sample in samples]
        assert times == sorted(set(times))
        await listener.until_silent()

        # Notified at one relay, of what is subscribed to there, and of what is at the other.
        for subscribing in (near, far):
            async with near.notified() as updated:
                assert checked((await subscribing.call(SECOND)).structured_content, node).keys() == MEMBERS
                seen: set[int] = set()
                while len(seen) < 2:
                    assert await updated() == near.uri
                    seen.add(checked(await near.read(), node)["ts_ms"])
        await listener.until_silent()


# --- lent tools


@asynccontextmanager
async def caller(relays: TwoRelays, system: LocalSystem, era: str) -> AsyncIterator[LendingCaller]:
    """Hold a caller that is connected to the relay of ``system``."""
    token = issue_token(relays.far.plan, "ant", scopes=[SCOPE])  # it has the key
    async with LendingCaller.open(relays.url(system), token, era) as connected:
        yield connected


@ERAS
async def test_a_local_agent_uses_the_tools_of_a_caller_of_another_relay(relays: TwoRelays, era: str) -> None:
    async with (
        asyncio.timeout(BOUND_S),
        caller(relays, relays.near, era) as ant,
        caller(relays, relays.far, NEW) as ant_elsewhere,
        NodeAgent.running(relays.far.plan.kubelet_state, mode=era) as agent,
    ):
        session = await ant.lend(relays.node, message="What is the weather?")
        await agent.lent("ant_send_response", "ant_get_memory")
        for answering in (ant, ant_elsewhere):
            calling = asyncio.create_task(agent.call("ant_get_memory", about="bread"))
            event = await answering.event(session)
            assert (event["tool"], event["arguments"]) == ("get_memory", {"about": "bread"})
            await answering.answer(event, f"by way of {answering.mode}")
            assert f"by way of {answering.mode}" in text_of(await calling)

        calling = asyncio.create_task(agent.call("ant_get_memory"))
        while (await ant.event(session))["arguments"]:
            continue
        await ant.end(session)
        assert error_of(await calling)["message"].startswith("The caller disconnected")
        await agent.lent()
        ended = await ant.try_call("session_events", session_id=session, wait_ms=0)
        assert error_of(ended)["code"] == "E_SAFETY_DENIED"
