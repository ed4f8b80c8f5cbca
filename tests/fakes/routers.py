"""Implementations of ``LocalRouter`` that answer as a test says."""

import asyncio
from collections.abc import Callable
from typing import Any

from relay.routing.port import Command, CommandAnswer, LocalRouter
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck, CmdDone

_BOUND_S = 30

Script = Callable[[Command], Any]
"""Makes the payload of a ``cmd_ack``: what a node that a test plays sends need not fit its document."""


def echoed(command: Command) -> CmdDone:
    """Answer as a good node answers ``system.echo``."""
    result = {
        "message": command.arguments["message"],
        "received_at_ms": 1_760_000_000_000,
        "node_id": command.node_id,
    }
    return {"ok": True, "result": result}


def refusing(failure: Failure, detail: str | None = None) -> Script:
    """Return what raises ``failure``, as if the node could not be reached, or had none of its time."""

    def answer(_command: Command) -> CmdAck:
        raise ToolError(failure, detail)

    return answer


def answered(ack: CmdAck) -> CommandAnswer:
    """Return the answer of a node that takes no time."""
    answer = CommandAnswer(asyncio.get_running_loop())
    answer.set_result(ack)
    return answer


class ScriptedRouter(LocalRouter):
    """A ``LocalRouter`` that notes the commands and gives the answer that ``answer`` makes."""

    def __init__(self, answer: Script = echoed) -> None:
        self.answer = answer
        self.commands: list[Command] = []

    def start(self, command: Command) -> CommandAnswer:
        """Answer, or raise, as the script says."""
        self.commands.append(command)
        return answered(self.answer(command))


class SilentRouter(LocalRouter):
    """A node that never answers.

    Attributes:
        asked: set when a command has arrived.
        given_up: set when it is cancelled.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.given_up = asyncio.Event()

    def start(self, command: Command) -> CommandAnswer:  # noqa: ARG002 - it is not even read
        """Wait until cancelled."""
        self.asked.set()
        answer = CommandAnswer(asyncio.get_running_loop())
        answer.at_end(lambda _: self.given_up.set())
        return answer


class HeldRouter(LocalRouter):
    """Calls that wait in the node until the test answers them."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[tuple[Command, CommandAnswer]] = asyncio.Queue()

    def start(self, command: Command) -> CommandAnswer:
        """Wait for what the test says."""
        answer = CommandAnswer(asyncio.get_running_loop())
        self.waiting.put_nowait((command, answer))
        return answer

    async def next(self) -> tuple[Command, CommandAnswer]:
        """Return the next command that has come, and what takes its answer."""
        return await asyncio.wait_for(self.waiting.get(), _BOUND_S)
