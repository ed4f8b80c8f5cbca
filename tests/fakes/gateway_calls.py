"""Calls through a gateway, and what a test reads of their ends."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from relay.calls.call_record import CallAnswer, CallRequest
from relay.calls.gateway import CallGateway
from relay.routing.port import Command
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck
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


def refusing(failure: Failure, detail: str | None = None) -> Callable[[Command], CmdAck]:
    def answer(_command: Command) -> CmdAck:
        raise ToolError(failure, detail)

    return answer


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
