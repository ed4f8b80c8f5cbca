"""Applies what the operator decides while the relay runs: revocations, another root, and nodes' names.

The commands write ledgers, which are polled four times a second: that costs less than a way into this
process. They are read on a thread: with thousands of nodes that takes a while, and calls go on.
``Freshness`` counts every poll that succeeds: without them, calls are refused. Another thread counts ledgers
that have not changed, however busy the event loop is. Also ends the sessions whose leaf has expired. Must not
decide who is revoked.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from threading import Event
from typing import TypeVar

from structlog.typing import FilteringBoundLogger

from relay.auth.accepted_keys import AcceptedKeys
from relay.auth.ledger_freshness import KEYS, LEAVES, NAMES, SHARED, SOURCES, TOKENS, Freshness
from relay.auth.revoked_tokens import RevokedTokens
from relay.auth.token_keys import AcceptedKey, TokenKeys
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.fleet import Fleet
from relay.fleet.name_ledger import NameLedger, NodeName
from relay.pki.authority import CertificateAuthority
from relay.pki.join_tokens import JoinTokens
from relay.pki.records import IssuedLeaf
from relay.server.decision_records import DecisionRecords
from relay.server.descriptor_reserve import DescriptorReserve
from relay.server.follow_ups import FollowUps
from relay.sessions.node_sessions import NodeSessions
from relay.shared_ledger import Sharing
from schemas.error_roots import StateError
from schemas.health import Loop, endless
from schemas.identity import Identity, certificates_in, kid_of
from schemas.process.prestarted_pool import prestarted_pool
from schemas.session import CloseCode
from schemas.text import printable

INTERVAL_S = 0.25
"""How often the ledgers are polled."""
_THREADS = 5
"""One for each ledger, and the one that counts those that are unchanged."""
_POLL_S = 120.0
"""How long one poll may take: the ledgers of thousands of nodes, on a slow disk."""

_Content = TypeVar("_Content")
_Leaves = tuple[
    list[str], frozenset[str], frozenset[str], Mapping[str, IssuedLeaf], frozenset[str], Mapping[str, str]
]
"""The roots that are trusted; what is revoked, by kid, and by issuer and serial number; the leaves that gave
a node another tenant; the nodes all of whose leaves are revoked; and the tenant of every other."""
_Names = tuple[Mapping[str, NodeName | None], AbstractSet[str]]
"""The nodes whose names have changed, and those that are to be forgotten once they are retired."""


class TrustWatcher:
    """Watches the CA, the lists of revoked tokens and of their keys, and the nodes' names for one relay.

    ``follow_ups`` run after every change of certificates or roots; ``on_tokens`` are called with all revoked
    tokens when there is a new one; ``sharing`` is told of every change.

    Attributes:
        loop: the progress of ``run``.
        follow_ups: those that it runs.
    """

    def __init__(  # noqa: PLR0913 - the parts that it changes
        self,
        *,
        ca: CertificateAuthority,
        tokens: RevokedTokens,
        join_tokens: JoinTokens,
        keys: TokenKeys,
        accepted: AcceptedKeys,
        names: NameLedger,
        fleet: Fleet,
        sessions: NodeSessions,
        notifier: ChangeNotifier,
        records: DecisionRecords,
        follow_ups: FollowUps,
        freshness: Freshness,
        reserve: DescriptorReserve,
        sharing: Sharing,
        on_tokens: Sequence[Callable[[frozenset[str]], None]],
        log: FilteringBoundLogger,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._ca = ca
        self._tokens = tokens
        self._keys = keys
        self._accepted = accepted
        self._names = names
        self._fleet = fleet
        self._sessions = sessions
        self._notifier = notifier
        self._records = records
        self.follow_ups = follow_ups
        self._freshness = freshness
        self._reserve = reserve
        self._sharing = sharing
        self._was_fresh = True
        self._on_tokens = on_tokens
        self._log = log
        self._interval_s = interval_s
        self.loop = Loop(time.monotonic)
        # Its own threads: enrolments and renewals that wait for a ledger must not delay a revocation.
        self._threads = prestarted_pool(_THREADS, "watch")
        self._stamps: dict[str, Callable[[], object]] = {
            LEAVES: lambda: ca.stamp,
            # Join tokens are for the other relays: the one that enrols reads them itself.
            TOKENS: lambda: (tokens.stamp, join_tokens.stamp),
            KEYS: lambda: (keys.stamp, *self._roots),
            NAMES: lambda: names.stamp,
        }
        self._seen: dict[str, object] = {}
        self._read_errors: dict[str, str] = {}
        self._roots: list[str] = []
        self._kids: frozenset[str] = frozenset()
        self._revoked_as: frozenset[str] = frozenset()
        self._moved: Mapping[str, IssuedLeaf] = {}
        self._retired: frozenset[str] = frozenset()
        self._forgotten: AbstractSet[str] = frozenset()
        self._jtis: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Apply what was decided before the relay was started.

        Raises:
            StateError, OSError: it cannot be read. A relay that does not know the
                revocations must not run.
        """
        self._seen = {name: stamp_of() for name, stamp_of in self._stamps.items()}
        self._roots, self._kids, self._revoked_as, self._moved, self._retired, enrolled = self._read_leaves()
        self._fleet.absences.enrolled = enrolled
        self._seen[KEYS] = self._stamps[KEYS]()
        self._jtis = self._tokens.jtis()
        self._fleet.change_trust(self._roots, self._kids | self._revoked_as)
        for act in self._on_tokens:
            act(self._jtis)
        self._accepted.accept(self._keys.accepted())
        # Not logged: these names were given before.
        self._apply_names(self._read_names())
        for source in SOURCES:
            self._freshness.read(source)

    async def run(self) -> None:
        """Poll, and run the follow-ups, until cancelled."""
        ended = Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(endless("follow-ups", self.follow_ups.run()))
            confirming = asyncio.get_running_loop().run_in_executor(self._threads, self._confirm_until, ended)
            tasks.create_task(endless("ledgers", confirming))
            try:
                while True:
                    self.loop.busy(_POLL_S)
                    await self._sharing.written(self._interval_s)
                    await self.poll()
            finally:
                ended.set()

    def confirm_unchanged(self) -> None:
        """Count the ledgers that are as they were when they were last applied. Thread-safe.

        Of one that has changed, or cannot be looked at, only the poll that applies it counts.
        """
        if self._sharing.understands:
            self._freshness.read(SHARED)
        for name, stamp_of in self._stamps.items():
            with suppress(StateError, OSError):
                applied = self._seen.get(name)
                if self._reserve.run(stamp_of) == applied:
                    self._freshness.read(name)

    def _confirm_until(self, ended: Event) -> None:
        while not ended.wait(self._interval_s):
            self.confirm_unchanged()

    async def poll(self) -> None:
        """Apply what has been decided since the last poll."""
        await asyncio.gather(
            self._when_changed(LEAVES, self._read_leaves, self._leaves_changed),
            self._when_changed(TOKENS, self._tokens.jtis, self._tokens_changed),
            self._when_changed(KEYS, self._keys.accepted, self._keys_changed),
            self._when_changed(NAMES, self._read_names, self._names_changed),
        )
        if self._sharing.understands:
            self._freshness.read(SHARED)
        self._log_freshness()
        self._sessions.end_expired()
        self._records.write()

    async def _when_changed(
        self, name: str, read: Callable[[], _Content], act: Callable[[_Content], None]
    ) -> None:
        stamp_of, seen = self._stamps[name], self._seen.get(name)

        def read_if_changed() -> tuple[object, _Content] | None:
            # The stamp first: a change during the read is found by the next poll.
            return None if (stamp := stamp_of()) == seen else (stamp, read())

        try:
            reading = asyncio.get_running_loop().run_in_executor(
                self._threads, self._reserve.run, read_if_changed
            )
            found = await reading
            if found is not None:
                act(found[1])
                self._seen[name] = found[0]
                self._sharing.changed()
            self._freshness.read(name)
            self._read_errors.pop(name, None)
        except (StateError, OSError) as error:
            # What is in effect stays, and the next poll tries again; one line for each reason is enough.
            reason = printable(str(error))
            if reason != self._read_errors.get(name):
                self._log.error("a change cannot be read", what=name, reason=reason)
            self._read_errors[name] = reason

    def _log_freshness(self) -> None:
        is_fresh = self._freshness.is_fresh()
        if is_fresh is not self._was_fresh:
            self._was_fresh = is_fresh
            if is_fresh:
                self._log.info("the ledgers can be read again; calls are made")
            else:
                unread = {*self._read_errors, *(() if self._sharing.understands else (SHARED,))}
                self._log.error("the ledgers cannot be read; calls are refused", unread=sorted(unread))

    def _read_leaves(self) -> _Leaves:
        records = self._ca.records()
        roots, kids = self._ca.roots(), self._ca.revoked_kids()
        enrolled = {node_id: leaf.tenant for node_id, leaf in records.in_force().items()}
        return roots, kids, records.revoked_as(roots), records.moved(), records.retired(), enrolled

    def _leaves_changed(self, leaves: _Leaves) -> None:
        roots, kids, revoked_as, moved, self._retired, self._fleet.absences.enrolled = leaves
        if not self._kids <= kids:
            # A ledger that has shrunk was lost or restored: what was revoked stays so until the process ends.
            self._log.error("revoked certificates are missing from the ledger", count=len(self._kids - kids))
        revoked, gone = kids - self._kids, set(self._roots) - set(roots)
        newly_moved = [leaf for kid, leaf in moved.items() if kid not in self._moved]
        self._roots, self._kids, self._moved = roots, kids | self._kids, moved
        self._revoked_as |= revoked_as
        barred = self._kids | self._revoked_as
        self._fleet.change_trust(roots, barred)
        if revoked:
            self._end(lambda leaf: leaf.kid in barred or leaf.issued_as in barred, CloseCode.REVOKED)
            for kid in sorted(revoked):
                self._records.add("leaf_revoked", kid=kid)
        if gone:
            trusted = {kid_of(certificates_in(root)[0]) for root in roots}
            self._end(lambda leaf: leaf.root_kid not in trusted, CloseCode.AUTH_FAILED)
            self._records.add("root_withdrawn")
        for leaf in newly_moved:
            self._records.add("tenant_changed", node_id=leaf.node_id, tenant=leaf.tenant, kid=leaf.kid)
        self._retire()
        self.follow_ups.due()

    def _end(self, is_barred: Callable[[Identity], bool], code: CloseCode) -> None:
        self._fleet.drop_leaves(is_barred)
        self._sessions.end_sessions(is_barred, code)
        self._notifier.wake()

    def _tokens_changed(self, jtis: frozenset[str]) -> None:
        if not self._jtis <= jtis:
            # A list that has shrunk was lost or restored: what was revoked stays so while this process runs.
            self._log.error("revoked tokens are missing from the list", count=len(self._jtis - jtis))
        revoked, self._jtis = jtis - self._jtis, jtis | self._jtis
        for act in self._on_tokens:
            act(self._jtis)
        for jti in sorted(revoked):
            self._records.add("token_revoked", jti=jti)

    def _keys_changed(self, keys: Mapping[str, AcceptedKey]) -> None:
        for kid in sorted(self._accepted.accept(keys)):
            self._records.add("token_key_accepted", kid=kid)

    def _read_names(self) -> _Names:
        # On a thread: comparing the names of thousands of nodes takes a millisecond or more.
        names = self._names.read()
        return self._fleet.names.differences(names.by_node), names.forgotten

    def _names_changed(self, names: _Names) -> None:
        self._apply_names(names)
        for node_id, name in names[0].items():
            self._log.info("node named", node_id=node_id, tags=name.tags if name is not None else ())

    def _apply_names(self, names: _Names) -> None:
        changed, self._forgotten = names
        self._fleet.rename(changed)
        self._retire()

    def _retire(self) -> None:
        # A node that was issued another leaf since it was forgotten is not retired.
        self._fleet.retire(self._retired, self._retired & self._forgotten)
