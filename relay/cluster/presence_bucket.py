"""Reads and writes the presence bucket: key-value in JetStream, an entry for each node and each relay.

An entry of a node is written when a session begins or ends, and one lease for each relay every few seconds.
That its own lease comes back shows a relay that it reads what is written. If it does not, the server may be
cut off from most of its cluster: ``Quorum`` leaves it once another server is not. Must not decide anything
by what it reads: ``presence`` does.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

from attrs import define, field
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import Header
from nats.js.kv import KV_OP, KV_PURGE, KeyValue
from structlog.typing import FilteringBoundLogger

from relay.cluster.client import reason_of
from relay.cluster.connection import ConnectionWork
from relay.cluster.jetstream import append, check_readers, checked, presence_stream
from relay.cluster.presence import ENDED_KEPT_S, LEASE_INTERVAL_S, NodeEntry, Presence
from relay.cluster.server_config import bucket_of
from relay.cluster.signed_entries import NotSignedError, SignedDocuments
from relay.observability.ascii_json import encoded
from relay.routing.port import NodeRef
from schemas.error_roots import PeerError
from schemas.payloads import OpenFinding
from schemas.projection import is_node_id
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

_NODE, _RELAY, _FINDINGS = "node", "relay", "findings"
_REFS = {_NODE: "cluster.node@1.0.0", _RELAY: "cluster.relay@1.0.0", _FINDINGS: "cluster.findings@1.0.0"}
LEASE_KEPT_S = 60
"""How long the servers keep a lease that is not renewed, and the sign that one was given up."""
_MAX_BYTES = 4096
_MAX_FINDINGS = 10
"""Of one node, the worst first: an entry that the servers refuse as too large would hold up all others."""
_CHECK_STREAM_S = 15.0
_TIMEOUT_S = 2.0
_RETRY_S = 1.0


_RELAY_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")

Count = Callable[[str, str], None]
"""Counts an entry by its kind and by what became of it."""


class _NotReadError(PeerError):
    """What is written does not come back: the servers have lost the reader."""


class PresenceBucket:
    """The bucket of ``fleet``, for the relay ``relay``, whose public URL is ``url``.

    Attributes:
        stream: the stream that JetStream keeps it in.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        presence: Presence,
        *,
        fleet: str,
        relay: str,
        url: str,
        registry: SchemaRegistry,
        count: Count,
        signed: SignedDocuments,
        log: FilteringBoundLogger,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._presence = presence
        self._fleet = fleet
        self._name = bucket_of(fleet)
        self._wanted = presence_stream(fleet)
        self.stream = str(self._wanted.name)
        self._relay = relay
        self._lease_subject = self._subject(f"{_RELAY}.{relay}")
        self._lease = encoded({"url": url}).encode("ascii")
        self._documents = {kind: registry.load(ref) for kind, ref in _REFS.items()}
        self._count = count
        self._signed = signed
        self._log = log
        self._sleep = sleep
        self._wake = asyncio.Event()
        self._reported: str | None = None
        self._has_dropped = False
        self._read_to = 0
        self._purges = 0
        self._made: str | None = None
        self._leases_read_to = 0
        # Of the nodes of this relay: the entries of what they have reported, and which are to be written.
        self._findings: dict[str, bytes] = {}
        self._findings_due: set[str] = set()
        self._nothing_open: dict[str, bytes] = {}

    def connection_changed(self, node: NodeRef, connected: bool) -> None:  # noqa: FBT001 - a ConnectionHandler
        self._presence.connection_changed(node, connected)
        if not connected and node.node_id in self._findings:
            self.found(node, ())
        self._wake.set()

    def found(self, node: NodeRef, findings: Sequence[OpenFinding]) -> None:
        """Show the other relays what a node of this one has reported to be wrong with it."""
        shown = findings[:_MAX_FINDINGS]
        entry = encoded({"session_id": node.session_id, "findings": shown}).encode("ascii")
        kept, other = (
            (self._findings, self._nothing_open) if findings else (self._nothing_open, self._findings)
        )
        kept[node.node_id] = entry
        other.pop(node.node_id, None)
        self._findings_due.add(node.node_id)
        self._wake.set()

    async def serve(self, client: Client) -> None:
        """Keep the bucket and presence equal, by ``client``, until cancelled."""
        context = client.jetstream(timeout=_TIMEOUT_S)
        while client.is_connected:
            try:
                await self._follow(client, context)
            except* (NatsError, PeerError, TimeoutError) as errors:
                self._report(reason_of(errors.exceptions[0]))
            await self._sleep(_RETRY_S)

    async def leave(self, client: Client) -> None:
        """Give up the lease, so that the others know at once that this relay ends."""
        with suppress(NatsError, TimeoutError):
            # Not the library's ``purge``, which wants a right besides: to have all that was before removed.
            await client.jetstream(timeout=_TIMEOUT_S).publish(
                self._lease_subject, headers={KV_OP: KV_PURGE}, msg_ttl=LEASE_KEPT_S
            )

    async def keep_lists(self) -> None:
        """Take the nodes of others off the lists when the bucket cannot be read for long, until cancelled."""
        while True:
            await self._sleep(LEASE_INTERVAL_S)
            self._presence.forget_unread()

    def _report(self, reason: str) -> None:
        """Log why the bucket cannot be used: once, until it can, or the reason is another."""
        if reason != self._reported:
            self._reported = reason
            self._log.warning("presence not available", reason=reason)

    async def _follow(self, client: Client, context: JetStreamContext) -> None:
        # After a purge it is as one that was made anew.
        self._begin(f"{(await checked(context, self._wanted)).created} {self._purges}")
        bucket = await context.key_value(self._name)
        first = await self._put_lease(context)
        async with asyncio.TaskGroup() as tasks:
            # Also while no reader can be made: for that the servers need a leader of their cluster, and for
            # a write one of the bucket. Those that elect the former may have the latter.
            tasks.create_task(self._renew(context))
            tasks.create_task(self._keep_checking(client, context))
            async with self._watcher(bucket) as watcher:
                tasks.create_task(self._read(watcher))
                tasks.create_task(self._write(context))
                await self._check_reading(first)

    @asynccontextmanager
    async def _watcher(self, bucket: KeyValue) -> AsyncIterator[KeyValue.KeyWatcher]:
        """Hold what reads all entries and then each that is written."""
        watcher = await bucket.watchall()
        if self._reported is not None:
            self._reported = None
            self._log.info("presence available")
        try:
            yield watcher
        finally:
            with suppress(NatsError, TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await watcher.stop()  # type: ignore[no-untyped-call]  # the library's own omission

    def _begin(self, made: str) -> None:
        self._presence.begin(made)
        self._read_to, self._has_dropped = 0, False
        if made != self._made:
            self._made, self._leases_read_to = made, 0
            self._findings_due |= self._findings.keys()

    async def _read(self, watcher: KeyValue.KeyWatcher) -> None:
        async for entry in watcher:
            if entry is not None:
                self._take(entry)
                self._read_to = entry.revision or 0
            if self._presence.to_write:
                self._wake.set()
        raise _NotReadError("the reader has ended")

    def _take(self, entry: KeyValue.Entry) -> None:
        kind, _, name = entry.key.partition(".")
        is_of_node = kind in {_NODE, _FINDINGS}
        if not (is_node_id(name) if is_of_node else kind == _RELAY and _RELAY_ID.fullmatch(name)):
            self._drop(entry)
            return
        value, revision = self._value(kind, entry), entry.revision or 0
        if kind == _RELAY:
            if value is None and entry.operation is not None:
                self._presence.relay_gone(name)
            elif value is None:
                return  # what cannot be read ends no lease: it ends by itself
            elif revision > self._leases_read_to:
                # One that was read before is of a relay that may have ended since.
                self._leases_read_to = revision
                self._presence.relay_seen(name)
        elif kind == _FINDINGS:
            reported = value or {"session_id": "", "findings": []}
            self._presence.findings_seen(name, reported["session_id"], reported["findings"])
        else:
            seen = None
            if value is not None:
                seen = NodeEntry(value["relay"], value["session_id"], value["connected"], revision)
            self._presence.node_seen(name, seen, revision)

    def _value(self, kind: str, entry: KeyValue.Entry) -> dict[str, Any] | None:
        """Return what ``entry`` holds; None if it was removed, or is not one that this relay reads."""
        if entry.operation is not None or entry.value is None:
            return None
        document = self._documents[kind]
        try:
            signed = self._signed.read(self._subject(entry.key), entry.value)
            value: dict[str, Any] = loads(signed.document, max_bytes=_MAX_BYTES)
        except (NotSignedError, StrictJsonError):
            value = {}
        if not document.is_valid(value):
            self._drop(entry)
            return None
        return value

    def _drop(self, entry: KeyValue.Entry) -> None:
        self._count("presence", "not_understood")
        if not self._has_dropped:  # once for each reading: who writes without end must not fill the log
            self._has_dropped = True
            self._log.warning("presence not read", first=printable(entry.key, 64))

    async def _renew(self, context: JetStreamContext) -> None:
        while True:
            await self._sleep(LEASE_INTERVAL_S)
            await self._put_lease(context)

    async def _keep_checking(self, client: Client, context: JetStreamContext) -> None:
        """Check that the bucket is as it was made and filled, and where the servers send what is in it.

        Each relay may add a reader, and an administrator may purge it.
        """
        gone: set[tuple[str, int]] = set()
        while True:
            await check_readers(client, self._wanted, self._fleet)
            await self._sleep(_CHECK_STREAM_S)
            info = await checked(context, self._wanted)
            before, gone = gone, self._presence.gone_before(info.state.first_seq)
            if before & gone:
                self._purges += 1
                raise _NotReadError("entries were removed from it: all is written again")

    async def _check_reading(self, first: int) -> NoReturn:
        """See that leases come back that this relay writes; all is read once that of revision ``first`` has.

        Raises:
            _NotReadError: they do not.
        """
        is_all_read = False
        while True:
            await self._sleep(LEASE_INTERVAL_S)
            # The library's own sign that all was read may come before it was.
            if not is_all_read and self._read_to >= first:
                is_all_read = True
                self._presence.all_read()
                self._wake.set()
            if not self._presence.is_current:
                raise _NotReadError("what is written does not come back")

    async def _put_lease(self, context: JetStreamContext) -> int:
        """Write the lease with a time to live, which the library's ``put`` lacks; return its revision."""
        lease = self._signed.written(self._lease_subject, self._lease)
        return (await context.publish(self._lease_subject, lease, msg_ttl=LEASE_KEPT_S)).seq

    def _subject(self, key: str) -> str:
        return f"$KV.{self._name}.{key}"

    async def _write(self, context: JetStreamContext) -> None:
        while True:
            for due, write in (
                (self._presence.to_write, self._write_one),
                (self._findings_due, self._write_findings),
            ):
                while due:
                    node_id = due.pop()
                    try:
                        await write(context, node_id)
                    except BaseException:
                        due.add(node_id)
                        raise
            self._wake.clear()
            await self._wake.wait()

    async def _write_findings(self, context: JetStreamContext, node_id: str) -> None:
        """Write what a node has reported last; the servers drop what says nothing."""
        subject = self._subject(f"{_FINDINGS}.{node_id}")
        if (entry := self._findings.get(node_id)) is not None:
            await context.publish(subject, self._signed.written(subject, entry))
        elif (entry := self._nothing_open.get(node_id)) is not None:
            await context.publish(subject, self._signed.written(subject, entry), msg_ttl=LEASE_KEPT_S)
            if self._nothing_open.get(node_id) is entry:
                del self._nothing_open[node_id]

    async def _write_one(self, context: JetStreamContext, node_id: str) -> None:
        if (wanted := self._presence.entry_to_write(node_id)) is None:
            return
        entry, replaces = wanted
        shown = {"relay": entry.relay, "session_id": entry.session_id, "connected": entry.connected}
        subject = self._subject(f"{_NODE}.{node_id}")
        revision = await append(
            context,
            subject,
            self._signed.written(subject, encoded(shown).encode("ascii")),
            expected={Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(replaces)},
            kept_s=None if entry.connected else ENDED_KEPT_S,
        )
        if revision is None:
            self._presence.write_conflicted(node_id, replaces)
        else:
            self._presence.written(node_id, replace(entry, revision=revision))


CHECK_INTERVAL_S = 2.5
FIRST_PATIENCE_S, LONGEST_PATIENCE_S = 5.0, 60.0
"""How long presence may be not current before other servers are tried. It doubles with each try."""
_REASON = "it has no leader of the presence bucket: it may be cut off from the other servers"

Move = Callable[[ConnectionWork, str], Awaitable[bool]]
"""Has the next connection made to another server that passes a check, for a reason; False if none does."""


@define(eq=False, repr=False)
class Quorum:
    """Watches whether ``presence`` is read at the server; its bucket is kept in ``stream``."""

    _presence: Presence
    _move: Move
    _stream: str = field(kw_only=True)
    _sleep: Callable[[float], Awaitable[None]] = field(kw_only=True, default=asyncio.sleep)
    _patience_s: float = field(init=False, default=FIRST_PATIENCE_S)

    async def serve(self, _client: Client) -> None:
        """Return, which ends the connection, once another server is to be used instead."""
        unread_s = 0.0
        while True:
            await self._sleep(CHECK_INTERVAL_S)
            if self._presence.is_current:
                unread_s, self._patience_s = 0.0, FIRST_PATIENCE_S
                continue
            unread_s += CHECK_INTERVAL_S
            if unread_s < self._patience_s:
                continue
            unread_s, self._patience_s = 0.0, min(2 * self._patience_s, LONGEST_PATIENCE_S)
            if await self._move(self._has_leader, _REASON):
                return

    async def _has_leader(self, client: Client) -> None:
        """Return if the leader of the stream answers at the server of ``client``.

        Raises:
            NatsError, TimeoutError: it does not, or there is no such stream.
        """
        await client.jetstream(timeout=_TIMEOUT_S).stream_info(self._stream)
