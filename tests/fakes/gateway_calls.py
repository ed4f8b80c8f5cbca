"""Calls through a gateway, and what a test reads of their ends."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from relay.calls.executor import CallRequest
from relay.calls.gateway import CallGateway
from relay.calls.relay_tools import RelayTool, RelayToolCall
from relay.calls.results import CallAnswer
from relay.fleet.tools import ToolSchemas
from schemas.registry import SchemaRegistry
from tests.fakes.callers import call_of
from tests.fakes.hub import Hub
from tests.fakes.routers import HeldRouter, echoed
from tests.fakes.signer import NODE_ID

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
PING = {"message": "ping"}


def request(hub: Hub, name: str = ECHO_NAME, arguments: Any = None, **token: Any) -> CallRequest:
    return call_of(hub.token(**token), name, PING if arguments is None else arguments)


def error(answer: CallAnswer) -> dict[str, Any]:
    """Return the envelope of a refusal, which says the same in both of its forms."""
    assert answer.error is not None
    assert answer.result is None
    assert json.loads(answer.text) == answer.error
    assert answer.text.isascii()
    assert answer.text.isprintable()
    return dict(answer.error)


def audited(hub: Hub, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(line.get(name) for name in names) for line in hub.audited()]


async def codes(gateway: CallGateway, *requests: CallRequest) -> list[str]:
    answers = [await gateway.call(each) for each in requests]
    return [answer.error["code"] if answer.error else "ok" for answer in answers]


async def begun(
    gateway: CallGateway, router: HeldRouter, call: CallRequest
) -> tuple[asyncio.Task[CallAnswer], Any]:
    """Return the task of a call that waits in the node, and what answers it."""
    task = asyncio.create_task(gateway.call(call))
    command, answer = await router.next()
    return task, lambda: answer.set_result(echoed(command))


# --- Tools that the relay answers itself, made for tests.


Answer = Callable[[RelayToolCall], Awaitable[Mapping[str, Any]]]

INPUT_REF = "system.echo.invoke.input@1.0.0"
NODE_FREE = {"message": "ping", "received_at_ms": 1_760_000_000_000, "node_id": "0" * 26}
"""A result that fits the output of ``parrot``, without a node."""


async def repeated(call: RelayToolCall) -> Mapping[str, Any]:
    """Answer with the message of the call."""
    return {**NODE_FREE, "message": call.arguments["message"]}


def parrot(registry: SchemaRegistry, answer: Answer = repeated, **members: Any) -> RelayTool:
    """Return a tool with the documents of ``system.echo``."""
    usual: dict[str, Any] = {
        "canonical": "relay.parrot",
        "title": "Parrot",
        "description": "Repeats a message.",
        "schemas": ToolSchemas.of(registry, INPUT_REF, "system.echo.invoke.output@1.0.0"),
        "schema_ref": INPUT_REF,
        "safety_class": "read_only",
        "idempotent": True,
        "visible": lambda rights: rights.may_read,
        "answer": answer,
    }
    return RelayTool(**(usual | members))
