"""The server's side of a WebSocket without a server: what comes in and what fails is up to the test."""

import asyncio
from typing import Any

from starlette.types import Message
from starlette.websockets import WebSocket

from relay.http.websocket_protocol import METER_IN_SCOPE, FrameMeter
from schemas.addresses import CONNECT_PATH
from schemas.frames import SUBPROTOCOL


class AsgiSocket:
    """Both channels of one connection.

    Attributes:
        sent: what the application sent.
        breaks_at: the number of messages after which the connection is gone.
    """

    def __init__(self, breaks_at: int | None = None, address: str | None = None) -> None:
        self.sent: list[Message] = []
        self.breaks_at = breaks_at
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.put({"type": "websocket.connect"})
        scope: dict[str, Any] = {
            "type": "websocket",
            "path": CONNECT_PATH,
            "headers": [],
            "subprotocols": [SUBPROTOCOL],
            "client": address and (address, 50_000),
            METER_IN_SCOPE: FrameMeter(asyncio.get_running_loop().time),
        }
        self.websocket = WebSocket(scope, self._incoming.get, self._send)

    def put(self, message: Message) -> None:
        """Let ``message`` come in."""
        self._incoming.put_nowait(message)

    def put_text(self, text: str) -> None:
        """Let a text frame come in."""
        self.put({"type": "websocket.receive", "text": text})

    async def _send(self, message: Message) -> None:
        if self.breaks_at is not None and len(self.sent) >= self.breaks_at:
            raise OSError
        self.sent.append(message)
