"""The life of a client: what is shown of a server's tools, and what remains when it is closed."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from relay.remote_tools import Permissions, Reason, RemoteTools, Risk, ToolNotFound, ToolRule, ToolTimeout
from schemas.addresses import AddressError
from tests.fakes.guarded import over_http
from tests.fakes.mcp_server import FakeMcpServer

pytestmark = pytest.mark.integration

PING = {"message": "ping"}


async def test_a_model_is_shown_only_what_it_may_call() -> None:
    fake = FakeMcpServer()
    permissions = Permissions(allow=("echo", "add", "delay"), max_risk=Risk.READ)
    async with over_http(fake, permissions=permissions, rules=(ToolRule("add", risk=Risk.READ),)) as client:
        assert [contract.name for contract in await client.tools.list_tools()] == ["add"]
        survey = {item.contract.name: item.refusal for item in await client.tools.survey()}
    assert set(survey) == {tool["name"] for tool in fake.tools}
    reasons = {name: refusal.reason for name, refusal in survey.items() if refusal}
    assert (reasons["echo"], reasons["drop"]) == (Reason.RISK, Reason.ALLOWLIST)
    assert "add" not in reasons


async def test_a_closed_client_connects_again() -> None:
    fake = FakeMcpServer()
    async with over_http(fake) as client:
        await client.tools.execute("echo", PING)
        await client.tools.close()
        await client.tools.close()
        await client.tools.execute("echo", PING)
    assert (fake.opened, fake.sent("echo")) == (2, 2)


async def test_nothing_stays_open(tmp_path: Path) -> None:
    fake = FakeMcpServer()
    async with fake.over_http() as url:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
        async with RemoteTools(
            url, audit=tmp_path / "calls", permissions=Permissions(("*",), Risk.ADMIN)
        ) as tools:
            await tools.execute("echo", PING)
            assert len(os.listdir("/proc/self/fd")) > before  # noqa: PTH208 - as above
        tasks = asyncio.all_tasks()
    assert not [task for task in tasks if "Connection" in repr(task)]
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208 - as above


async def test_a_tool_that_is_not_listed_is_not_accepted() -> None:
    async with over_http(FakeMcpServer()) as client:
        with pytest.raises(ToolNotFound):
            await client.tools.accept("nothing")


async def test_a_list_that_does_not_end_in_time_is_a_timeout() -> None:
    fake = FakeMcpServer(silent=True)
    async with over_http(fake) as client:
        with pytest.raises(ToolTimeout) as caught:
            await client.tools.list_tools(deadline_s=0.2)
    assert caught.value.may_have_run is False


async def test_a_slow_server_costs_a_call_its_deadline_and_nothing_of_it_is_sent(tmp_path: Path) -> None:
    fake = FakeMcpServer(silent=True)
    file = tmp_path / "calls"
    async with over_http(fake, audit=file) as client:
        with pytest.raises(ToolTimeout):
            await client.tools.execute("echo", PING, deadline_s=0.2)
    assert fake.calls == []
    assert json.loads(file.read_bytes())["reason"] == Reason.DEADLINE


def test_a_url_that_is_not_encrypted_is_refused_when_the_client_is_made(tmp_path: Path) -> None:
    with pytest.raises(AddressError):
        RemoteTools("http://mcp.example/mcp", audit=tmp_path / "calls")
