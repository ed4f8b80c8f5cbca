"""The client of NATS: its start, its end, the short way of calls through it, and why it fails, in one line.

The library reads by a stream and a task, and writes by a queue and another task: a call waits a turn of the
event loop for each. Here the messages of ``subscribe`` are handled as their bytes arrive, and what is
published is written at once. All else goes the library's way: the handshake, its other subscriptions, and
what waits while the server does not read. The library may swallow a cancellation, so nothing that it does
is waited for without a bound.

This module alone uses the library's private parts. Must not know what a message says, must not connect again,
and must not repeat unescaped what a server has sent.
"""
# ruff: noqa: SLF001 - as above

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from nats.aio.client import DEFAULT_FLUSH_TIMEOUT, Client
from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError, NoRespondersError
from nats.errors import Error as NatsError
from nats.js.errors import ServiceUnavailableError
from structlog.typing import FilteringBoundLogger

from relay.cluster.credentials import Credentials
from relay.cluster.messages import MAX_WIRE_BYTES
from relay.routing.port import NoResponderError
from relay.settings.config import ClusterServer
from schemas.error_roots import EdgeError, PeerError
from schemas.faults import connection_fault, connection_reason
from schemas.text import printable

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

MAX_UNFINISHED_BYTES = 8 * 1024 * 1024
"""Of a message that has not arrived as a whole: far more than ``max_payload`` is where relays are joined."""

MAX_HEADER_BYTES = 4096
"""Of one message: many times what relays and servers write. Parsing a megabyte takes a third of a second."""

_LINE_END = b"\r\n"
_MESSAGE, _MESSAGE_WITH_HEADERS = b"MSG", b"HMSG"
_HEADERS_BEGIN = b"NATS/1.0\r\n"
_STATUS, _NO_RESPONDERS = "Status", "503"
_FEWEST_WORDS = 4
"""Of the line before a message: what it is, its subject, the subscription's number, and its size."""

_PLAIN = b"\t" + bytes(range(ord(" "), ord("~") + 1))
_ONE_LINE = bytes(byte if byte in _PLAIN else ord("?") for byte in range(256))
"""What a client puts into a subject, servers pass on: also bytes that are no text, or end a word here."""

_Take = Callable[[list[bytes], bytes], bool]
"""Handles a message, by the words of its first line and its bytes. Returns whether it was one of ours."""


Handle = Callable[[Msg], None]
"""Handles one message. Must not block: the next is not read before it returns."""


Accept = Callable[[bytes], bytes | None]
"""Returns what an answer says; None of one that is not to be believed. It may raise NoResponderError."""


class EveryMessage(asyncio.Future[Msg]):
    """Gives every message to ``handle``."""

    def __init__(self, handle: Handle, log: FilteringBoundLogger) -> None:
        super().__init__()
        self._handle = handle
        self._log = log

    def set_result(self, message: Msg, /) -> None:
        try:
            self._handle(message)
        except Exception as error:  # noqa: BLE001 - a bug must lose one message; the library would read no more
            self._log.error("message of another relay not handled", exc_info=error)


async def subscribe(
    client: Client, subject: str, handle: Handle, log: FilteringBoundLogger, queue: str = ""
) -> "Subscription":
    """Call ``handle`` with each message on ``subject``; one of all that are in ``queue`` gets a message."""
    return await client.subscribe(subject, queue, future=EveryMessage(handle, log))


