"""Targets: what is read of neighbours: by the relay of others and of the broker, by a bridge of its relay."""

import asyncio
from collections.abc import AsyncIterator
from functools import cache, partial
from typing import Any, Final

import httpx2
from nats.js.kv import KeyValue

from relay.client.stdio_bridge.http_client import LostError, RelayResponse
from relay.cluster.messages import (
    FRAME,
    AskedCommand,
    AuthorityMessages,
    ClusterMessageError,
    ClusterMessages,
    PeerMessages,
)
from relay.cluster.presence import LEASE_INTERVAL_S, Effects, Presence
from relay.cluster.presence_bucket import PresenceBucket
from relay.fleet.mqtt_feed import MqttFeed
from relay.routing.authority_port import AuthorityAction, AuthorityRefusedError
from relay.routing.port import Command, Idempotency
from schemas.addresses import parse_broker
from schemas.errors import ToolError
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.strict_json import loads
from tests.fakes.hostile_texts import is_clean
from tests.fakes.hub import Hub
from tests.fakes.lines import LogLines
from tests.fakes.relay_keys import unsigned
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID, NOW_MS
from tests.fuzz import samples
from tests.fuzz.live import check_log, kept
from tests.fuzz.scratch import directory
from tests.fuzz.target import REFUSED, Target, finished, text_of, tried

_RELAY: Final = "01HZX9K3M4P7Q8R9S0T1V2W3XA"
_LIMIT: Final = 1 << 20
_LEASES: Final = 16
"""So many renewals of its own lease later, the leases of all others have ended."""


@cache
def _peer_messages() -> PeerMessages:
    return PeerMessages(SchemaRegistry(), _RELAY)


@cache
def _authority_messages() -> AuthorityMessages:
    return AuthorityMessages(SchemaRegistry())


@cache
def _messages() -> ClusterMessages:
    return ClusterMessages(SchemaRegistry())


def cluster_message(data: bytes) -> None:
    """A message of another relay is read as it is written, or refused; only known failures are told."""
    messages = _messages()
    asked = tried(lambda: messages.read_command(data), ClusterMessageError)
    if asked is not REFUSED:
        again = messages.read_command(messages.command(asked))
        assert again == asked
    cancelled = tried(lambda: messages.read_cancel(data), ClusterMessageError)
    if cancelled is not REFUSED:
        assert is_clean(cancelled)
    answer = tried(lambda: messages.read_answer(data), ClusterMessageError, ToolError)
    if answer is not REFUSED:
        assert messages.read_answer(messages.ack(answer)) == answer
    _peer_message(data)
    _authority_message(data)


def _peer_message(data: bytes) -> None:
    messages = _peer_messages()
    for kind in (FRAME, None):
        asked = tried(partial(messages.read_ask, data, kind), ClusterMessageError)
        if asked is not REFUSED:
            assert messages.read_ask(messages.ask(asked.ask_id, asked.body), kind).body == asked.body
    reply = tried(lambda: messages.read_reply(data), ClusterMessageError, ToolError)
    if reply is not REFUSED:
        assert messages.read_reply(messages.reply(reply)) == reply


def _authority_message(data: bytes) -> None:
    messages = _authority_messages()
    asked = tried(lambda: messages.read_request(data), ClusterMessageError)
    if asked is not REFUSED:
        assert messages.read_request(messages.request(asked)) == asked
    for action in AuthorityAction:
        answer = tried(
            partial(messages.read_answer, data, action), ClusterMessageError, AuthorityRefusedError
        )
        if answer is not REFUSED:
            assert messages.read_answer(messages.answer(action, answer), action) == answer


def presence_entry(data: bytes) -> None:
    """Whatever the bucket holds, no session of this relay ends by it, and what it shows ends with a lease."""
    shown: dict[str, bool] = {}
    released: list[str] = []

    def show(node_id: str, connected: bool) -> bool:  # noqa: FBT001 - as presence calls it
        shown[node_id] = connected
        return True

    lines, seconds = LogLines(), Seconds()
    presence = Presence(
        _RELAY, Effects(lambda node, _relay: released.append(node), show, _ignore, _ignore), seconds
    )
    bucket = PresenceBucket(
        presence,
        fleet="f",
        relay=_RELAY,
        url="https://relay.example",
        registry=_registry(),
        count=lambda _kind, _outcome: None,
        signed=unsigned(),
        log=make_logger("relay", lines),
    )
    for number, entry in enumerate(data.split(b"\n")[:8], 1):
        key, _, value = entry.partition(b" ")
        # As the library gives it: of a bucket that has been read from its beginning.
        bucket._take(KeyValue.Entry("b", text_of(key), value, number, None, None, None))  # noqa: SLF001
    assert not released
    for _ in range(_LEASES):
        seconds.now += LEASE_INTERVAL_S
        presence.relay_seen(_RELAY)
    assert not any(shown.values())
    check_log(lines)


