"""The relay's end of a node's connection, byte by byte. Must not judge what the node sends."""

import asyncio
import base64
import hashlib
import json
import re
from typing import Any, Final

from schemas.frames import SUBPROTOCOL
from tests.fakes.frames import frame_text
from tests.fuzz.live import CLOSE, read_frame, ws_frame

BOUND_S: Final = 5
_KEY: Final = re.compile(rb"Sec-WebSocket-Key: (\S+)\r\n", re.IGNORECASE)
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455 section 1.3
_TEXT: Final = 1


class NodeClosedError(Exception):
    """The node has closed the WebSocket, with ``code``."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class RelayEnd:
    """One connection that a node has opened; ``accept_key`` is what its request for an upgrade is to get."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, accept_key: str) -> None:
        self.reader = reader
        self.writer = writer
        self.accept_key = accept_key

    @classmethod
    async def of(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> "RelayEnd":
        """Return the end of a connection whose request has been read."""
        async with asyncio.timeout(BOUND_S):
            request = await reader.readuntil(b"\r\n\r\n")
        found = _KEY.search(request)
        assert found is not None
        digest = hashlib.sha1(found[1] + _GUID, usedforsecurity=False).digest()
        return cls(reader, writer, base64.b64encode(digest).decode())

    def upgrade(self) -> None:
        """Agree to speak WebSocket."""
        lines = [
            "HTTP/1.1 101 Switching Protocols",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Accept: {self.accept_key}",
            f"Sec-WebSocket-Protocol: {SUBPROTOCOL}",
        ]
        self.writer.write("\r\n".join([*lines, "", ""]).encode())

    async def admit(self) -> None:
        """Go through the handshake, and accept the node's manifest."""
        self.send(frame_text("welcome").replace("0" * 26, await self.asked()))
        announce = await self.receive("announce")
        self.send(frame_text("announce_ack", 2).replace("0" * 26, announce["msg_id"]))

    async def asked(self) -> str:
        """Return the id of the node's ``auth``."""
        asked: str = (await self.receive("auth"))["msg_id"]
        return asked

    def send(self, text: str) -> None:
        self.writer.write(ws_frame(text.encode(), masked=False))

    async def receive(self, type_: str) -> dict[str, Any]:
        """Return the next frame of ``type_``.

        Raises:
            NodeClosedError: the node has closed.
            asyncio.IncompleteReadError, ConnectionError: it has ended the connection.
        """
        async with asyncio.timeout(BOUND_S):
            while True:
                opcode, payload = await read_frame(self.reader)
                if opcode == CLOSE:
                    raise NodeClosedError(int.from_bytes(payload[:2], "big"))
                frame: dict[str, Any] = json.loads(payload) if opcode == _TEXT else {}
                if frame.get("type") == type_:
                    return frame
