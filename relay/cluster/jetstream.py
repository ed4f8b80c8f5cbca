"""What the relays share in JetStream: two streams, which an administrator makes, and each relay checks.

Three copies are kept, and one where there is a single server: two servers could not go on without each other.
A stream that is not as it is made here is used by no relay: it could forget what it must keep, or have the
servers copy messages to other subjects. Of two that append at an expected sequence number at once, one does.
Must not know what is kept.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace

from nats.aio.client import Client
from nats.errors import NoRespondersError
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig, StreamInfo
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from relay.cluster.server_config import bucket_of, ledger_of
from relay.cluster.signed_entries import MAX_HEAD_BYTES
from schemas.error_roots import PeerError
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

MAX_ENTRY_BYTES = 2048
"""Of one message of either stream, its headers counted."""
MAX_LEDGER_BYTES = 256 * 1024 * 1024
"""Of all entries together: a quarter of a million certificates, each with the signature of its relay."""
MAX_BUCKET_BYTES = 256 * 1024 * 1024
"""How much the servers keep, and a relay reads: a million nodes, of about 250 bytes each."""

COPIES = 3
_FREE = frozenset(
    {
        "description",
        "num_replicas",
        "placement",
        "metadata",
        "compression",
        "max_consumers",
        "consumer_limits",
        "duplicate_window",
        "first_seq",
        "persist_mode",
    }
)
"""What an administrator may choose. Everything else decides what is kept, or where it goes."""
_SHOWN = 64
MAX_READERS = 256
"""Of one stream: many times what relays have, of whom each has one."""
_MAX_NAMES_BYTES = 1024 * 1024


def ledger_stream(fleet: str) -> StreamConfig:
    """Return the stream of shared ledgers."""
    max_msg_size = MAX_ENTRY_BYTES + MAX_HEAD_BYTES
    return _stream(ledger_of(fleet), f"edge.{fleet}.ledger.>", max_msg_size, MAX_LEDGER_BYTES)


def presence_stream(fleet: str) -> StreamConfig:
    """Return the stream of the presence bucket, as the key-value store of JetStream has it."""
    bucket = bucket_of(fleet)
    config = _stream(f"KV_{bucket}", f"$KV.{bucket}.>", MAX_ENTRY_BYTES, MAX_BUCKET_BYTES)
    return replace(config, deny_delete=True)


def _stream(name: str, subjects: str, max_msg_size: int, max_bytes: int) -> StreamConfig:
    """Return a stream of which each subject keeps its last entry."""
    return StreamConfig(
        name=name,
        subjects=[subjects],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        max_msgs=-1,
        max_age=0,
        max_msgs_per_subject=1,
        # What is full refuses entries. It must not forget a revocation for them.
        discard=DiscardPolicy.NEW,
        max_msg_size=max_msg_size,
        max_bytes=max_bytes,
        allow_msg_ttl=True,
    )


class UnfitStreamError(PeerError):
    """A stream is not there, or not as an administrator makes it; the text says in what, and what to do."""


async def checked(context: JetStreamContext, wanted: StreamConfig) -> StreamInfo:
    """Return what the servers say of the stream ``wanted``.

    Raises:
        UnfitStreamError: there is none, or it is configured otherwise.
        NatsError, TimeoutError: the servers do not answer.
    """
    name = str(wanted.name)
    try:
        info = await context.stream_info(name)
    except NotFoundError:
        raise UnfitStreamError(
            f"the servers have no stream {name}: an administrator makes it by `relay cluster streams`"
        ) from None
    for each in fields(StreamConfig):
        found, expected = getattr(info.config, each.name), getattr(wanted, each.name)
        if each.name not in _FREE and found != expected and (found or expected):
            raise UnfitStreamError(
                f"the stream {name} has {each.name} {printable(str(found), _SHOWN)} in place of {expected}: "
                "find out who has changed it, and delete the stream: `relay cluster streams` makes it again"
            )
    return info


async def check_readers(client: Client, wanted: StreamConfig, fleet: str) -> None:
    """Check that the servers send what is in the stream ``wanted`` to answers' subjects alone.

    It has no result while servers are away: that they do not name all readers is no fault of a reader. The
    readers are asked for one by one, since a list of what each is configured with has no bound.

    Raises:
        UnfitStreamError: a reader has another subject, or there are more than relays have.
    """
    stream, context = str(wanted.name), client.jetstream(timeout=_ANSWER_S)
    try:
        answer = await client.request(f"$JS.API.CONSUMER.NAMES.{stream}", b"", _ANSWER_S)
        listed = loads(answer.data, max_bytes=_MAX_NAMES_BYTES)
        names: Sequence[str] = listed.get("consumers") or ()
        if listed.get("total", 0) > MAX_READERS:
            raise UnfitStreamError(
                f"the stream {stream} has more than {MAX_READERS} readers: find out who makes them"
            )
        for name in names:
            with suppress(NotFoundError):  # it has ended meanwhile
                subject = (await context.consumer_info(stream, name)).config.deliver_subject
                if subject is not None and not subject.startswith(f"edge.{fleet}.inbox."):
                    raise UnfitStreamError(
                        f"a reader of the stream {stream}, {printable(name, _SHOWN)}, has deliver_subject "
                        f"{printable(subject, _SHOWN)}: find out who has made it, and remove it"
                    )
    except (TimeoutError, ServiceUnavailableError, NoRespondersError):
        return
    except (StrictJsonError, ValueError, TypeError, AttributeError):
        raise UnfitStreamError(f"the servers do not name the readers of the stream {stream}") from None


_ANSWER_S, _RETRY_S = 2.0, 0.25
_NOT_YET = {10005, 10008, 10074}
"""Of servers that do not know each other yet: no peers, no leader, copies for which there is one server."""


async def make_streams(client: Client, fleet: str, copies: int, within_s: float) -> dict[str, str]:
    """Return what was done for each stream of ``fleet`` by ``client``, an administrator's.

    Servers that have just started are tried again for ``within_s``.

    Raises:
        UnfitStreamError: there is one that is configured otherwise.
        NatsError, TimeoutError: the servers do not make it.
    """
    context = client.jetstream(timeout=_ANSWER_S)
    give_up = asyncio.get_running_loop().time() + within_s
    done: dict[str, str] = {}
    for wanted in (ledger_stream(fleet), presence_stream(fleet)):
        while True:
            try:
                done[str(wanted.name)] = await _made(context, wanted, copies)
                break
            except (APIError, TimeoutError) as error:
                # Servers that have no leader yet do not answer.
                is_early = not isinstance(error, APIError) or error.err_code in _NOT_YET
                if not is_early or asyncio.get_running_loop().time() >= give_up:
                    raise
            await asyncio.sleep(_RETRY_S)
    return done


async def _made(context: JetStreamContext, wanted: StreamConfig, copies: int) -> str:
    try:
        info = await context.stream_info(str(wanted.name))
    except NotFoundError:
        await context.add_stream(wanted, num_replicas=copies)
        return "made"
    await checked(context, wanted)
    if (info.config.num_replicas or 1) == copies:
        return "is there"
    await context.update_stream(info.config, num_replicas=copies)
    return f"has {copies} copies now"


_WRONG_LAST_SEQUENCE = {10071, 10164}
"""The second is of servers that do not know the number yet: another entry is on its way to it."""


async def append(
    context: JetStreamContext, subject: str, data: bytes, *, expected: Mapping[str, str], kept_s: int | None
) -> int | None:
    """Append ``data``; return its sequence number, or None if the stream is not as ``expected``.

    ``kept_s`` is for how many seconds the servers keep it; None: without an end.

    Raises:
        NatsError, TimeoutError: the servers do not take it.
    """
    try:
        appended = await context.publish(subject, data, headers=dict(expected), msg_ttl=kept_s)
    except APIError as error:
        if error.err_code not in _WRONG_LAST_SEQUENCE:
            raise
        return None
    return appended.seq
