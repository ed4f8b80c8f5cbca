"""A live node and a hostile relay: whatever the relay sends, the node goes on or closes as declared.

Afterwards it answers a call: in the same session, or in the next one, which it opens by itself.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Final

from websockets.exceptions import ConnectionClosed

from kubelet.handlers.base import Handler
from kubelet.session.link_state import LinkState
from schemas.frames import FrameReader
from schemas.registry import SchemaRegistry
from tests.fakes.frames import frame_text, message_id
from tests.fakes.linked_node import LinkedNode
from tests.fakes.played_relay import PlayedRelay, RelayEnd
from tests.fakes.signer import ECHO, NODE_ID, NOW_MS
from tests.fuzz import samples
from tests.fuzz.live import CountingReader, Lines, check_closed, check_log, counts, loop
from tests.fuzz.mutation import mutated_lines
from tests.fuzz.target import Target

BOUND_S: Final = 20
_CALL_ID: Final = message_id(10**20)
_LAST_ID: Final = message_id(10**21)
_MOST_TASKS: Final = 100


class HeldEcho(Handler):
    """Echo, held back while a call is to be in flight."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    @property
    def capability(self) -> Mapping[str, Any]:
        return ECHO

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        assert verb == "invoke"
        await self.may_end.wait()
        return {"message": arguments["message"], "received_at_ms": NOW_MS, "node_id": NODE_ID}


class NodeStage:
    """The node, and the relay that it connects to again and again."""

    def __init__(self, node: LinkedNode, relay: PlayedRelay, echo: HeldEcho, counted: CountingReader) -> None:
        self._node = node
        self._relay = relay
        self._echo = echo
        self._counted = counted

    @classmethod
    async def opened(cls) -> "NodeStage":
        """Return a stage that lasts as long as the loop."""
        stack, registry = loop().stack, SchemaRegistry()
        counted, echo = CountingReader(registry), HeldEcho()
        relay = await stack.enter_async_context(PlayedRelay(FrameReader(registry)).running())
        running = LinkedNode.running(samples.NODE, relay.url, registry, [echo], counted)
        return cls(await stack.enter_async_context(running), relay, echo, counted)

    async def play(self, lines: Lines) -> None:
        """Send ``lines``, see what becomes of the session, and call the node."""
        end = await self._next()
        names: dict[bytes, str] = {}
        if lines.state != b"stranger":
            await end.challenge()
            names[b"@ASKED@"] = (await end.receive("auth")).msg_id
        if lines.state not in {b"stranger", b"asked"}:
            await end.send("welcome", answers=names[b"@ASKED@"])
            await end.accept()
        self._echo.may_end.set()
        if lines.state == b"call":
            self._echo.may_end.clear()
            await end.send("cmd", msg_id=_CALL_ID)
            names[b"@CALL@"] = _CALL_ID
        self._counted.count = 0
        closed, code = await self._exchanged(end, lines, names)
        self._echo.may_end.set()
        if closed:
            check_closed(code, lines)
        else:
            await self._check_call(end, lines)
        counts().add(len(lines.frames), self._counted.count)
        end.drop()
        check_log(self._node.log)
        assert self._node.link.state is not LinkState.REVOKED
        assert len(asyncio.all_tasks()) < _MOST_TASKS

    async def _next(self) -> RelayEnd:
        """Return the node's next connection; its wait before it is over at once."""
        next_one = asyncio.create_task(self._relay.next())
        while not next_one.done():
            waiting = asyncio.create_task(self._node.waits.next())
            await asyncio.wait([next_one, waiting], return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result().end()
            else:
                waiting.cancel()
        return next_one.result()

    async def _exchanged(
        self, end: RelayEnd, lines: Lines, names: Mapping[bytes, str]
    ) -> tuple[bool, int | None]:
        """Return whether the node closes, and with which code."""
        try:
            for line in lines.frames:
                for name, value in names.items():
                    line = line.replace(name, value.encode())  # noqa: PLW2901 - step by step
                if line.startswith(b"!"):
                    end.socket.transport.write(line[1:])
                else:
                    await end.socket.send(line, text=True)
            pong = await end.socket.ping()
            async with asyncio.timeout(BOUND_S):
                await pong
        except ConnectionClosed as error:
            return True, error.rcvd.code if error.rcvd is not None else None
        return False, None

    async def _check_call(self, end: RelayEnd, lines: Lines) -> None:
        """Assert that the node answers a command, unless the session is not open, or about to end."""
        is_open = lines.state not in {b"stranger", b"asked"}
        if not is_open or any(line.startswith(b"!") or b"bye" in line for line in lines.frames):
            return
        text = frame_text("cmd").replace(message_id(1), _LAST_ID)
        with suppress(ConnectionClosed):
            await end.socket.send(text)
            async with asyncio.timeout(BOUND_S):
                while f'"in_reply_to":"{_LAST_ID}"' not in str(await end.socket.recv()):
                    pass


@cache
def _stage() -> NodeStage:
    made: list[NodeStage] = []

    async def make() -> None:
        made.append(await NodeStage.opened())

    loop().run(make())
    return made[0]


def live_node(data: bytes) -> None:
    """The node goes on and answers a call, or closes with a declared code and connects again."""
    loop().run(_stage().play(Lines.of(data)))


TARGETS: Final = {
    "live_node": Target(live_node, samples.RELAY_LINES, max_bytes=1 << 14, mutated=mutated_lines, share=8)
}
