"""A node's WebSocket without a server: what comes in and what fails is up to the test."""

import asyncio
from collections.abc import Hashable
from http import HTTPStatus

from relay.http.websocket_protocol import (
    BoundedWebSocket,
    FrameMeter,
    MayWait,
    SocketClosedError,
    TextHandler,
)
from schemas.addresses import CONNECT_PATH
from schemas.frames import SUBPROTOCOL


class ScriptedSocket(BoundedWebSocket):
    """Both channels of one connection.

    Attributes:
        accepted: the subprotocol, once it is accepted.
        sent: the texts that were sent.
        closes: the codes of the closes that were sent; 403 of an upgrade that was refused.
        breaks_at: the number of texts after which the connection is gone.
        takes: whether texts are sent at once, and those that were, ``sent_now``.
    """

    def __init__(self, breaks_at: int | None = None, address: str = "unknown") -> None:
        self.address, self.path, self.headers = address, CONNECT_PATH, ()
        self.subprotocols = [SUBPROTOCOL]
        self.meter = FrameMeter(asyncio.get_running_loop().time)
        self.accepted = ""
        self.sent: list[str] = []
        self.sent_now: list[str] = []
        self.closes: list[int] = []
        self.breaks_at = breaks_at
        self.takes = False
        self._incoming: asyncio.Queue[str | bytes | int] = asyncio.Queue()

    def put(self, incoming: str | bytes | int) -> None:
        """Let a message come in, or the end of the connection with a code."""
        self._incoming.put_nowait(incoming)

    def accept(self, subprotocol: str) -> None:
        self.accepted = subprotocol

    def reject(self, status: HTTPStatus = HTTPStatus.FORBIDDEN) -> None:
        self.closes.append(status)

    def admit(self, holder: Hashable) -> bool:  # noqa: ARG002 - as the real one
        return True

    def handle_texts(self, handler: TextHandler, may_wait: MayWait | None = None) -> None:
        self._handler, self._may_wait = handler, may_wait

    async def receive(self) -> object:
        while True:
            incoming = await self._incoming.get()
            if isinstance(incoming, int):
                raise SocketClosedError(incoming)
            handled = self._handler(incoming) if isinstance(incoming, str) else incoming
            if handled is not None:
                return handled

    @property
    def can_send_now(self) -> bool:
        return self.takes

    def send_now(self, text: str, *, is_whole: bool = False) -> bool:  # noqa: ARG002 - as that of a socket
        if self.takes:
            self.sent_now.append(text)
        return self.takes

    async def send(self, text: str) -> None:
        if self.send_now(text):
            return
        self._break()
        self.sent.append(text)

    async def close(self, code: int) -> None:
        self._break()
        self.closes.append(code)

    def _break(self) -> None:
        if self.closes or (self.breaks_at is not None and len(self.sent) >= self.breaks_at):
            raise SocketClosedError(1006)
