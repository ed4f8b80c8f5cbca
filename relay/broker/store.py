"""Bounds what the relay's own broker stores, so that no client can fill the store that all others need.

nats-server keeps retained messages, what waits for a subscriber and the records of clients in a stream each,
which it makes without a limit when the first client connects. It has no option for a limit, and keeps one
that is set by its own protocol, of which this module speaks a few lines, on loopback. There the broker
admits, for that alone, a key that lives as long as this process. Must not read or write a message.
"""

import asyncio
import base64
import binascii
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from attrs import define, field
from nacl.signing import SigningKey
from structlog.typing import FilteringBoundLogger

from schemas.error_roots import PeerError
from schemas.text import printable

_MIB = 1024 * 1024
RETAINED = "$MQTT_rmsgs"
LIMITS = {RETAINED: 512 * _MIB, "$MQTT_msgs": 256 * _MIB, "$MQTT_sess": 64 * _MIB}
"""How many bytes each stream may have, together fewer than ``nats_server.STORE_BYTES``.

A node retains at most four messages of the largest payload.
"""
_API = "$JS.API.STREAM"
_INBOX = "_INBOX.edge-store"
_USER_KEY = bytes([20 << 3])  # of an nkey in base 32: it begins with U
_TIMEOUT_S = 10.0
_MAX_LINE = 64 * 1024
_ASKED_AGAIN_S = 1.0  # until there are streams: the relay's own connection makes them
_MEASURED_S = 10.0


class _StoreError(PeerError):
    """The broker has not answered as it should."""


@define(eq=False, repr=False)
class BrokerStore:
    """The store of the broker that speaks NATS on the port of this machine that ``own_port`` returns, if any.

    ``key`` is what it admits this process by, where it has users; ``filled`` is told which share of the room
    for retained messages is used.
    """

    _own_port: Callable[[], int | None]
    _key: SigningKey
    _filled: Callable[[float], None]
    _log: FilteringBoundLogger
    _limits: Mapping[str, int] = field(kw_only=True, default=LIMITS)
    _sleep: Callable[[float], Awaitable[None]] = field(kw_only=True, default=asyncio.sleep)
    _reported: str | None = field(init=False, default=None)

    @property
    def user(self) -> str:
        """Whom the broker is to admit: it may set limits, and reads and writes no messages."""
        subjects = [f"{_API}.{action}.{stream}" for action in ("INFO", "UPDATE") for stream in LIMITS]
        permissions = {"publish": {"allow": subjects}, "subscribe": {"allow": [_INBOX]}}
        facts = {"nkey": self._public_key(), "permissions": permissions}
        return json.dumps({**facts, "allowed_connection_types": ["STANDARD"]})

    async def run(self) -> None:
        """Keep the limits set, and tell how much is used, until cancelled."""
        # The broker reads its access lists again as the relay starts, and refuses who logs in at that moment.
        await self._sleep(_ASKED_AGAIN_S)
        while True:
            # On a thread: with thousands of connections, to find it takes long.
            port, limited = await asyncio.to_thread(self._own_port), False
            try:
                if port is not None:
                    async with asyncio.timeout(_TIMEOUT_S):
                        limited = await self._limit(port)
                    self._reported = None
            except (
                OSError,
                EOFError,
                LookupError,
                ValueError,
                TypeError,
                AttributeError,
                _StoreError,
            ) as error:
                self._report(f"{type(error).__name__}: {error}")
            await self._sleep(_MEASURED_S if limited else _ASKED_AGAIN_S)

    def _report(self, reason: str) -> None:
        if reason != self._reported:
            self._log.error("the broker's store has no limits", reason=printable(reason))
        self._reported = reason

    async def _limit(self, port: int) -> bool:
        """Set the limits that are not set; return whether each stream is there and has its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_MAX_LINE)
        try:
            await self._log_in(reader, writer)
            for stream, max_bytes in self._limits.items():
                info = await _ask(reader, writer, f"{_API}.INFO.{stream}")
                if info is None:
                    return False
                # A retained message stays until its node replaces it; of the others, the oldest go.
                limited = {"max_bytes": max_bytes, "discard": "new" if stream == RETAINED else "old"}
                if not limited.items() <= info["config"].items():
                    changed = {**info["config"], **limited}
                    await _ask(reader, writer, f"{_API}.UPDATE.{stream}", changed)
                if stream == RETAINED:
                    self._filled(info["state"]["bytes"] / max_bytes)
            return True
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _log_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        verb, _, facts = (await reader.readline()).partition(b" ")
        if verb != b"INFO":
            raise _StoreError("it does not speak NATS")
        login: dict[str, Any] = {"verbose": False}
        # Without users, on loopback alone, there is nothing to sign.
        if nonce := json.loads(facts).get("nonce"):
            signature = base64.urlsafe_b64encode(self._key.sign(nonce.encode()).signature)
            login |= {"nkey": self._public_key(), "sig": signature.rstrip(b"=").decode()}
        writer.write(f"CONNECT {json.dumps(login)}\r\nSUB {_INBOX} 1\r\n".encode())

    def _public_key(self) -> str:
        named = _USER_KEY + bytes(self._key.verify_key)
        checksum = binascii.crc_hqx(named, 0).to_bytes(2, "little")
        return base64.b32encode(named + checksum).rstrip(b"=").decode()


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, subject: str, body: object = None
) -> dict[str, Any] | None:
    """Return the answer to a request; None if there is no such stream."""
    payload = b"" if body is None else json.dumps(body).encode()
    writer.write(b"PUB %s %s %d\r\n%s\r\n" % (subject.encode(), _INBOX.encode(), len(payload), payload))
    while line := await reader.readline():
        match line.split():
            case [b"MSG", *_, size] if int(size) <= _MAX_LINE:
                answer: dict[str, Any] = json.loads(await reader.readexactly(int(size) + 2))
                error = answer.get("error")
                if error is not None and error["code"] != 404:  # noqa: PLR2004 - as in HTTP
                    raise _StoreError(error["description"])
                return answer if error is None else None
            case [b"PING"]:
                writer.write(b"PONG\r\n")
            case [b"-ERR", *reason]:
                raise _StoreError(b" ".join(reason).decode("ascii", "replace"))
    raise _StoreError("it has closed the connection")
