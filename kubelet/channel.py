"""One connection to the relay: its socket, and the machine that says what may go over it.

Must not know what a frame means.
"""

from collections.abc import Mapping
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from schemas.frames import Frame
from schemas.session import CloseCode, Session, State
from schemas.ulids import UlidSource


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
