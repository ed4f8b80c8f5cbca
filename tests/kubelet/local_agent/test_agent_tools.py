import io
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

from kubelet.daemon.composition import make_handlers
from kubelet.local_agent.agent_tools import AgentTools, OwnTools
from kubelet.local_agent.daemon_client import ResponseError
from kubelet.local_agent.toolbox import Toolbox
from schemas.errors import Failure, ToolError
from schemas.kinds import KindRegistry
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource
from tests.fakes.caller_tools import SEND
from tests.fakes.clock import FakeClock
from tests.fakes.signer import NODE_ID

CORRELATION_ID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
ECHO = f"sysecho-{NODE_ID}-echo-invoke"


class Daemon:
    """What is requested of it, and how it answers."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Mapping[str, Any]]] = []
        self.error: ToolError | None = None

    async def request(self, method: str, params: Mapping[str, Any]) -> Any:
        self.requests.append((method, params))
        if self.error is not None:
            raise self.error
        return {"done": True}


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def toolbox() -> Toolbox:
    return Toolbox(make_logger("kubelet", io.StringIO()))


@pytest_asyncio.fixture
async def tools(
    toolbox: Toolbox, registry: SchemaRegistry, kinds: KindRegistry, clock: FakeClock
) -> AsyncIterator[AgentTools]:
    log, ulids = make_logger("kubelet", io.StringIO()), UlidSource(clock, os.urandom)

    def make_own(node_id: str) -> OwnTools:
        return OwnTools(node_id, make_handlers(node_id, log), registry, kinds, ulids, clock, log)

    tools = AgentTools(toolbox, make_own, lambda: CORRELATION_ID)
    yield tools
    await tools.close()


async def test_a_lent_tool_is_requested_of_the_daemon_with_its_caller(
    tools: AgentTools, daemon: Daemon
) -> None:
    tools.lend("ant", [dict(SEND)])
    answer = await tools.call(daemon, "ant_send_response", {"message": "hi"})
    assert answer.value == {"done": True}
    params = {"caller_id": "ant", "tool": "send_response", "arguments": {"message": "hi"}}
    assert daemon.requests == [("caller_tool", params)]


async def test_arguments_that_do_not_fit_never_leave_the_process(tools: AgentTools, daemon: Daemon) -> None:
    tools.lend("ant", [dict(SEND)])
    answer = await tools.call(daemon, "ant_send_response", {"message": 1})
    assert answer.error is not None
    assert answer.error["code"] == "E_MANIFEST_INVALID"
    assert answer.error["correlation_id"] == CORRELATION_ID
    assert daemon.requests == []


async def test_the_nodes_own_tools_need_no_daemon(
    tools: AgentTools, toolbox: Toolbox, daemon: Daemon
) -> None:
    tools.node_known(NODE_ID)
    tools.node_known(NODE_ID)
    assert ECHO in [entry["name"] for entry in toolbox.entries()]
    answer = await tools.call(daemon, ECHO, {"message": "hello"})
    assert answer.value["message"] == "hello"
    wrong = await tools.call(daemon, ECHO, {})
    assert wrong.error is not None
    assert wrong.error["correlation_id"] == CORRELATION_ID
    assert daemon.requests == []


@pytest.mark.parametrize("name", ["ant_get_memory", ECHO, "nothing"])
async def test_a_name_that_is_not_listed_is_an_error(tools: AgentTools, daemon: Daemon, name: str) -> None:
    answer = await tools.call(daemon, name, {})
    assert answer.error is not None
    assert answer.error["code"] == "E_VERB_UNSUPPORTED"
    assert daemon.requests == []


async def test_a_tool_that_was_withdrawn_is_no_longer_called(tools: AgentTools, daemon: Daemon) -> None:
    tools.lend("ant", [dict(SEND)])
    tools.withdraw()
    answer = await tools.call(daemon, "ant_send_response", {"message": "hi"})
    assert answer.error is not None
    assert daemon.requests == []


async def test_what_the_daemon_answers_is_the_error(tools: AgentTools, daemon: Daemon) -> None:
    tools.lend("ant", [dict(SEND)])
    envelope = ToolError(Failure.CALLER_TOOL_FAILED).envelope()
    daemon.error = ResponseError({"code": -32603, "data": {**envelope, "caller_message": "no"}})
    answer = await tools.call(daemon, "ant_send_response", {"message": "hi"})
    assert answer.error == {**envelope, "correlation_id": CORRELATION_ID}
    assert answer.caller_text == "no"


async def test_an_error_of_the_protocol_is_a_fault_of_ours(tools: AgentTools, daemon: Daemon) -> None:
    tools.lend("ant", [dict(SEND)])
    daemon.error = ResponseError({"code": -32602, "message": "params"})
    answer = await tools.call(daemon, "ant_send_response", {"message": "hi"})
    assert answer.error is not None
    assert answer.error["code"] == "E_INTERNAL"


async def test_messages_are_read_and_answered_by_tools(tools: AgentTools, daemon: Daemon) -> None:
    tools.message("hello")
    assert (await tools.call(daemon, "caller-messages", {})).value == {"messages": ["hello"]}
    assert (await tools.call(daemon, "caller-messages", {"wait_ms": -1})).error is not None
    assert (await tools.call(daemon, "caller-reply", {"message": "hi"})).error is None
    assert daemon.requests == [("session_reply", {"message": "hi"})]
