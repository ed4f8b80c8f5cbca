"""A live node and a hostile relay: whatever the relay sends, the node goes on or closes as declared.

Afterwards it answers a call: in the same session, or in the next one, which it opens by itself.
"""

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from kubelet.handlers.base import Handler
from kubelet.session.link import LinkState
from schemas.addresses import HostPort
from schemas.registry import SchemaRegistry
from tests.fakes.frames import frame_text, message_id
from tests.fakes.linked_node import LinkedNode
from tests.fakes.signer import ECHO, NODE_ID, NOW_MS
from tests.fuzz import samples
from tests.fuzz.frame_counts import CountingReader
from tests.fuzz.live import BETWEEN_INPUTS_S, MOST_TASKS, Left, Lines, check_log, check_outcome, kept, outcome
from tests.fuzz.mutation import mutated_lines
from tests.fuzz.relay_end import NodeClosedError, RelayEnd
from tests.fuzz.target import Target

_RELAY: Final = HostPort("127.0.0.1", 8700)
_CALL_ID: Final = message_id(10**20)
_LAST_ID: Final = message_id(10**21)


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

    def __init__(self, node: LinkedNode, echo: HeldEcho) -> None:
        self._node = node
        self._echo = echo

    @classmethod
    async def opened(cls) -> "NodeStage":
        """Return a stage that lasts as long as the loop."""
        registry, echo = SchemaRegistry(), HeldEcho()
        running = LinkedNode.running(
            samples.NODE, f"http://{_RELAY}", registry, [echo], CountingReader(registry)
        )
        return cls(await kept().stack.enter_async_context(running), echo)

    async def play(self, lines: Lines) -> None:
        """Send ``lines``, see what becomes of the session, and call the node."""
        end = await RelayEnd.of(*await self._next())
        try:
            await self._play(end, lines)
        finally:
            end.writer.transport.abort()
        await asyncio.sleep(BETWEEN_INPUTS_S)
        check_log(self._node.log)
        assert self._node.link.state is not LinkState.REVOKED
        assert not self._node.running_link.done()
        assert len(asyncio.all_tasks()) < MOST_TASKS

    async def _play(self, end: RelayEnd, lines: Lines) -> None:
        if lines.state == b"upgrade":
            end.writer.write(b"\n".join(lines.frames).replace(b"@ACCEPT@", end.accept_key.encode()))
            await outcome(end.reader)
            return
        names = await self._begun(end, lines.state)
        end.writer.write(lines.wire(names, masked=False))
        found = await outcome(end.reader)
        check_outcome(found, lines)
        self._echo.may_end.set()
        if found is Left.OPEN:
            await self._check_call(end, lines)

    async def _begun(self, end: RelayEnd, state: bytes) -> dict[bytes, str]:
        """Bring the session to ``state``, and return what names stand for in it."""
        end.upgrade()
        names: dict[bytes, str] = {}
        if state == b"stranger":
            return names
        end.send(frame_text("challenge", audience=f"http://{_RELAY}"))
        if state == b"asked":
            names[b"@ASKED@"] = await end.asked()
            return names
        await end.admit()
        self._echo.may_end.set()
        if state == b"call":
            self._echo.may_end.clear()
            end.send(frame_text("cmd").replace(message_id(1), _CALL_ID))
            names[b"@CALL@"] = _CALL_ID
        return names

    async def _next(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the node's next connection; its wait before it is over at once."""
        next_one = asyncio.create_task(kept().loop.accept((_RELAY.host, _RELAY.port)))
        while not next_one.done():
            waiting = asyncio.create_task(self._node.waits.next())
            await asyncio.wait([next_one, waiting], return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result().end()
            else:
                waiting.cancel()
        return next_one.result()

    async def _check_call(self, end: RelayEnd, lines: Lines) -> None:
        """Assert that the node answers a command, unless the session is not open, or about to end."""
        is_open = lines.state not in {b"stranger", b"asked"}
        if not is_open or lines.has_raw_bytes or any(b"bye" in line for line in lines.frames):
            return
        end.send(frame_text("cmd").replace(message_id(1), _LAST_ID))
        try:
            while (await end.receive("cmd_ack"))["in_reply_to"] != _LAST_ID:
                pass
        except NodeClosedError as error:
            check_outcome(error.code, lines)  # a ping is answered before the frames in front of it
        except ConnectionResetError:
            return  # as above, and what was sent since was not read


@cache
def _stage() -> NodeStage:
    return kept().run(NodeStage.opened())


def live_node(data: bytes) -> None:
    """The node goes on and answers a call, or closes with a declared code and connects again."""
    kept().run(_stage().play(Lines.of(data)))


TARGETS: Final = {
    "live_node": Target(
        live_node, samples.RELAY_LINES, max_bytes=1 << 14, mutated=mutated_lines, by_lines=True, share=8
    )
}
