from pathlib import Path

import pytest

from schemas.registry import SchemaRegistry
from tests.fakes.caller_tools import (
    ANT,
    BEE,
    MEMORY,
    OTHER_OWNER,
    FakeRelay,
    SocketClient,
    connected,
    served,
)
from tests.fakes.lines import LogLines
from tests.fakes.polling import until

CALL = {"tool": "get_memory", "arguments": {}}


async def code_of(client: SocketClient, id_: int) -> str:
    return str((await client.response(id_))["error"]["data"]["code"])


async def test_an_ended_session_ends_its_requests_at_once(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    id_ = client.send("caller_tool", CALL)
    await relay.requests()
    relay.end()
    error = (await client.response(id_))["error"]
    assert error["code"] == -32603
    assert error["data"]["code"] == "E_INTERNAL"
    assert "caller disconnected" in error["message"].lower()


async def test_the_relays_error_is_the_local_clients(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    id_ = client.send("caller_tool", CALL)
    [request] = await relay.requests()
    relay.fail(request, "tool_failed", "no memory today")
    error = (await client.response(id_))["error"]
    assert error["message"] == "no memory today"
    assert error["data"]["caller_message"] == "no memory today"


@pytest.mark.holds("CALLER-TOOLS/errors/invalid-request-id")
@pytest.mark.parametrize("how", ["late", "twice", "unknown"])
async def test_an_answer_that_nothing_waits_for_is_ignored_and_warned_of(
    relay: FakeRelay, client: SocketClient, log: LogLines, how: str
) -> None:
    relay.open()
    id_ = client.send("caller_tool", CALL)
    [request] = await relay.requests()
    if how == "unknown":
        relay.answer({**request, "request_id": "00000000-0000-4000-8000-000000000000"}, "evil")
    relay.answer(request, "first")
    assert (await client.response(id_))["result"] == "first"
    if how != "unknown":
        relay.answer(request, "second")
    assert relay.tools.counts["answers_ignored"] == 1
    assert log.entries("answer of a caller ignored: no such request is pending")


async def test_a_resumed_connection_goes_on_with_its_requests(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    id_ = client.send("caller_tool", CALL)
    await relay.requests()
    relay.is_up = False
    relay.tools.lost()
    relay.is_up = True
    relay.tools.connected(resumed=True)
    relay.open()
    first, again = await relay.requests(2)
    assert first == again
    relay.answer(first, "after the resume")
    assert (await client.response(id_))["result"] == "after the resume"
    relay.open()
    assert len(relay.of("caller_tool")) == 2


async def test_a_new_connection_has_lost_the_sessions(relay: FakeRelay, client: SocketClient) -> None:
    relay.open()
    await client.notification()
    id_ = client.send("caller_tool", CALL)
    await relay.requests()
    relay.tools.lost()
    relay.tools.connected(resumed=False)
    assert await code_of(client, id_) == "E_INTERNAL"
    assert (await client.notification())["params"] == {"caller_id": "ant", "tools": []}
    relay.open()
    assert (await client.notification())["params"]["tools"]


async def test_a_session_that_a_resumed_relay_does_not_name_has_ended(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with (
        served(path, registry, log, unreachable_s=0.01) as relay,
        connected(path) as client,
    ):
        relay.open()
        await client.request("session_attach", {"session_id": ANT})
        relay.open(BEE, "bee")
        id_ = client.send("caller_tool", CALL)
        await relay.requests()
        relay.tools.lost()
        relay.tools.connected(resumed=True)
        relay.open(BEE, "bee")
        assert await code_of(client, id_) == "E_INTERNAL"
        assert relay.tools.summary() == "1 sessions, 1 local clients"


async def test_requests_wait_for_the_relay_only_so_long(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with (
        served(path, registry, log, unreachable_s=0.01) as relay,
        connected(path) as client,
    ):
        relay.open()
        relay.is_up = False
        relay.tools.lost()
        id_ = client.send("caller_tool", CALL)
        assert await code_of(client, id_) == "E_INTERNAL"
        again = client.send("caller_tool", CALL)
        assert await code_of(client, again) == "E_INTERNAL"


async def test_a_request_made_while_the_connection_is_lost_is_sent_after_it_resumes(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    relay.is_up = False
    relay.tools.lost()
    id_ = client.send("caller_tool", CALL)
    await until(lambda: relay.tools.summary() == "1 sessions, 1 local clients")
    relay.is_up = True
    relay.tools.connected(resumed=True)
    relay.open()
    relay.answer((await relay.requests())[0], "late but there")
    assert (await client.response(id_))["result"] == "late but there"


async def test_sessions_do_not_outlive_a_relay_that_stays_away(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with (
        served(path, registry, log, outlive_s=0.01) as relay,
        connected(path) as client,
    ):
        relay.open()
        await client.notification()
        relay.tools.lost()
        assert (await client.notification())["params"]["tools"] == []


async def test_a_refused_session_lends_nothing_and_its_caller_gets_the_reason(
    relay: FakeRelay, client: SocketClient
) -> None:
    relay.open()
    relay.end()
    relay.open(BEE, "ant", MEMORY, owner=OTHER_OWNER)
    assert relay.tools.counts["sessions_refused"] == 1
    assert relay.of("session_event") == [
        {
            "session_id": BEE,
            "message": "This node refuses the session: its caller_id belongs to another.",
        }
    ]
    response = await client.request("caller_tool", CALL)
    assert response["error"]["data"]["code"] == "E_VERB_UNSUPPORTED"
    relay.give("session_message", {"session_id": BEE, "message": "I am ant"})
    assert relay.tools.counts["messages_dropped"] == 1


async def test_nothing_that_callers_and_agents_say_is_logged(
    relay: FakeRelay, client: SocketClient, log: LogLines
) -> None:
    relay.open(ANT, "ant", {**MEMORY, "description": "SECRET"})
    relay.give("session_message", {"session_id": ANT, "message": "SECRET"})
    for number, ending in enumerate((relay.answer, relay.fail)):
        id_ = client.send("caller_tool", {"tool": "get_memory", "arguments": {"a": "SECRET"}})
        request = (await relay.requests(number + 1))[-1]
        if ending is relay.answer:
            relay.answer(request, "SECRET")
        else:
            relay.fail(request, "tool_failed", "SECRET")
        await client.response(id_)
        relay.answer(request, "SECRET")
    await client.request("session_reply", {"message": "SECRET"})
    client.writer.write(b'{"SECRET\n')
    await client.response(None)
    relay.end()
    assert log.entries()
    assert "SECRET" not in log.getvalue()
