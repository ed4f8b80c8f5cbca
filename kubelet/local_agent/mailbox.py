"""The messages of the caller to the local agent, and the two tools by which it reads and answers them.

Must not know the socket.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

MAX_UNREAD = 64
MAX_WAIT_MS = 30_000
READ, REPLY = "caller-messages", "caller-reply"

ENTRIES: Mapping[str, dict[str, Any]] = {
    READ: {
        "name": READ,
        "title": "Messages of the caller",
        "description": (
            "Read the messages that the agent which opened a session with this node has sent, oldest first; "
            "each is returned once. With wait_ms, wait that long for the first one."
        ),
        "inputSchema": {
            "type": "object",
            "properties": {"wait_ms": {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_MS}},
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": True, "openWorldHint": True},
    },
    REPLY: {
        "name": REPLY,
        "title": "Reply to the caller",
        "description": "Send a message to the agent that opened a session with this node.",
        "inputSchema": {
            "type": "object",
            "properties": {"message": {"type": "string", "maxLength": 196_608}},
            "required": ["message"],
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": False, "destructiveHint": False, "openWorldHint": True},
    },
}


class Mailbox:
    """The messages that were not read yet; of too many, the newest."""

    def __init__(self) -> None:
        self._unread: deque[str] = deque(maxlen=MAX_UNREAD)
        self._arrived = asyncio.Event()

    def put(self, message: str) -> None:
        """Add a message."""
        self._unread.append(message)
        self._arrived.set()

    async def take(self, wait_ms: int) -> list[str]:
        """Return all messages; wait ``wait_ms`` for one if there is none."""
        if not self._unread:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000):
                    await self._arrived.wait()
        messages = list(self._unread)
        self._unread.clear()
        self._arrived.clear()
        return messages
