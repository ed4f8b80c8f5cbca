"""What the client sends and reads, over a real nats-server, and what is said of servers of no use."""
# ruff: noqa: SLF001 - that what the library does in these places is not needed

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError, NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import Header

from relay.cluster import client as direct_client
from relay.cluster.client import DirectClient, reason_of, reason_of_end, respond_now, subscribe
from relay.settings.config import ClusterConfig
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Member
from tests.fakes.cluster_server import NatsServer, UnsubscribeGate
from tests.fakes.lines import LogLines
from tests.fakes.polling import BOUND_S, until
from tests.fakes.ports import unused_port

pytestmark = pytest.mark.integration

INFO = b'INFO {"server_id":"a","version":"2.15.0","max_payload":1048576,"headers":true}\r\n'
PING, PONG = b"PING\r\n", b"PONG\r\n"


def direct(lines: LogLines | None = None) -> DirectClient:
    return DirectClient("edge.main.inbox.probe", make_logger("relay", lines or LogLines()))


@dataclass
class RawServer:
    """A server of one client, of which a test sends and reads the bytes.

    Attributes:
        read: what the client has sent since its handshake.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    client: DirectClient
    closed: asyncio.Event
    lines: LogLines
    read: bytearray = field(default_factory=bytearray)

    @classmethod
    @asynccontextmanager
    async def connected(cls) -> AsyncIterator[Self]:
        """Hold a server, and the client that is connected to it."""
        accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(INFO)
            await reader.readuntil(PING)
            writer.write(PONG)
            accepted.put_nowait((reader, writer))

        lines = LogLines()
        client, closed = direct(lines), asyncio.Event()

        async def ended() -> None:
            closed.set()

        async def ignored(_error: Exception) -> None:
            return

        listening = await asyncio.start_server(accept, "127.0.0.1")
        port = listening.sockets[0].getsockname()[1]
        await client.connect(
            f"nats://127.0.0.1:{port}",
            allow_reconnect=False,
            max_reconnect_attempts=1,
            closed_cb=ended,
            error_cb=ignored,
        )
        reader, writer = await accepted.get()
        try:
            yield cls(reader, writer, client, closed, lines)
        finally:
            await client.close()
            writer.close()
            listening.close()
            await listening.wait_closed()

    async def until_read(self, wanted: bytes) -> None:
        """Read until ``wanted`` has come."""
        async with asyncio.timeout(BOUND_S):
            while wanted not in self.read:
                self.read += await self.reader.read(65536)

    async def heard(self) -> list[Msg]:
        """Return where the messages of a direct subscription, which has the number 1, arrive."""
        messages: list[Msg] = []
        await subscribe(self.client, "edge.direct", messages.append, make_logger("relay", LogLines()))
        await self.until_read(b"SUB edge.direct  1\r\n")
        return messages

    async def heard_by_the_library(self) -> list[bytes]:
        """Return where what is in the messages of another subscription arrives, which the library reads."""
        heard: list[bytes] = []

        async def take(message: Msg) -> None:
            heard.append(message.data)

        await self.client.subscribe("edge.library", cb=take)
        return heard


@pytest.mark.parametrize(
    ("sent", "headers"),
    [
        (b"MSG edge.direct 1 edge.reply 5\r\nhello\r\n", None),
        (b"HMSG edge.direct 1 edge.reply 18 23\r\nNATS/1.0\r\nA: b\r\n\r\nhello\r\n", {"A": "b"}),
    ],
    ids=["without headers", "with headers"],
)
async def test_a_message_is_handled_although_the_library_reads_nothing(
    sent: bytes, headers: dict[str, str] | None
) -> None:
    async with RawServer.connected() as server:
        messages = await server.heard()
        reading = server.client._reading_task
        assert reading is not None
        reading.cancel()
        server.writer.write(sent)
        await until(lambda: messages)
        (message,) = messages
        assert (message.subject, message.reply, message.data) == ("edge.direct", "edge.reply", b"hello")
        assert message.headers == headers


async def test_what_is_published_is_written_although_the_library_flushes_nothing() -> None:
    async with RawServer.connected() as server:
        flushing = server.client._flusher_task
        assert flushing is not None
        await server.client.publish("edge.direct", b"hello", "edge.reply")
        assert server.client.pending_data_size == 0
        assert flushing.cancel()
        await server.until_read(b"PUB edge.direct edge.reply 5\r\nhello\r\n")


async def test_what_is_published_with_headers_is_written_at_once_too() -> None:
    async with RawServer.connected() as server:
        await server.client.publish("edge.direct", b"hello", "edge.reply", {"Name": "value"})
        assert server.client.pending_data_size == 0
        await server.until_read(
            b"HPUB edge.direct edge.reply 25 30\r\nNATS/1.0\r\nName: value\r\n\r\nhello\r\n"
        )
        assert not server.client.publish_now("edge.direct", b"hello", "", {"Name": "value\r\nOther: "})
        await server.client.publish("edge.direct", b"", "", {Header.MSG_TTL: "1"})
        await server.until_read(b"HPUB edge.direct  25 25\r\nNATS/1.0\r\nNats-TTL: 1\r\n\r\n\r\n")


async def test_a_message_is_answered_at_once_unless_there_is_nothing_to_answer_or_no_connection() -> None:
    async with RawServer.connected() as server:
        messages = await server.heard()
        server.writer.write(b"MSG edge.direct 1 edge.reply 5\r\nhello\r\nMSG edge.direct 1 5\r\nhello\r\n")
        await until(lambda: len(messages) == 2)
        asked, told = messages
        assert respond_now(asked, b"world")
        await server.until_read(b"PUB edge.reply  5\r\nworld\r\n")
        assert not respond_now(told, b"world")
        await server.client.close()
        assert not respond_now(asked, b"world")


async def test_what_is_published_before_the_library_knows_that_the_connection_has_ended_fails() -> None:
    async with RawServer.connected() as server:
        assert server.client._wire is not None
        server.client._wire.transport.abort()
        assert server.client.is_connected
        with pytest.raises(ConnectionClosedError):
            await server.client.publish("edge.test", b"x", "edge.answer")
        assert not server.client.publish_now("edge.test", b"x")


async def test_messages_arrive_in_pieces_of_any_size() -> None:
    stream = (
        b"MSG edge.direct 1 7\r\nfirst\r\n\r\n"
        b"PING\r\n"
        b"MSG edge.library 2 5\r\nother\r\n"
        b"HMSG edge.direct 1 edge.reply 30 30\r\nNATS/1.0 503 No Responders\r\n\r\n\r\n"
        b"HMSG edge.direct 1 edge.reply 29 34\r\nNATS/1.0\r\nName: a: b\r\nodd\r\n\r\nnamed\r\n"
        b"MSG edge.none 3 4\r\nnone\r\n"
        b"MSG  edge.direct\t1 edge.reply 6\r\nMSG a \r\n"
    )
    for size in (1, 2, 3, 7, 40, len(stream)):
        await arrives_in_pieces(stream, size)


async def arrives_in_pieces(stream: bytes, size: int) -> None:
    async with RawServer.connected() as server:
        messages, others = await server.heard(), await server.heard_by_the_library()
        wire = server.client._wire
        assert wire is not None
        for begin in range(0, len(stream), size):
            wire.data_received(stream[begin : begin + size])
        await until(lambda: len(messages) == 4)
        # What the server says of its own comes by way of the library, in a later turn.
        read = {message.data: message.headers for message in messages}
        assert read == {
            b"first\r\n": None,
            b"named": {"Name": "a: b"},
            b"MSG a ": None,
            b"": {"Status": "503", "Description": "No Responders"},
        }
        await until(lambda: others == [b"other"])
        await server.until_read(PONG)


async def test_a_message_with_large_headers_is_dropped_before_these_are_parsed() -> None:
    """Parsing a megabyte of them would hold everything else up for a third of a second."""
    headers = b"NATS/1.0\r\n" + b"a: b\r\n" * 1000 + b"\r\n"
    fitting = b"NATS/1.0\r\n" + b"a: b\r\n" * 10 + b"\r\n"
    async with RawServer.connected() as server:
        messages, others = await server.heard(), await server.heard_by_the_library()
        for number in (1, 2, 1, 2):
            for block, data in ((headers, b"large"), (fitting, b"small")):
                size = len(block) + len(data)
                line = f"HMSG edge.direct {number} {len(block)} {size}\r\n".encode()
                server.writer.write(line + block + data + b"\r\n")
        await until(lambda: len(messages) == len(others) == 2)
    assert {message.data for message in messages} | set(others) == {b"small"}
    (dropped,) = server.lines.entries("message of another relay dropped")
    assert dropped["reason"] == "it has more than 4096 bytes of headers"


@pytest.mark.parametrize(
    "line",
    [
        b"MSG\r\n",
        b"HMSG edge.direct 1 1\r\n",
        b"MSG edge.direct 1\r\n",
        b"MSG edge.direct x 1\r\n",
        b"MSG edge.direct 1 -9\r\n",
        b"\r\n",
    ],
)
async def test_a_malformed_line_ends_the_connection_by_the_library(line: bytes) -> None:
    async with RawServer.connected() as server:
        messages = await server.heard()
        server.writer.write(line + b"MSG edge.direct 1 1\r\n")
        await asyncio.wait_for(server.closed.wait(), BOUND_S)
        assert messages == []


async def test_a_message_that_does_not_end_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_client, "MAX_UNFINISHED_BYTES", 1000)
    async with RawServer.connected() as server:
        await server.heard()
        server.writer.write(b"MSG edge.direct 1 2000\r\n" + b"x" * 1500)
        await asyncio.wait_for(server.closed.wait(), BOUND_S)


async def test_what_a_server_does_not_read_waits_and_is_sent_in_order() -> None:
    async with RawServer.connected() as server:
        sent = 0
        async with asyncio.timeout(BOUND_S):
            while server.client.pending_data_size == 0:  # the sockets take some mebibytes
                await server.client.publish("edge.direct", b"%06d" % sent + b"x" * 60_000)
                sent += 1
        assert not server.client.publish_now("edge.direct", b"too early")
        await server.client.publish("edge.direct", b"the last")
        assert server.client.pending_data_size > 0
        await server.until_read(b"the last")
        numbers = [int(part[:6]) for part in bytes(server.read).split(b"60006\r\n")[1:]]
        assert numbers == list(range(sent))
        assert server.client.pending_data_size == 0


DRAINED = "edge.main.cmd.x"


async def test_a_drained_subscription_gets_what_is_sent_before_the_server_has_ended_it(
    nats: NatsServer,
) -> None:
    async with (
        UnsubscribeGate(nats.address).running() as gate,
        nats.connected(direct(), gate.port) as client,
        nats.connected() as other,
    ):
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        subscription = await client.subscribe(DRAINED, cb=arrived.put)
        await client.flush()
        gate.arm()
        draining = asyncio.create_task(subscription.drain())  # type: ignore[no-untyped-call]
        await gate.holds.wait()
        await other.publish(DRAINED, b"the last")
        async with asyncio.timeout(BOUND_S):
            assert (await arrived.get()).data == b"the last"
        assert not draining.done()
        gate.open()
        await draining
        with pytest.raises(NoRespondersError):
            await other.request(DRAINED, b"", BOUND_S)


async def test_a_flush_that_no_server_answers_is_given_up(nats: NatsServer) -> None:
    client = direct()
    async with UnsubscribeGate(nats.address).running() as gate, nats.connected(client, gate.port):
        subscription = await client.subscribe(DRAINED)
        await client.flush()
        gate.arm()
        await subscription.unsubscribe()
        await gate.holds.wait()
        with pytest.raises(NatsTimeoutError):
            await client.flush(0.1)


SUBJECT = "edge.main.test"


class Answerer:
    """Another client, which keeps what it is asked until the test answers."""

    def __init__(self, client: Client, lines: LogLines) -> None:
        self.client = client
        self.lines = lines
        self.asked: list[Msg] = []
        self.bugs = 0

    async def listen(self) -> None:
        await subscribe(self.client, SUBJECT, self._take, make_logger("relay", self.lines))
        # Not ``flush``: the library sends its ping before the subscription, which waits to be written.
        await self.client.publish(SUBJECT, b"")
        await until(lambda: bool(self.asked))
        self.asked.clear()

    def _take(self, message: Msg) -> None:
        if self.bugs:
            self.bugs -= 1
            raise ValueError("a bug")
        self.asked.append(message)


@pytest_asyncio.fixture
async def answerer(nats: NatsServer) -> AsyncIterator[Answerer]:
    async with nats.connected() as client:
        answerer = Answerer(client, LogLines())
        await answerer.listen()
        yield answerer


@pytest_asyncio.fixture
async def client(nats: NatsServer) -> AsyncIterator[DirectClient]:
    client = direct()
    async with nats.connected(client):
        await client.take_replies()
        yield client


async def test_answers_find_their_requests_in_any_order(client: DirectClient, answerer: Answerer) -> None:
    payloads = [b"one", b"two", b"three"]
    requests = [asyncio.create_task(client.ask(SUBJECT, payload, BOUND_S)) for payload in payloads]
    await until(lambda: len(answerer.asked) == len(payloads))
    for message in reversed(answerer.asked):
        await message.respond(b"to " + message.data)
    assert await asyncio.gather(*requests) == [b"to one", b"to two", b"to three"]


async def test_an_answer_after_the_deadline_is_no_answer_to_the_next_request(
    client: DirectClient, answerer: Answerer
) -> None:
    with pytest.raises(TimeoutError):
        await client.ask(SUBJECT, b"late", 0.02)
    await until(lambda: len(answerer.asked) == 1)
    following = asyncio.create_task(client.ask(SUBJECT, b"next", BOUND_S))
    await until(lambda: len(answerer.asked) == 2)
    for message in answerer.asked:
        await message.respond(b"to " + message.data)
    assert await following == b"to next"


async def test_two_answers_to_one_request_are_one(client: DirectClient, answerer: Answerer) -> None:
    request = asyncio.create_task(client.ask(SUBJECT, b"", BOUND_S))
    await until(lambda: len(answerer.asked) == 1)
    await answerer.asked[0].respond(b"first")
    await answerer.asked[0].respond(b"second")
    assert await request == b"first"


async def test_a_bug_loses_one_message_and_no_other(client: DirectClient, answerer: Answerer) -> None:
    answerer.bugs = 1
    lost = asyncio.create_task(client.ask(SUBJECT, b"lost", BOUND_S))
    entry = await answerer.lines.until("message of another relay not handled")
    assert "ValueError" in entry["exception"]
    following = asyncio.create_task(client.ask(SUBJECT, b"next", BOUND_S))
    await until(lambda: len(answerer.asked) == 1)
    await answerer.asked[0].respond(b"to next")
    assert await following == b"to next"
    lost.cancel()


ALONE = "not connected; only this relay's own nodes can be called: "


class WithoutJetStream(NatsServer):
    """A server that passes messages on, and keeps none."""

    def make_streams(self) -> None:
        """It has none."""

    def config_text(self) -> str:
        """Return what it is configured with."""
        text = super().config_text()
        assert "jetstream {" in text
        return re.sub(r"jetstream \{.*?\n\}\n", "", text, flags=re.DOTALL)


@pytest.fixture
def keeps_nothing(tmp_path: Path) -> Iterator[NatsServer]:
    with WithoutJetStream.running(tmp_path) as server:
        yield server


async def shown(config: ClusterConfig, state: Path, registry: SchemaRegistry, text: str) -> str:
    """Return what a relay shows of the servers, once ``text`` is in it."""
    async with Member.joined(config, state, registry) as member:
        part = member.part
        await until(lambda: text in part.health().state)
        assert not part.health().ready
        return part.health().state


async def test_a_fleet_of_which_the_credentials_are_not(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    other = replace(nats.config, fleet="north")
    states = {
        await shown(other, tmp_path / name, registry, "relays of --cluster-fleet")
        for name in ("one", "another")
    }
    (state,) = states  # nothing in it is of one connection alone, so it is logged once
    assert state.startswith(f"{ALONE}the server does not say to relays of --cluster-fleet whose user")


async def test_a_server_without_jetstream(
    keeps_nothing: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    state = await shown(keeps_nothing.config, tmp_path / "relay", registry, "JetStream")
    assert state.startswith(f"connected to {keeps_nothing.url}: ")
    assert state.endswith("JetStream: enable it in the configuration of the servers")


async def test_what_the_system_and_tls_report_is_told_in_their_words_and_without_numbers(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    (server,) = nats.config.servers
    with_tls = replace(nats.config, servers=(replace(server, tls=True),))
    state = await shown(with_tls, tmp_path / "tls", registry, "TLS")
    assert state == f"{ALONE}what answers does not speak TLS"
    away = replace(nats.config, servers=(replace(server, port=unused_port()),))
    state = await shown(away, tmp_path / "away", registry, "refused")
    assert state == f"{ALONE}Connection refused"


async def test_what_was_sent_is_shown_escaped_and_cut() -> None:
    async def lost() -> str | None:
        return "\x1b" * 2000

    ended = asyncio.ensure_future(lost())
    await ended
    for reason in (reason_of(ValueError("\x1b" * 2000)), reason_of_end([ended])):
        assert reason.isprintable()
        assert len(reason) == 1024
    assert reason_of(TimeoutError()) == "no answer in time"
    assert reason_of(ValueError()) == "ValueError"
