"""The list of tools: pages, limits, and when it is made again."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from relay.client.remote_tools import catalogue as module
from relay.remote_tools import (
    ClientEnvironment,
    Reason,
    RemoteToolError,
    ToolNotFound,
    ToolProviderFailure,
    ToolRule,
    ToolTimeout,
    ToolUnauthorized,
)
from tests.fakes.guarded import Guarded, over_http
from tests.fakes.mcp_server import OBJECT, FakeMcpServer, HttpAnswer
from tests.fakes.seconds import Seconds

pytestmark = pytest.mark.integration

PING = {"message": "ping"}
BOUND_S = 30


async def lists_again(fake: FakeMcpServer, client: Guarded) -> None:
    """Call until the client has noticed what the server told it on another connection."""
    listed = fake.listed
    async with asyncio.timeout(BOUND_S):
        while fake.listed == listed:
            await client.tools.execute("echo", PING)


@pytest.mark.parametrize("legacy", [False, True])
async def test_every_page_is_listed(*, legacy: bool) -> None:
    fake = FakeMcpServer(legacy=legacy, page_size=4)
    async with over_http(fake) as client:
        names = [contract.name for contract in await client.tools.list_tools()]
    assert names == [tool["name"] for tool in fake.tools]
    assert fake.listed == -(-len(names) // 4)


@pytest.mark.parametrize(("limit", "value"), [("MAX_TOOLS", 3), ("MAX_PAGES", 2), ("MAX_LIST_BYTES", 1000)])
async def test_a_list_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(module, limit, value)
    async with over_http(FakeMcpServer(page_size=1)) as client:
        with pytest.raises(ToolProviderFailure) as caught:
            await client.tools.list_tools()
    assert caught.value.reason is Reason.TOO_LARGE


async def test_what_is_not_used_of_a_tool_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LIST_BYTES", 10_000)
    fake = FakeMcpServer(page_size=1)
    rest = {"_meta": {"any": "x" * 10_000}, "icons": [{"src": "data:" + "x" * 10_000}], "any": "x" * 10_000}
    fake.tools = [{**tool, **rest} for tool in fake.tools[:3]]
    async with over_http(fake) as client:
        assert len(await client.tools.list_tools()) == 3
    fake.tools[0]["description"] = "x" * 10_000
    async with over_http(fake) as client:
        with pytest.raises(ToolProviderFailure, match="more than 10000 bytes"):
            await client.tools.list_tools()


async def test_a_name_that_is_not_known_is_looked_for_once_more() -> None:
    fake = FakeMcpServer()
    async with over_http(fake) as client:
        await client.tools.execute("echo", PING)
        with pytest.raises(ToolNotFound):
            await client.tools.execute("later", {})
        fake.tools.append({"name": "later", "inputSchema": OBJECT})
        fake.results["later"] = {"ok": True}
        assert (await client.tools.execute("later", {})).structured == {"ok": True}
        assert (await client.tools.execute("echo", PING)).structured == PING
    assert fake.listed == 4 - 1


async def test_a_name_of_more_than_256_characters_is_left_out() -> None:
    fake = FakeMcpServer()
    fake.tools.append({"name": "x" * 257, "inputSchema": OBJECT})
    async with over_http(fake) as client:
        assert len(await client.tools.list_tools()) == len(fake.tools) - 1


@pytest.mark.parametrize(
    "answer", [{"tools": "no list"}, {"tools": [{"name": 5}]}, {"tools": [{"name": "x"}]}]
)
async def test_a_list_that_is_not_valid_is_a_failure_of_the_provider(answer: Any) -> None:
    fake = FakeMcpServer(listing=answer)
    async with over_http(fake) as client:
        with pytest.raises(RemoteToolError) as caught:
            await client.tools.list_tools()
    assert (type(caught.value), caught.value.reason) == (ToolProviderFailure, Reason.PROTOCOL)


@pytest.mark.holds("SPEC-0004/2.1/contract-validation")
async def test_a_subscription_tells_of_each_change(tmp_path: Path) -> None:
    fake = FakeMcpServer(followed=0, ttl_ms=0)
    async with over_http(fake, pins=tmp_path / "pins.json") as client:
        await client.tools.execute("echo", PING)
        await client.tools.execute("echo", PING)
        assert (fake.listed, fake.followed) == (1, 1)
        fake.announce()
        await lists_again(fake, client)
        fake.tools[0]["description"] = "Returns the message, and sends it elsewhere."
        fake.announce()
        with pytest.raises(ToolUnauthorized) as caught:
            await lists_again(fake, client)
    assert (caught.value.reason, fake.listed) == (Reason.PIN, 3)


async def test_a_subscription_that_is_lost_is_made_again_and_the_tools_are_listed_again() -> None:
    fake = FakeMcpServer(followed=0, ttl_ms=0)
    async with over_http(fake) as client:
        await client.tools.execute("echo", PING)
        for subscriptions in (2, 3):
            fake.drop_followers()
            await lists_again(fake, client)
            async with asyncio.timeout(BOUND_S):
                while fake.followed != subscriptions:
                    await client.tools.execute("echo", PING)
        # With a subscription, a list is good for longer than the server says.
        async with asyncio.timeout(BOUND_S):
            listed = 0
            while listed != fake.listed:
                listed = fake.listed
                await client.tools.execute("echo", PING)


@pytest.mark.parametrize("refusal", [HttpAnswer(503), HttpAnswer(200, b"{}")], ids=["status", "garbage"])
async def test_a_subscription_that_is_refused_is_asked_for_ever_later(refusal: HttpAnswer) -> None:
    fake = FakeMcpServer(followed=0, ttl_ms=0, refuses_followers=refusal)
    async with over_http(fake) as client:
        async with asyncio.timeout(BOUND_S):
            while len(client.pauses.slept) < 12:
                await client.tools.execute("echo", PING)
        listed = fake.listed
        await client.tools.execute("echo", PING)
        assert fake.listed == listed + 1
    # Half of a bound that doubles, up to a minute.
    assert client.pauses.slept[:3] == [0.5, 1, 2]
    assert max(client.pauses.slept) == 30


async def test_a_subscription_that_is_not_answered_delays_no_call_beyond_its_deadline() -> None:
    fake = FakeMcpServer(followed=0, ttl_ms=0, acknowledges=False)
    async with over_http(fake) as client:
        for listed in (1, 2):
            assert (await client.tools.execute("echo", PING, deadline_s=5)).structured == PING
            assert fake.listed == listed
    assert fake.followed == 1


@pytest.mark.parametrize(
    ("legacy", "ttl_ms", "good_for_s"),
    [(False, 5000, 5), (False, 2**53, 3600), (True, 5000, 60)],
    ids=["as stated", "an hour at most", "nothing stated"],
)
async def test_without_a_subscription_a_list_is_good_for_as_long_as_the_server_states(
    *, legacy: bool, ttl_ms: int, good_for_s: int
) -> None:
    fake, seconds = FakeMcpServer(legacy=legacy, ttl_ms=ttl_ms), Seconds()
    async with over_http(fake, environment=ClientEnvironment(monotonic=seconds)) as client:
        for now, listed in [(0, 1), (good_for_s - 0.1, 1), (good_for_s, 2), (good_for_s * 1.5, 2)]:
            seconds.now = now
            await client.tools.execute("echo", PING)
            assert fake.listed == listed


async def test_a_list_that_is_good_for_no_time_is_made_for_each_call_and_shared_by_calls_at_once() -> None:
    fake = FakeMcpServer(ttl_ms=0)
    async with over_http(fake) as client:
        for listed in (1, 2):
            await client.tools.execute("echo", PING)
            assert fake.listed == listed
        await asyncio.gather(*(client.tools.execute("echo", PING) for _ in range(20)))
        assert fake.listed == 2 + 2


class EmptyCursors(FakeMcpServer):
    """Has an empty cursor behind the first page; the page there is the last."""

    async def answer(self, message: Mapping[str, Any]) -> Any:
        is_first = "cursor" not in (message.get("params") or {})
        self.listing = {"nextCursor": ""} if is_first else {"tools": [{**self.tools[0], "name": "last"}]}
        return await super().answer(message)


@pytest.mark.parametrize(("legacy", "last"), [(True, []), (False, ["last"])], ids=["old era", "new era"])
async def test_an_empty_cursor_is_the_end_in_the_old_era_and_a_cursor_in_the_new_one(
    *, legacy: bool, last: list[str]
) -> None:
    fake = EmptyCursors(legacy=legacy)
    names = [tool["name"] for tool in fake.tools]
    async with over_http(fake) as client:
        assert [tool.name for tool in await client.tools.list_tools()] == names + last
    assert fake.listed == 1 + len(last)


async def test_a_change_that_is_announced_during_a_listing_is_not_lost() -> None:
    fake = FakeMcpServer(list_announces=True)
    async with over_http(fake) as client:
        await client.tools.execute("echo", PING)
        await client.tools.execute("echo", PING)
        await client.tools.execute("echo", PING)
    assert fake.listed == 2


async def test_a_call_is_repeated_in_the_next_session_unless_its_tool_changed_with_it() -> None:
    fake = FakeMcpServer(legacy=True)
    async with over_http(fake, rules=(ToolRule("*", idempotent=True),)) as client:
        await client.tools.execute("echo", PING)
        fake.next_answer = HttpAnswer(404)
        assert (await client.tools.execute("echo", PING)).structured == PING
        assert fake.opened == 2
        fake.tools[0]["description"] = "Returns the message, and sends it elsewhere."
        fake.next_answer = HttpAnswer(404)
        error = await client.fails(ToolProviderFailure, "echo", PING)
        # The first attempt was answered with 404, which a server may have said of more than its session.
        assert (error.reason, error.may_have_run) == (Reason.CONTRACT, True)
        assert fake.sent("echo") == 2
        assert (await client.tools.execute("echo", PING)).structured == PING


async def test_a_deadline_ends_a_list_whose_schemas_take_long_to_compile() -> None:
    slow = {"type": "object", "properties": {"a": {"pattern": "\\pL{400}"}}}
    tools = [{"name": f"t{number}", "inputSchema": slow} for number in range(1000)]
    async with over_http(FakeMcpServer(tools=tools)) as client:
        with pytest.raises(ToolTimeout):
            await client.tools.list_tools(deadline_s=1)
