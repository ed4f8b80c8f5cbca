"""Who may use a session, and how many an agent may have open."""

import asyncio
from typing import Any

import httpx2
import pytest
from mcp.shared.exceptions import MCPError

from relay.http.body_parser import MAX_BODY_BYTES
from tests.fakes.hub import Hub
from tests.fakes.issuer import TwoIssuers, outside_token
from tests.fakes.mcp_stage import BOUND_S, ECHO_NAME, ERAS, NEW, OPENING, OTHER, Era, Stage, Wire
from tests.fakes.routers import ScriptedRouter
from tests.fakes.serving import Server
from tests.fakes.signer import TENANT

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

# --- who may use what is open -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other_caller",
    [
        pytest.param({"sub": "agent-2"}, id="another agent of the tenant"),
        pytest.param({"tenant": "globex"}, id="an agent of another tenant"),
    ],
)
async def test_a_session_of_the_old_era_is_its_owners_alone(
    stage: Stage, other_caller: dict[str, Any]
) -> None:
    async with stage.wire("legacy") as wire:
        assert (await wire.result("tools/list"))["tools"]
        wire.http.headers["Authorization"] = f"Bearer {stage.hub.token(**other_caller)}"
        assert (await wire.post("tools/list")).status_code == 404
        wire.http.headers["Authorization"] = f"Bearer {stage.hub.token()}"
        assert (await wire.result("tools/list"))["tools"]


@pytest.mark.integration
async def test_agents_of_one_name_from_two_issuers_have_no_session_in_common(
    hub: Hub, router: ScriptedRouter, server: Server
) -> None:
    async with TwoIssuers.running(hub.registry) as world:
        hub.authenticator = world.authenticator
        async with Stage(hub, router, server).running() as stage, stage.wire("legacy") as wire:
            wire.http.headers["Authorization"] = f"Bearer {outside_token(sub='agent-1', tenant=TENANT)}"
            assert (await wire.post("tools/list")).status_code == 404
            wire.http.headers["Authorization"] = f"Bearer {hub.token()}"
            assert (await wire.post("tools/list")).status_code == 200


@pytest.mark.parametrize("era", ERAS)
async def test_a_token_that_ends_ends_what_it_was_good_for(stage: Stage, era: Era) -> None:
    async with stage.wire(era, token=stage.hub.token(ttl_s=60)) as wire:
        assert (await wire.post("tools/list")).status_code == 200
        stage.hub.clock.advance(60_000)
        refused = await wire.post("tools/list")
    assert refused.status_code == 401
    assert 'error="invalid_token"' in refused.headers["www-authenticate"]


@pytest.mark.parametrize("era", ERAS)
async def test_a_body_over_a_mebibyte_is_refused(stage: Stage, router: ScriptedRouter, era: Era) -> None:
    async with stage.wire(era) as wire:
        params = {"name": ECHO_NAME, "arguments": {"message": "x" * MAX_BODY_BYTES}}
        assert (await wire.post("tools/call", params)).status_code == 413
    assert router.commands == []


async def test_a_client_that_says_again_that_it_is_ready_is_followed_once(stage: Stage) -> None:
    async with stage.wire("legacy") as wire:
        for _ in range(3):
            await wire.notify("notifications/initialized")
        await wire.result("tools/list")
        assert stage.notifier.listeners == 1


async def test_a_session_is_not_opened_by_a_url_with_an_option_that_there_is_not(stage: Stage) -> None:
    async with asyncio.timeout(BOUND_S), stage.http() as http:
        answer = await Wire(http, "/mcp?veiw=kinds", "legacy").ask("initialize", OPENING)
    assert (answer["error"]["code"], "result" in answer) == (-32602, False)
    assert answer["error"]["message"].endswith("; did you mean view?")


# --- shares of what is open ---------------------------------------------------------------------------


async def opening(stage: Stage, token: str | None = None) -> httpx2.Response:
    """Try to open a session of the old era by hand."""
    async with stage.http(token) as http:
        return await Wire(http, "/mcp", "legacy").post("initialize", OPENING)


@pytest.fixture
def one_each(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """The relay, on which each agent may hold one session or subscription."""
    monkeypatch.setattr(stage.streams, "_per_agent", 1)
    return stage


async def test_an_agents_sessions_are_bounded_and_anothers_are_not_touched(one_each: Stage) -> None:
    async with one_each.wire("legacy") as wire:
        refused = await opening(one_each)
        assert refused.status_code == 429
        assert refused.json() == {
            "error": "sessions",
            "message": "Too many sessions and subscriptions are open; close one.",
        }
        for other_caller in (OTHER, {"tenant": "globex"}):
            assert (await opening(one_each, one_each.hub.token(**other_caller))).status_code == 200
        assert (await wire.result("tools/list"))["tools"]


async def test_a_second_token_of_the_same_agent_opens_no_more(one_each: Stage) -> None:
    async with one_each.wire("legacy"):
        assert (await opening(one_each, one_each.hub.token(ttl_s=60))).status_code == 429


async def test_a_session_that_has_ended_gives_its_place_back(one_each: Stage) -> None:
    for _ in range(3):
        async with one_each.wire("legacy") as wire:
            ended = await wire.http.delete("/mcp", headers=wire.headers)
            assert ended.status_code == 200
    async with asyncio.timeout(BOUND_S):
        while (await opening(one_each)).status_code == 429:
            pass
        assert (await opening(one_each)).status_code == 429


async def test_a_request_for_an_event_stream_without_a_session_counts_as_one_that_opens_it(
    one_each: Stage,
) -> None:
    # The SDK allocates a session for it before it reads the method.
    async with one_each.wire("legacy") as wire:
        refused = await wire.http.get("/mcp", headers={"accept": "text/event-stream"})
        assert refused.status_code == 429


async def test_what_opens_no_session_leaves_no_place_taken(one_each: Stage) -> None:
    async with one_each.http() as http:
        wire = Wire(http, "/mcp", "legacy")
        assert (await http.get("/mcp", headers={"accept": "text/event-stream"})).status_code == 400
        assert (await wire.post("tools/list")).status_code == 400
        assert (await http.post("/mcp", content=b"{", headers=wire.headers)).status_code == 400
        assert (await http.delete("/mcp")).status_code >= 400
    assert (await opening(one_each)).status_code == 200


async def test_one_session_takes_one_place_however_often_it_begins(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each would otherwise be one of the places of all, which a single agent could use up.
    monkeypatch.setattr(stage.streams, "_per_agent", 2)
    async with stage.wire("legacy") as wire:
        for _ in range(5):
            await wire.post("initialize", OPENING)
            await wire.notify("notifications/initialized")
        assert (await opening(stage)).status_code == 200
        assert (await opening(stage)).status_code == 429


async def test_subscriptions_and_sessions_share_an_agents_room(one_each: Stage) -> None:
    async with one_each.client(NEW) as client:
        async with client.listen(tools_list_changed=True):
            assert (await opening(one_each)).status_code == 429
            theirs = one_each.hub.token(**OTHER)
            async with one_each.client(NEW, token=theirs) as other, other.listen(tools_list_changed=True):
                pass
        async with asyncio.timeout(BOUND_S):
            while (await opening(one_each)).status_code == 429:
                pass


async def test_a_subscription_that_its_client_has_left_gives_its_place_back(one_each: Stage) -> None:
    for _ in range(3):
        async with one_each.client(NEW) as client, asyncio.timeout(BOUND_S):
            while True:
                try:
                    async with client.listen(tools_list_changed=True):
                        break
                except MCPError as error:
                    assert "Too many sessions" in error.error.message  # noqa: PT017 - until it is noticed
