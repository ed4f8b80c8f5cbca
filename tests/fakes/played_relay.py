"""The relay's end of node connections, played by a test over real WebSockets."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import count
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from schemas.frames import SUBPROTOCOL, Frame, FrameReader, Role
from schemas.session import SessionMachine
from tests.fakes.frames import PAYLOADS, message_id
from tests.fakes.signer import NOW_MS

BOUND_S = 30
SESSION_ID = PAYLOADS["welcome"]["session_id"]


class RelayEnd:
    """One connection of a node."""

    def __init__(
        self, socket: ServerConnection, session: SessionMachine, audience: str, numbers: Iterator[int]
    ) -> None:
        self.socket = socket
        self.session = session
        self._audience = audience
        self._numbers = numbers
        self._began_s = time.monotonic()

    async def send(
        self, type_: str, *, answers: str | None = None, msg_id: str | None = None, **payload: Any
    ) -> str:
        """Send a good frame with members of its payload overridden, and return its ``msg_id``."""
        return await self.send_payload(type_, {**PAYLOADS[type_], **payload}, answers=answers, msg_id=msg_id)

    async def send_payload(
        self,
        type_: str,
        payload: Mapping[str, Any],
        *,
        answers: str | None = None,
        msg_id: str | None = None,
    ) -> str:
        """Send a frame with just this payload, and return its ``msg_id``."""
        msg_id = msg_id or message_id(next(self._numbers))
        await self.socket.send(self.session.send(type_, msg_id, payload, answers))
        return msg_id

    async def receive(self, type_: str | None = None) -> Frame:
        """Return the next frame, or the next of ``type_``."""
        async with asyncio.timeout(BOUND_S):
            while True:
                frame = self.session.receive(await self.socket.recv())
                if frame is not None and type_ in {None, frame.type}:
                    return frame

    async def challenge(self, **payload: Any) -> str:
        """Send a challenge under the relay's own name, and return its ``msg_id``."""
        return await self.send("challenge", **{"audience": self._audience, **payload})

    async def admit(self, **welcome: Any) -> Frame:
        """Go through the handshake, and return the node's ``auth``."""
        await self.challenge()
        auth = await self.receive()
        await self.send("welcome", answers=auth.msg_id, **welcome)
        return auth

    async def accept(self) -> Frame:
        """Accept the manifest that comes next, and return its ``announce``."""
        announce = await self.receive("announce")
        await self.send("announce_ack", answers=announce.msg_id)
        return announce

    async def command(self, msg_id: str | None = None, **payload: Any) -> Frame:
        """Send a command, which names the time at which it is sent, and return the answer to it."""
        sent_at_ms = NOW_MS + int((time.monotonic() - self._began_s) * 1000)
        msg_id = await self.send("cmd", msg_id=msg_id, **{"sent_at_ms": sent_at_ms, **payload})
        while True:
            answer = await self.receive("cmd_ack")
            if answer.in_reply_to == msg_id:
                return answer

    def drop(self) -> None:
        """Lose the connection, without a close frame."""
        self.socket.transport.abort()

    async def until_closed(self) -> int | None:
        """Return the code that the node closed with, whatever it says before; None for a lost connection."""
        return (await self.rest())[1]

    async def rest(self) -> tuple[list[str | bytes], int | None]:
        """Return what the node still says, raw, and the code that it closes with."""
        said: list[str | bytes] = []
        async with asyncio.timeout(BOUND_S):
            try:
                while True:
                    said.append(await self.socket.recv())
            except ConnectionClosed as error:
                return said, error.rcvd.code if error.rcvd is not None else None


class PlayedRelay:
    """A WebSocket server; each connection waits to be played.

    It speaks ``subprotocols``, by default those of a relay of the version before.

    Attributes:
        refusal: the status with which it refuses connections; None: it does not.
        refusal_headers: the headers of that answer.
        audience: the public URL of the fleet, where that is not its own.
    """

    def __init__(self, reader: FrameReader, subprotocols: Sequence[str] = (SUBPROTOCOL,)) -> None:
        self._reader = reader
        self._subprotocols = subprotocols
        self._connections: asyncio.Queue[RelayEnd] = asyncio.Queue()
        self._numbers = count(1)
        self._port: int | None = None
        self.refusal: int | None = None
        self.refusal_headers: dict[str, str] = {}
        self.audience: str | None = None

    @property
    def url(self) -> str:
        """The relay's public URL."""
        if self._port is None:
            raise RuntimeError("not started")
        return f"http://127.0.0.1:{self._port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator["PlayedRelay"]:
        """Serve until the end of the block."""
        async with serve(
            self._connected,
            "127.0.0.1",
            0,
            subprotocols=self._subprotocols,  # type: ignore[arg-type]  # a NewType over str
            compression=None,
            process_request=self._upgrade,
            close_timeout=1,
        ) as server:
            self._port = server.sockets[0].getsockname()[1]
            yield self

    async def next(self) -> RelayEnd:
        """Return the next connection that a node has opened."""
        return await asyncio.wait_for(self._connections.get(), BOUND_S)

    async def _connected(self, socket: ServerConnection) -> None:
        await self._connections.put(
            RelayEnd(
                socket,
                SessionMachine(Role.RELAY, self._reader, time.monotonic),
                self.audience or self.url,
                self._numbers,
            )
        )
        await socket.wait_closed()

    def _upgrade(self, socket: ServerConnection, _request: Request) -> Response | None:
        if self.refusal is None:
            return None
        response = socket.respond(HTTPStatus(self.refusal), "")
        response.headers.update(self.refusal_headers)
        return response