def _ignore(_node_id: str, _is_unknown: bool = False) -> None:  # noqa: FBT001, FBT002 - as presence calls it
    """Do nothing."""


@cache
def _registry() -> SchemaRegistry:
    return SchemaRegistry()


class BrokerStage:
    """A relay's subscription, to which messages are given as its connection gives them."""

    def __init__(self) -> None:
        self._hub = Hub(directory() / "broker", _registry(), ca=samples.CA, monotonic=kept().loop.time)
        self._hub.announce(samples.NODE)
        self._feed = MqttFeed(
            broker=parse_broker("mqtt://127.0.0.1:1883"),
            client_id="relay",
            fleet=self._hub.fleet,
            registry=self._hub.registry,
            metrics=self._hub.metrics,
            refusals=self._hub.refusals,
            log=self._hub.log,
            monotonic=kept().loop.time,
        )

    async def play(self, topic: str, payload: bytes) -> None:
        """Take one message of the broker."""
        await self._feed._take_batch([(topic, payload)])  # noqa: SLF001 - as its connection does
        await asyncio.sleep(1)
        check_log(self._hub.lines)
        assert self._hub.counted("messages_dropped_total", reason="internal") == 0


@cache
def _broker_stage() -> BrokerStage:
    return BrokerStage()


def broker_message(data: bytes) -> None:
    """A message that the broker retains is taken or dropped, and never ends the subscription."""
    topic, _, payload = data.partition(b"\n")
    kept().run(_broker_stage().play(topic.decode("utf-8", "replace"), payload))


def bridge_answer(data: bytes) -> None:
    """What a relay answers to a bridge is handed on as messages of one line each, or is none."""
    head, _, body = data.partition(b"\n")
    for content_type in ("application/json", "text/event-stream"):
        headers = {"content-type": content_type, "mcp-session-id": head.decode("latin-1", "replace")}
        status, asked = 400 if head[:1] == b"4" else 200, httpx2.Request("POST", "http://127.0.0.1/mcp")
        try:
            read, refused = (
                RelayResponse(httpx2.Response(status, headers=headers, content=_chunks(body), request=asked))
                for _ in range(2)
            )
        except (ValueError, UnicodeError):
            return
        assert tried(partial(finished, _read(read)), LostError) is None
        is_message, reason = finished(refused.read_refusal())
        assert is_message in {True, False}
        assert is_clean(reason)


async def _read(answer: RelayResponse) -> None:
    async for line, value in answer.messages():
        assert b"\n" not in line
        assert b"\r" not in line
        assert loads(line, max_bytes=_LIMIT) == value


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    middle = len(body) // 2
    yield body[:middle]
    yield body[middle:]


def _command(**others: Any) -> bytes:
    command = Command(
        NODE_ID, f"sysecho.{NODE_ID}.echo.invoke", {"message": "ping"}, 2000, "0" * 26, cost=1.0, **others
    )
    return _messages().command(AskedCommand(command, _RELAY, NOW_MS))


_KEYED: Final = Idempotency(("https://a.example", "acme", "agent-1"), "cd" * 32, "ab" * 32, repeatable=True)
_ENTRY: Final = samples.compact({"relay": "0" * 26, "session_id": "1" * 26, "connected": True})
_NODE: Final = f"node.{NODE_ID} ".encode()
_TOPIC: Final = f"$devices/{NODE_ID}/".encode()
TARGETS: Final = {
    "cluster_message": Target(
        cluster_message,
        (
            _command(),
            _command(idempotency=_KEYED, traceparent=samples.TRACES[0].decode()),
            _messages().cancel(_RELAY, "0" * 26),
            _messages().ack({"ok": True, "result": {"message": "ping"}}),
            samples.compact({"failure": {"name": "RATE_LIMITED", "retry_after_ms": 5}}),
            _peer_messages().ask("0" * 26, {"type": "telemetry", "node_id": NODE_ID}),
            _authority_messages().refusal(AuthorityRefusedError("busy", 5)),
        ),
    ),
    "presence_entry": Target(
        presence_entry,
        (
            b'relay.%b {"url":"https://other.example"}\n' % (b"0" * 26) + _NODE + _ENTRY,
            _NODE + _ENTRY + b"\n" + _NODE + _ENTRY.replace(b"true", b"false"),
        ),
        by_lines=True,
    ),
    "broker_message": Target(
        broker_message,
        (
            _TOPIC + b"announce\n" + samples.MANIFEST,
            _TOPIC + b"announce\n",
            _TOPIC + b"identity\n" + samples.LEAVES[0],
            _TOPIC + b"heartbeat\n" + samples.compact(samples.HEARTBEAT),
        ),
    ),
    "bridge_answer": Target(
        bridge_answer, (*(b"2\n" + sample for sample in (*samples.BODIES, *samples.EVENTS)), b"4\n{}")
    ),
}