class DirectClient(Client):
    """A client that is connected once, to one server. ``probe`` is a subject that has no responder."""

    def __init__(self, probe: str, log: FilteringBoundLogger) -> None:
        super().__init__()
        self._probe = probe
        self._log = log
        self._wire: _Wire | None = None
        self._replies = ""
        self._numbers = count()
        self._reported: set[str] = set()
        self._waiting: dict[str, tuple[asyncio.Future[bytes], Accept | None]] = {}

    async def connect(self, *arguments: Any, **options: Any) -> None:
        await super().connect(*arguments, **options)
        transport: Any = self._transport
        self._wire = _Wire(transport._io_writer.transport, self._take)

    async def take_replies(self) -> None:
        """Subscribe to the answers to ``ask``. Call it before the first."""
        self._replies = self.new_inbox()
        await subscribe(self, f"{self._replies}.*", self._replied, self._log)

    async def ask(
        self,
        subject: str,
        payload: bytes,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        accept: Accept | None = None,
    ) -> bytes:
        """Return the answer to ``payload``, which is sent with ``headers``: the first that ``accept`` takes.

        Without ``accept`` it is the first, and that there is no responder is believed.

        Raises:
            NoResponderError: it was not delivered.
            TimeoutError: there was no answer in time; it may have been delivered.
            NatsError: the connection has ended; it was not sent.
        """
        loop = asyncio.get_running_loop()
        number, answer = str(next(self._numbers)), loop.create_future()
        # A timer that ends the one wait: ``asyncio.timeout`` costs twice as much.
        expiry = loop.call_later(timeout_s, _expire, answer)
        self._waiting[number] = answer, accept
        try:
            await self.publish(subject, payload, f"{self._replies}.{number}", headers)
            data: bytes = await answer
        finally:
            expiry.cancel()
            del self._waiting[number]
        return data

    def _replied(self, message: Msg) -> None:
        answer, accept = self._waiting.get(message.subject.rpartition(".")[2], (None, None))
        if answer is None or answer.done():
            return  # it comes after its deadline, or after what waited was cancelled
        if accept is not None:
            try:
                accepted = accept(message.data)
            except NoResponderError as error:
                answer.set_exception(error)
            else:
                if accepted is not None:
                    answer.set_result(accepted)
        elif message.headers is not None and message.headers.get(_STATUS) == _NO_RESPONDERS:
            answer.set_exception(NoResponderError("no relay answers"))
        else:
            answer.set_result(message.data)

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send ``payload``, as the library does, but at once, unless something waits to be sent before it.

        Raises:
            NatsError: the connection has ended; it was not sent.
        """
        if self.publish_now(subject, payload, reply, headers):
            return
        if self._wire is not None and self._wire.transport.is_closing():
            # The library learns of the end a turn later, and would queue what is never written.
            raise ConnectionClosedError
        await super().publish(subject, payload, reply, headers)

    def publish_now(
        self, subject: str, payload: bytes, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> bool:
        """Send ``payload``; return False, without effect, if that has to wait, or must fail."""
        wire, block = self._wire, _header_block(headers) if headers else b""
        if (
            wire is None
            or wire.is_paused
            or wire.transport.is_closing()
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

    async def flush(self, timeout: float = DEFAULT_FLUSH_TIMEOUT) -> None:  # noqa: ASYNC109 - the library's
        """Return once the server has done what was sent before, and what it sent meanwhile has arrived.

        The library writes its PING ahead of the lines that wait for its writer. An UNSUB may be among these:
        a drained subscription would end here while the server still sends to it. The server does all of one
        connection in order, and this request is behind the lines that wait.

        Raises:
            NatsError: the connection has ended, or the server does not answer within ``timeout`` seconds.
        """
        with suppress(NoRespondersError):
            await self.request(self._probe, b"", timeout)

    def _take(self, words: list[bytes], data: bytes) -> bool:
        kind, subject, number, *reply, _ = words
        if kind == _MESSAGE_WITH_HEADERS and words[-2].isdigit() and int(words[-2]) > MAX_HEADER_BYTES:
            self._drop(f"it has more than {MAX_HEADER_BYTES} bytes of headers")
            return True
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

    async def _process_msg(self, *message: Any) -> None:
        """Have the library process one message, which ends all its reading with what it raises."""
        try:
            await super()._process_msg(*message)
        except Exception as error:  # noqa: BLE001 - a client can have it fail, in more ways than are known here
            self._drop(f"it is not read: {type(error).__name__}")

    def _drop(self, reason: str) -> None:
        """Log it once for each reason and connection: a relay that floods others must not fill their logs."""
        if reason not in self._reported:
            self._reported.add(reason)
            self._log.warning("message of another relay dropped", reason=reason)


def _expire(answer: asyncio.Future[bytes]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())


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
            line, start = data[begin:line_end], line_end + len(_LINE_END)
            if line.startswith((_MESSAGE, _MESSAGE_WITH_HEADERS)):
                line = line.translate(_ONE_LINE)
            words = line.split()
            size = _size_behind(words)
            if (end := start + size) > len(data):
                break
            if not size or not self._take(words, data[start : end - len(_LINE_END)]):
                self._stream.data_received(line + data[line_end:end])
            begin = end
        self._unfinished = data[begin:]
        if len(self._unfinished) > MAX_UNFINISHED_BYTES:
            self.transport.abort()

    def eof_received(self) -> bool | None:
        ended: bool | None = self._stream.eof_received()
        return ended

    def connection_lost(self, exc: Exception | None) -> None:
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


CONNECT_TIMEOUT_S = 2
_FLUSH_TIMEOUT_S = 0.2
"""How long a call waits for a server that does not read: by itself the call would wait without a limit."""


class ClusterConnectError(PeerError):
    """A server cannot be used."""


async def connect(  # noqa: PLR0913 - what the library is told
    client: Client,
    server: ClusterServer,
    credentials: Credentials,
    *,
    name: str,
    inbox: str,
    closed: Callable[[], Awaitable[None]],
    failed: Callable[[Exception], Awaitable[None]],
) -> None:
    """Connect ``client`` once. It calls ``closed`` when it has ended, and ``failed`` with each error before.

    Raises:
        ClusterConnectError, NatsError, OSError: the server cannot be used.
    """
    try:
        await client.connect(
            str(server),
            name=name,
            inbox_prefix=inbox,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=CONNECT_TIMEOUT_S,
            flush_timeout=_FLUSH_TIMEOUT_S,
            # Else TLS is agreed by what the server says in the clear, where it could be left out.
            tls=credentials.tls,
            tls_handshake_first=credentials.tls is not None,
            tls_hostname=server.host if credentials.tls is not None else None,
            nkeys_seed_str=credentials.seed,
            closed_cb=closed,
            error_cb=failed,
        )
        _check_max_payload(client)
    except (EdgeError, NatsError, OSError):
        raise
    except Exception as error:
        # The library parses what a server says first without checks.
        raise ClusterConnectError(f"it is no server of NATS ({type(error).__name__})") from error


def _check_max_payload(client: Client) -> None:
    if client.max_payload < MAX_WIRE_BYTES:
        raise ClusterConnectError(f"its max_payload is below {MAX_WIRE_BYTES} bytes")


END_TIMEOUT_S = 1.0
_PROBE_TIMEOUT_S = 2


async def until_lost(client: Client, lost: asyncio.Event, subject: str, interval_s: float) -> str:
    """Return why, when the connection has ended or the server does not answer.

    It is probed by ``subject``, which no relay answers: half open, it would last for minutes.
    """
    while not lost.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await lost.wait()
            break
        try:
            # Not flush: the answer to one that was given up ends the library's reader.
            await client.request(subject, b"", _PROBE_TIMEOUT_S)
        except NoRespondersError:
            continue
        except (NatsError, TimeoutError):
            return f"the server does not answer within {_PROBE_TIMEOUT_S} s"
    return str(client.last_error or "the server has closed it")


async def ended(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    """Cancel ``tasks``, and wait for their ends, but not for long."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=END_TIMEOUT_S)


