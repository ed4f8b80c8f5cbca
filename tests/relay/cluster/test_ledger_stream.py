"""Entries are appended by who knows what is there, and read by who understands them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from relay.cluster.jetstream import MAX_ENTRY_BYTES
from relay.cluster.ledger_stream import KEPT_AFTER_S, ConnectedStream, LedgerStream
from relay.state.certificates import CaRecords
from relay.state.ledger import Entry, Ledger
from relay.state.names import Names
from relay.state.sharer import Arrived, NotUnderstoodError, UnfitEntryError
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.cluster_server import NatsServer
from tests.fakes.polling import BOUND_S, until
from tests.fakes.relay_keys import unsigned
from tests.fakes.shared import shared
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID

pytestmark = pytest.mark.integration

STREAM, KID = "edge_main_ledger", "ab" * 32
LEAF = {
    "kid": KID,
    "node_id": NODE_ID,
    "tenant": "acme",
    "public_key": "cd" * 32,
    "issued_ms": NOW_MS,
    "not_after_ms": NOW_MS + 1,
}


LEAVES = shared("leaf", Ledger(Path("unused"), CaRecords()))
NAMES = shared("name", Ledger(Path("unused"), Names()))


def name(node_id: str, label: str) -> Entry:
    return {"node_id": node_id, "tenant": "acme", "label": label, "tags": []}


@asynccontextmanager
async def followed(
    nats: NatsServer, registry: SchemaRegistry
) -> AsyncIterator[tuple[ConnectedStream, JetStreamContext, list[Arrived]]]:
    """Hold the stream, with the entries that have arrived."""
    arrived = list[Arrived]()
    async with nats.connected() as client:
        made = LedgerStream("main", [LEAVES, NAMES], registry, FakeClock(NOW_MS), unsigned())
        stream = made.connected(client)
        async with stream.followed(arrived.append):
            yield stream, client.jetstream(), arrived


async def test_an_entry_is_appended_once_and_read_as_it_was(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    async with followed(nats, registry) as (stream, _, arrived):
        sequence = await stream.append(LEAVES, KID, LEAF, 0)
        assert await stream.append(LEAVES, KID, LEAF, 0) is None
        await until(lambda: len(arrived) == 1)
        read = arrived[0].read()
    assert (read.kind, read.key, read.entry, read.sequence) == ("leaf", KID, LEAF, sequence)


async def test_of_an_ordered_kind_only_who_has_read_all_of_it_appends(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    async with followed(nats, registry) as (stream, _, arrived):
        first = await stream.append(NAMES, NODE_ID, name(NODE_ID, "pump"), 0)
        assert first is not None
        # Its key gets another entry below, and a reader that is slow would be sent that alone.
        await until(lambda: len(arrived) == 1)
        # Of another kind, which changes nothing.
        await stream.append(LEAVES, KID, LEAF, 0)
        assert await stream.append(NAMES, OTHER_NODE_ID, name(OTHER_NODE_ID, "fan"), 0) is None
        second = await stream.append(NAMES, OTHER_NODE_ID, name(OTHER_NODE_ID, "fan"), first)
        assert second is not None
        third = await stream.append(NAMES, NODE_ID, name(NODE_ID, "valve"), second)
        await until(lambda: len(arrived) == 4)
        # A key keeps its last entry.
        async with followed(nats, registry) as (_, _, again):
            await until(lambda: len(again) == 3)
            assert again[-1].read().sequence == third


async def test_what_others_would_not_understand_is_not_appended(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    async with followed(nats, registry) as (stream, _, _):
        for key, entry in (("ef" * 32, LEAF), (KID, LEAF | {"more": 1})):
            with pytest.raises(UnfitEntryError):
                await stream.append(LEAVES, key, entry, 0)


async def test_what_is_not_understood_is_named_by_sequence_and_printable_subject(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    async with followed(nats, registry) as (_, context, arrived):
        for subject, data in (
            ("later.x", b"{}"),
            (f"leaf.{LEAF['kid']}", b"[" * 100),
            (f"name.{NODE_ID}", b" " * MAX_ENTRY_BYTES),
            ("leaf.\u202e", b"{}"),
            # An integer to a JSON Schema, and no time to a file.
            (f"leaf.{KID}", json.dumps(LEAF | {"issued_ms": float(NOW_MS)}).encode()),
        ):
            await context.publish(f"edge.main.ledger.{subject}", data)
        await until(lambda: len(arrived) == 5)
        texts = []
        for each in arrived:
            with pytest.raises(NotUnderstoodError) as error:
                each.read()
            texts.append(str(error.value))
    assert texts[0] == "entry 1 (edge.main.ledger.later.x) is of a kind that is not known here"
    assert texts[1].endswith("is nested too deeply")
    assert texts[4].endswith("does not fit its document")
    assert all(text.isascii() for text in texts)


async def test_an_entry_that_has_ended_is_removed_by_the_servers_and_others_stay(
    nats: NatsServer, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cluster.ledger_stream.KEPT_AFTER_S", 0)
    lasting = "ef" * 32
    async with followed(nats, registry) as (stream, context, arrived):
        await stream.append(NAMES, NODE_ID, name(NODE_ID, "pump"), 0)
        for kid, not_after_ms in ((KID, NOW_MS - 1), (lasting, NOW_MS + 1_000_000)):
            entry = LEAF | {"kid": kid, "not_after_ms": not_after_ms}
            assert await stream.append(LEAVES, kid, entry, 0) is not None
        await until(lambda: len(arrived) == 3)

        async def subjects() -> set[str]:
            info = await context.stream_info(STREAM, subjects_filter="edge.main.ledger.>")
            return set(info.state.subjects or {})

        async with asyncio.timeout(BOUND_S):
            while f"edge.main.ledger.leaf.{KID}" in await subjects():  # the server does not announce it
                pass
        assert await subjects() == {f"edge.main.ledger.name.{NODE_ID}", f"edge.main.ledger.leaf.{lasting}"}
        # Its key is free again.
        assert await stream.append(LEAVES, KID, LEAF, 0) is not None


async def test_an_entry_is_kept_longer_than_clocks_are_off_and_no_end_is_too_far(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    kept: list[int] = []

    async def note(message: Msg) -> None:
        kept.append(int((message.headers or {})["Nats-TTL"]))

    async with followed(nats, registry) as (stream, context, _):
        await context.subscribe("edge.main.ledger.>", stream=STREAM, ordered_consumer=True, cb=note)
        for number, end_ms in enumerate((NOW_MS + 5000, 0, 9007199254740991)):
            kid = f"{number:064x}"
            await stream.append(LEAVES, kid, LEAF | {"kid": kid, "not_after_ms": end_ms}, 0)
        await until(lambda: len(kept) == 3)
    assert kept == [5 + KEPT_AFTER_S, 1, 100 * 365 * 86_400]
