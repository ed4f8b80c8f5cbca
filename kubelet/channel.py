"""One connection to the relay: its socket, and the machine that says what may go over it.

Must not know what a frame means.
"""

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from schemas.addresses import connect_url
from schemas.frames import MAX_FRAME_BYTES, SUBPROTOCOL, Frame, FrameReader
from schemas.session import CloseCode, Role, Session, State
from schemas.ulids import UlidSource

NOT_REACHED = (OSError, WebSocketException)
"""What ``opened`` raises when there is no connection, or it does not hold."""

CLOSE_TIMEOUT_S = 2
_PING_INTERVAL_S = 15
_PING_TIMEOUT_S = 10


@asynccontextmanager
async def opened(
    relay_url: str,
    tls: ssl.SSLContext | None,
    reader: FrameReader,
    ulids: UlidSource,
    open_timeout_s: float,
) -> AsyncIterator["Channel"]:
    """Connect to the nodes' door of the relay, for the length of the block.

    Raises:
        NOT_REACHED: it is not reached, or does not speak the protocol.
    """
    async with connect(
        connect_url(relay_url),
        subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]  # a NewType over str
        ssl=tls,
        compression=None,
        max_size=MAX_FRAME_BYTES,
        close_timeout=CLOSE_TIMEOUT_S,
        open_timeout=open_timeout_s,
        ping_interval=_PING_INTERVAL_S,
        ping_timeout=_PING_TIMEOUT_S,
        user_agent_header=None,
    ) as socket:
        yield Channel(socket, Session(Role.NODE, reader), ulids)


class Channel:
    """Frames in and out of ``socket``."""

    def __init__(self, socket: ClientConnection, session: Session, ulids: UlidSource) -> None:
        self._socket = socket
        self._session = session
        self._ulids = ulids

    @property
    def is_open(self) -> bool:
        """Whether the handshake is done and nobody has closed."""
        return self._session.state is State.OPEN

    async def send(self, type_: str, payload: Mapping[str, Any], in_reply_to: str | None = None) -> bool:
        """Send a frame; tell whether the connection was still there to take it, and no goodbye said.

        Raises:
            ProtocolError: this end may not send it now, or it is larger than a frame may be.
        """
        if self._session.state is State.CLOSED:
            return False
        text = self._session.send(type_, self._ulids.new(), payload, in_reply_to)
        try:
            await self._socket.send(text)
        except ConnectionClosed:
            return False
        return True

    async def receive(self) -> Frame | None:
        """Return the next frame; None for an answer that was dropped.

        Raises:
            ProtocolError: the relay broke the protocol.
            ConnectionClosed: the connection is over.
        """
        return self._session.receive(await self._socket.recv(decode=False))

    async def close(self, code: CloseCode) -> None:
        """Close with ``code``."""
        await self._socket.close(code)
