"""Implementations of ``NodeRouter`` that answer as a test says."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from relay.routing.port import Command

_BOUND_S = 10

Answer = Callable[[Command], Mapping[str, Any]]


def echoed(command: Command) -> dict[str, Any]:
    """Answer as a good node answers ``system.echo``."""
    result = {
        "message": command.arguments["message"],
        "received_at_ms": 1_760_000_000_000,
        "node_id": command.node_id,
    }
    return {"ok": True, "result": result}


class ScriptedRouter:
    """A ``NodeRouter`` that notes the commands and gives the answer that ``answer`` makes."""

    def __init__(self, answer: Answer = echoed) -> None:
        self.answer = answer
        self.commands: list[Command] = []

    async def run(self, command: Command) -> Mapping[str, Any]:
        """Answer, or raise, as the script says."""
        self.commands.append(command)
        return self.answer(command)


class SilentRouter:
    """A node that never answers.

    Attributes:
        asked: set when a command has arrived.
        given_up: set when it is cancelled.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.given_up = asyncio.Event()

    async def run(self, command: Command) -> Mapping[str, Any]:  # noqa: ARG002 - it is not even read
        """Wait until cancelled."""
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up.set()
        raise AssertionError


class HeldRouter:
    """Calls that wait in the node until the test answers them."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[tuple[Command, asyncio.Future[Mapping[str, Any]]]] = asyncio.Queue()

    async def run(self, command: Command) -> Mapping[str, Any]:
        """Wait for what the test says."""
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.waiting.put_nowait((command, answer))
        return await answer

    async def next(self) -> tuple[Command, asyncio.Future[Mapping[str, Any]]]:
        """Return the next command that has come, and what takes its answer."""
        return await asyncio.wait_for(self.waiting.get(), _BOUND_S)
