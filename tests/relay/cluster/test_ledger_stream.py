"""Entries are appended by who knows what is there, and read by who understands them."""

from collections.abc import AsyncIterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from relay.cluster.ledger_stream import MAX_ENTRY_BYTES, LedgerStream, NotUnderstoodError, UnfitEntryError
from relay.ledger import Entry
from schemas.registry import SchemaRegistry
from tests.fakes.cluster_server import NatsServer
from tests.fakes.polling import until
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID

pytestmark = pytest.mark.integration

KID = "ab" * 32
LEAF = {
    "kid": KID,
    "node_id": NODE_ID,
    "tenant": "acme",
    "public_key": "cd" * 32,
    "issued_ms": 1,
    "not_after_ms": 2,
}


class Entries:
    """A ledger of no file."""

    def __init__(self, kind: str, member: str, *, ordered: bool) -> None:
        self.kind, self.ordered = kind, ordered
        self._member = member

    def key_of(self, entry: Entry) -> str:
        return str(entry[self._member])

    def settle(self, _arrived: Mapping[str, Entry], _known: AbstractSet[str]) -> Mapping[str, Entry]:
        return {}


LEAVES, NAMES = Entries("leaf", "kid", ordered=False), Entries("name", "node_id", ordered=True)


def name(node_id: str, label: str) -> Entry:
    return {"node_id": node_id, "tenant": "acme", "label": label, "tags": []}


@asynccontextmanager
async def followed(
    nats: NatsServer, registry: SchemaRegistry
) -> AsyncIterator[tuple[LedgerStream, JetStreamContext, list[Msg]]]:
    """Hold the stream, with the messages that have arrived."""
    client, arrived = Client(), list[Msg]()

    async def arrive(message: Msg) -> None:
        arrived.append(message)

    seed = nats.credentials.read_text()
    await client.connect(nats.url, nkeys_seed_str=seed, inbox_prefix="edge.main.inbox")
    stream, context = LedgerStream("main", [LEAVES, NAMES], registry), client.jetstream()
    await stream.follow(context, arrive)
    yield stream, context, arrived
    await client.close()


async def test_an_entry_is_appended_once_and_read_as_it_was(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    async with followed(nats, registry) as (stream, context, arrived):
        sequence = await stream.append(context, LEAVES, KID, LEAF, 0)
        assert await stream.append(context, LEAVES, KID, LEAF, 0) is None
        await until(lambda: len(arrived) == 1)
        read = stream.read(arrived[0])
    assert (read.ledger, read.key, read.entry, read.sequence) == (LEAVES, KID, LEAF, sequence)


async def test_of_an_ordered_kind_only_who_has_read_all_of_it_appends(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    async with followed(nats, registry) as (stream, context, arrived):
        first = await stream.append(context, NAMES, NODE_ID, name(NODE_ID, "pump"), 0)
        assert first is not None
        # Its key gets another entry below, and a reader that is slow would be sent that alone.
        await until(lambda: len(arrived) == 1)
        # Of another kind, which changes nothing.
        await stream.append(context, LEAVES, KID, LEAF, 0)
        assert await stream.append(context, NAMES, OTHER_NODE_ID, name(OTHER_NODE_ID, "fan"), 0) is None
        second = await stream.append(context, NAMES, OTHER_NODE_ID, name(OTHER_NODE_ID, "fan"), first)
        assert second is not None
        third = await stream.append(context, NAMES, NODE_ID, name(NODE_ID, "valve"), second)
        await until(lambda: len(arrived) == 4)
        # A key keeps its last entry.
        async with followed(nats, registry) as (_, _, again):
            await until(lambda: len(again) == 3)
            assert stream.read(again[-1]).sequence == third


async def test_what_others_would_not_understand_is_not_appended(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    async with followed(nats, registry) as (stream, context, _):
        for key, entry in (("ef" * 32, LEAF), (KID, LEAF | {"more": 1})):
            with pytest.raises(UnfitEntryError):
                await stream.append(context, LEAVES, key, entry, 0)


async def test_what_is_not_understood_is_named_by_sequence_and_printable_subject(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    async with followed(nats, registry) as (stream, context, arrived):
        for subject, data in (
            ("later.x", b"{}"),
            (f"leaf.{LEAF['kid']}", b"[" * 100),
            (f"name.{NODE_ID}", b" " * MAX_ENTRY_BYTES),
            ("leaf.\u202e", b"{}"),
        ):
            await context.publish(f"edge.main.ledger.{subject}", data)
        await until(lambda: len(arrived) == 4)
        texts = []
        for message in arrived:
            with pytest.raises(NotUnderstoodError) as error:
                stream.read(message)
            texts.append(str(error.value))
    assert texts[0] == "entry 1 (edge.main.ledger.later.x) is of a kind that is not known here"
    assert texts[1].endswith("is nested too deeply")
    assert all(text.isascii() for text in texts)
