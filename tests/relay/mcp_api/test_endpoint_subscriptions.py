"""What clients of both eras hear of changes, until their token is revoked."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import ToolsListChanged
from mcp_types import ToolListChangedNotification

from relay.remote_tools import (
    BearerToken,
    ClientEnvironment,
    HttpServer,
    Permissions,
    Reason,
    RemoteToolError,
    Risk,
    ToolNotFound,
)
from tests.fakes.guarded import Guarded, guarded
from tests.fakes.mcp_stage import BOUND_S, ECHO_NAME, NEW, OTHER, PING, Notified, Stage, Wire
from tests.fakes.signer import METRICS, NOW_MS, OTHER_NODE_ID, SimulatedNode

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

# --- what has changed ---------------------------------------------------------------------------------


async def test_a_client_of_the_old_era_is_told_that_the_list_has_changed(stage: Stage) -> None:
    notes = Notified()
    async with stage.client("legacy", heard=notes) as client:
        assert client.server_capabilities.tools is not None
        assert client.server_capabilities.tools.list_changed
        await client.list_tools()
        stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID))
        assert isinstance(await notes.next(), ToolListChangedNotification)
        assert len((await client.list_tools()).tools) == 4


async def test_a_client_of_the_new_era_is_told_that_the_list_has_changed(stage: Stage) -> None:
    async with stage.client(NEW) as client, client.listen(tools_list_changed=True) as changes:
        await client.list_tools()
        stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID))
        assert isinstance(await anext(changes), ToolsListChanged)
        assert len((await client.list_tools()).tools) == 4


async def test_a_session_of_the_old_era_goes_on_by_the_next_token_of_its_owner(stage: Stage) -> None:
    """Tokens of a sign-in last an hour; sessions, and their streams, longer."""
    notes = Notified()
    first, second = stage.hub.token(), stage.hub.token()
    async with stage.http(first) as http:
        transport = streamable_http_client(f"http://{stage.address}/mcp", http_client=http)
        async with Client(transport, mode="legacy", message_handler=notes) as client:
            await client.list_tools()
            stage.mcp.revoke({stage.hub.authenticator.identify(first).jti})
            http.headers["Authorization"] = f"Bearer {second}"
            await client.session.send_ping()
            stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID))
            assert isinstance(await notes.next(), ToolListChangedNotification)


async def test_the_guarded_client_learns_that_a_tool_is_no_longer_there(
    stage: Stage, node: SimulatedNode
) -> None:
    server = HttpServer(f"http://{stage.address}/mcp", BearerToken(stage.hub.token()))
    # Its clock stands still, so that no list of its ends by itself.
    environment = ClientEnvironment(monotonic=lambda: 0)
    permissions = Permissions(("*",), Risk.ADMIN, scopes=None)
    async with guarded(server, environment=environment, permissions=permissions) as client:
        assert (await client.tools.execute(ECHO_NAME, PING)).structured["message"] == "ping"
        stage.hub.announce(node, capabilities=[METRICS], issued_at_ms=NOW_MS + 1)
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(ToolNotFound) as caught:
                await until_refused(client, ECHO_NAME)
    assert caught.value.reason is Reason.UNLISTED


async def until_refused(client: Guarded, name: str) -> None:
    """Call until a check of the client's own refuses; the server's refusals are none."""
    while True:
        try:
            await client.tools.execute(name, PING)
        except RemoteToolError as error:
            if error.reason is not Reason.TOOL_ERROR:
                raise


async def test_another_tenants_changes_are_not_told(stage: Stage) -> None:
    theirs = stage.hub.token(tenant="globex")
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(stage.client(NEW, token=theirs))
        changes = await stack.enter_async_context(client.listen(tools_list_changed=True))
        ours = await stack.enter_async_context(stage.client(NEW))
        our_changes = await stack.enter_async_context(ours.listen(tools_list_changed=True))
        hearing = asyncio.create_task(anext(changes))
        stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID))
        await anext(our_changes)
        assert not hearing.done()
        stage.hub.connect(stage.hub.ca.issue("01hzx9k3m4p7q8r9s0t1v2w3x0", "globex"))
        assert isinstance(await hearing, ToolsListChanged)


async def test_a_subscription_ends_in_good_order_with_its_token(stage: Stage) -> None:
    token = stage.hub.token(ttl_s=1)
    stage.hub.clock.advance(950)
    async with stage.client(NEW, token=token) as client, client.listen(tools_list_changed=True) as changes:
        assert [event async for event in changes] == []


# --- a token that is revoked --------------------------------------------------------------------------


async def test_revoking_its_token_ends_a_subscription_in_good_order_and_no_other(stage: Stage) -> None:
    revoked, other = stage.hub.token(), stage.hub.token()
    jti = stage.hub.authenticator.identify(revoked).jti
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(stage.client(NEW, token=revoked))
        changes = await stack.enter_async_context(client.listen(tools_list_changed=True))
        theirs = await stack.enter_async_context(stage.client(NEW, token=other))
        their_changes = await stack.enter_async_context(theirs.listen(tools_list_changed=True))
        stage.mcp.revoke({jti})
        assert [event async for event in changes] == []
        stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID))
        assert isinstance(await anext(their_changes), ToolsListChanged)


async def test_revoking_its_token_ends_what_a_session_of_the_old_era_is_told(stage: Stage) -> None:
    notes, other_listener = Notified(), Notified()
    revoked, other = stage.hub.token(), stage.hub.token(**OTHER)
    async with (
        stage.client("legacy", token=revoked, heard=notes) as client,
        stage.client("legacy", token=other, heard=other_listener) as others_client,
    ):
        await client.list_tools()
        await others_client.list_tools()
        jti = stage.hub.authenticator.identify(revoked).jti
        stage.mcp.revoke({jti})
        stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID))
        assert isinstance(await other_listener.next(), ToolListChangedNotification)
        assert notes.is_empty
        stage.hub.authenticator.revoke(frozenset({jti}))
        async with stage.http(revoked) as http:
            assert (await Wire(http, "/mcp", NEW).post("tools/list")).status_code == 401