async def closed(client: Client) -> None:
    """Close ``client``: a peer that has gone acknowledges nothing, and is not waited for."""
    closing = asyncio.ensure_future(client.close())
    await asyncio.wait({closing}, timeout=END_TIMEOUT_S)
    if not closing.done():
        closing.cancel()
    elif (error := closing.exception()) is not None and not isinstance(error, NatsError | OSError):
        raise error


@asynccontextmanager
async def administering(servers: Iterable[ClusterServer], credentials: Credentials) -> AsyncIterator[Client]:
    """Hold an administrator's client of the first of ``servers`` that can be used.

    Raises:
        ClusterConnectError: none can, or it does not do what is asked of it.
    """
    reasons: list[str] = []
    reported: list[Exception] = []

    async def ignored() -> None:
        """Each request has its own error."""

    async def failed(error: Exception) -> None:
        reported.append(error)

    name, inbox = "edge-relay-administrator", "_INBOX"
    for server in servers:
        client = Client()
        reported.clear()
        try:
            await connect(client, server, credentials, name=name, inbox=inbox, closed=ignored, failed=failed)
            break
        except (EdgeError, NatsError, OSError) as error:
            # The library says of a server that it has not reached only that none is left.
            reasons.append(f"{server}: {reason_of(reported[0] if reported else error)}")
            await closed(client)
    else:
        raise ClusterConnectError("; ".join(reasons))
    try:
        yield client
    except (NatsError, TimeoutError) as error:
        raise ClusterConnectError(f"{server}: {reason_of(error)}") from None
    finally:
        await closed(client)


_MAX_REASON = 1024
_NOT_ADMITTED, _NOT_PERMITTED = "authorization violation", "permissions violation"
RELAYS_PERMISSIONS = "the permissions that `relay cluster init` writes, see docs/cluster.md"


def reason_of(error: Exception) -> str:
    """Return why ``error`` was raised where the servers were used, as printable ASCII."""
    text = printable(str(error) or type(error).__name__, _MAX_REASON)
    if isinstance(error, EdgeError):
        return text
    if isinstance(error, OSError):
        reason = connection_reason(error)
        is_untrusted = isinstance(connection_fault(error), ssl.SSLCertVerificationError)
        return f"{reason}: see --cluster-root, and the names in the certificate" if is_untrusted else reason
    if isinstance(error, ServiceUnavailableError) and not error.description:
        return "no server that is reached has JetStream: enable it in the configuration of the servers"
    if _NOT_ADMITTED in text.lower():
        return "the server does not admit what --cluster-credentials names: give it a user there"
    if _NOT_PERMITTED in text.lower():
        # Without the subject, in which each connection has a part of its own: the reason is logged once.
        return f"the server does not permit what relays of --cluster-fleet need: give it {RELAYS_PERMISSIONS}"
    return text


def reason_of_end(done: Iterable["asyncio.Future[str | None]"]) -> str:
    """Return why a connection is not used any more, by the tasks of which one has ended first."""
    for task in done:
        if isinstance(error := task.exception(), Exception):
            return reason_of(error)
        if (lost := task.result()) is not None:
            return printable(lost, _MAX_REASON)
    return "a part of this relay has ended it: see the line before"
