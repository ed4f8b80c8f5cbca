"""The library's client, with a shorter way for the bytes of calls.

The library reads by a stream and a task, and writes by a queue and another task: a call waits a turn of the
event loop for each. Here the messages of ``direct_subscription`` are handled as their bytes arrive, and what
is published is written at once. All else goes the library's way: the handshake, its other subscriptions, and
what waits while the server does not read.

This module alone uses the library's private parts. Must not know what a message says.
"""
# ruff: noqa: SLF001 - as above

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from nats.aio.msg import Msg

from relay.cluster.direct_subscription import EveryMessage
from relay.cluster.flushing_client import FlushingClient

MAX_UNFINISHED_BYTES = 8 * 1024 * 1024
"""Of a message that has not arrived as a whole: far more than ``max_payload`` is where relays are joined."""

_LINE_END = b"\r\n"
_MESSAGE, _MESSAGE_WITH_HEADERS = b"MSG", b"HMSG"
_HEADERS_BEGIN = b"NATS/1.0\r\n"
_FEWEST_WORDS = 4
"""Of the line before a message: what it is, its subject, the subscription's number, and its size."""

_Take = Callable[[list[bytes], bytes], bool]
"""Handles a message, by the words of its first line and its bytes. Returns whether it was one of ours."""


class DirectClient(FlushingClient):
    """A client that is connected once, to one server. ``probe`` is as ``FlushingClient`` has it."""

    def __init__(self, probe: str) -> None:
        super().__init__(probe)
        self._wire: _Wire | None = None

    async def connect(self, *arguments: Any, **options: Any) -> None:
        """Connect, as the library does: there is no subscription yet, and so no message on its way."""
        await super().connect(*arguments, **options)
        transport: Any = self._transport
        self._wire = _Wire(transport._io_writer.transport, self._take)

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send ``payload``, as the library does, but at once, unless something waits to be sent before it."""
        if not self.publish_now(subject, payload, reply, headers):
            await super().publish(subject, payload, reply, headers)

    def publish_now(
        self, subject: str, payload: bytes, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> bool:
        """Send ``payload``; return False, without effect, if that has to wait, or must fail."""
        wire, block = self._wire, _header_block(headers) if headers else b""
        if (
            wire is None
            or wire.is_paused
            or self._pending
            or not self.is_connected
            or not (_is_word(subject) and (not reply or _is_word(reply)))
            or block is None
            or len(block) + len(payload) > self.max_payload
        ):
            return False
        size = len(block) + len(payload)
        line = f"HPUB {subject} {reply} {len(block)} {size}" if block else f"PUB {subject} {reply} {size}"
        wire.transport.write(b"".join((line.encode(), _LINE_END, block, payload, _LINE_END)))
        return True

    def _take(self, words: list[bytes], data: bytes) -> bool:
        kind, subject, number, *reply, _ = words
        subscription = self._subs.get(int(number))
        future = None if subscription is None else subscription._future
        if not isinstance(future, EveryMessage):
            return False
        headers: dict[str, str] | None = None
        if kind == _MESSAGE_WITH_HEADERS:
            size = int(reply.pop()) if len(words) > _FEWEST_WORDS and words[-2].isdigit() else 0
            if not (data.startswith(_HEADERS_BEGIN) and len(_HEADERS_BEGIN) <= size <= len(data)):
                return False  # the server's own status, or malformed
            headers = _headers_in(data[len(_HEADERS_BEGIN) : size])
            data = data[size:]
        future.set_result(Msg(self, subject.decode(), reply[0].decode() if reply else "", data, headers))
        return True


def respond_now(message: Msg, answer: bytes) -> bool:
    """Answer ``message``; return False, without effect, if that has to wait, or must fail."""
    client = message._client
    return isinstance(client, DirectClient) and client.publish_now(message.reply, answer)


class _Wire(asyncio.Protocol):
    """Stands between ``transport`` and the library's stream, which gets what ``take`` does not.

    Attributes:
        is_paused: whether the server does not read what was written before.
    """

    def __init__(self, transport: asyncio.Transport, take: _Take) -> None:
        self.transport = transport
        self.is_paused = False
        self._stream: Any = transport.get_protocol()
        self._take = take
        self._unfinished = b""
        transport.set_protocol(self)

    def data_received(self, data: bytes) -> None:
        """Handle what has arrived as a whole: lines, and messages with the line before them."""
        data, begin = self._unfinished + data, 0
        while (line_end := data.find(_LINE_END, begin)) >= 0:
            words, start = data[begin:line_end].split(), line_end + len(_LINE_END)
            size = _size_behind(words)
            if (end := start + size) > len(data):
                break
            if not size or not self._take(words, data[start : end - len(_LINE_END)]):
                self._stream.data_received(data[begin:end])
            begin = end
        self._unfinished = data[begin:]
        if len(self._unfinished) > MAX_UNFINISHED_BYTES:
            self.transport.abort()

    def eof_received(self) -> bool | None:
        """Tell the library's stream."""
        ended: bool | None = self._stream.eof_received()
        return ended

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the library's stream."""
        self._stream.connection_lost(exc)

    def pause_writing(self) -> None:
        """Have what is written wait in the library's queue from now on."""
        self.is_paused = True
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        """Have it written at once again."""
        self.is_paused = False
        self._stream.resume_writing()


def _is_word(text: str) -> bool:
    """Return whether ``text`` is one word of a line: nothing in it ends the line or begins another word."""
    return text.isprintable() and " " not in text and text != ""


def _header_block(headers: Mapping[str, str]) -> bytes | None:
    """Return ``headers`` as they are sent; None if one is not a word."""
    if not all(map(_is_word, (*headers, *headers.values()))):
        return None
    # The library's names are members of an enumeration: formatted, they would not be their texts.
    lines = "".join(f"{name.strip()}: {value}\r\n" for name, value in headers.items())
    return b"".join((_HEADERS_BEGIN, lines.encode(), _LINE_END))


def _headers_in(block: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in block.decode("ascii", "replace").split("\r\n"))
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def _size_behind(words: list[bytes]) -> int:
    """Return how many bytes follow the line of ``words``; 0 if it is malformed, or not that of a message."""
    is_message = len(words) >= _FEWEST_WORDS and words[0] in {_MESSAGE, _MESSAGE_WITH_HEADERS}
    if not (is_message and words[2].isdigit() and words[-1].isdigit()):
        return 0
    return int(words[-1]) + len(_LINE_END)
