"""What takes effect in a running relay when a file of the operator's decisions changes.

One function or class for each file that is watched and applied. Must not decide who is revoked, and must not
read a key or a token.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import NamedTuple

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditUnavailableError
from relay.audit.writer import AuditWriter
from relay.auth.agent_tokens import AcceptedKeys
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.fleet import Fleet
from relay.observability.ascii_json import members_of
from relay.pki.authority import CertificateAuthority
from relay.sessions.node_sessions import NodeSessions
from relay.state.certificates import IssuedLeaf
from relay.state.grants import Grant, Grants
from relay.state.names import NameLedger
from relay.state.people import People, PeopleLedger
from relay.state.seal import FleetSeal
from relay.state.tokens import AcceptedKey, RevokedTokens, TokenKeys
from relay.state.watcher import Applied, Record
from schemas.error_roots import StateError
from schemas.health import Loop
from schemas.identity import Identity, first_certificate_in, kid_of
from schemas.labels import NodeName
from schemas.pacing import Backoff
from schemas.session import CloseCode
from schemas.text import printable


class Leaves(NamedTuple):
    """What the CA has decided.

    Attributes:
        roots: those that are trusted.
        kids: of the leaves that are revoked.
        revoked_as: what is revoked, by issuer and serial number.
        moved: the leaves that gave a node another tenant, by kid.
        retired: the nodes all of whose leaves are revoked.
        enrolled_tenant: returns the tenant of any other node; None of one that is retired or has no leaf.
    """

    roots: list[str]
    kids: frozenset[str]
    revoked_as: frozenset[str]
    moved: Mapping[str, IssuedLeaf]
    retired: frozenset[str]
    enrolled_tenant: Callable[[str], str | None]


@define(eq=False, repr=False, kw_only=True)
class LeafDecisions:
    """Ends nodes that are revoked, retired or moved, and those of a root that is withdrawn.

    ``retire`` is called with the nodes that are retired; ``due`` after every change.
    """

    _ca: CertificateAuthority
    _fleet: Fleet
    _sessions: NodeSessions
    _notifier: ChangeNotifier
    _retire: Callable[[frozenset[str]], None]
    _due: Callable[[], None]
    _record: Record
    _log: FilteringBoundLogger
    _roots: list[str] = field(init=False, factory=list)
    _kids: frozenset[str] = field(init=False, default=frozenset())
    _revoked_as: frozenset[str] = field(init=False, default=frozenset())
    _moved: Mapping[str, IssuedLeaf] = field(init=False, factory=dict)

    def applied(self) -> Applied[Leaves]:
        """Return what applies the CA's ledger; it changes too when a root is made or expires."""
        return Applied(self._read, self._begin, self._apply, lambda: self._ca.stamp)

    def _read(self) -> Leaves:
        records = self._ca.records()
        roots = self._ca.roots()
        return Leaves(
            roots=roots,
            kids=frozenset(records.revoked),
            revoked_as=records.revoked_as(roots),
            moved=records.moved_leaves(),
            retired=records.retired_nodes(),
            enrolled_tenant=records.enrolled_tenant,
        )

    def _begin(self, leaves: Leaves) -> None:
        self._take(leaves)
        self._retire(leaves.retired)

    def _apply(self, leaves: Leaves) -> None:
        if not self._kids <= leaves.kids:
            # A ledger that has shrunk was lost or restored: what was revoked stays so until the process ends.
            missing = len(self._kids - leaves.kids)
            self._log.error("revoked certificates are missing from the ledger", count=missing)
        revoked, gone = leaves.kids - self._kids, set(self._roots) - set(leaves.roots)
        newly_moved = [leaf for kid, leaf in leaves.moved.items() if kid not in self._moved]
        barred = self._take(leaves)
        if revoked:
            self._end(lambda leaf: leaf.kid in barred or leaf.issued_as in barred, CloseCode.REVOKED)
            for kid in sorted(revoked):
                self._record("leaf_revoked", kid=kid)
        if gone:
            trusted = {kid_of(first_certificate_in(root)) for root in leaves.roots}
            self._end(lambda leaf: leaf.root_kid not in trusted, CloseCode.AUTH_FAILED)
            self._record("root_withdrawn")
        for leaf in newly_moved:
            self._record("tenant_changed", node_id=leaf.node_id, tenant=leaf.tenant, kid=leaf.kid)
        self._retire(leaves.retired)
        self._due()

    def _take(self, leaves: Leaves) -> frozenset[str]:
        """Trust by ``leaves`` from now on; return all that is barred."""
        self._roots, self._moved = leaves.roots, leaves.moved
        self._kids |= leaves.kids
        self._revoked_as |= leaves.revoked_as
        barred = self._kids | self._revoked_as
        self._fleet.usability.enrolled_tenant = leaves.enrolled_tenant
        self._fleet.change_trust(leaves.roots, barred)
        return barred

    def _end(self, is_barred: Callable[[Identity], bool], code: CloseCode) -> None:
        self._fleet.drop_leaves(is_barred)
        self._sessions.end_sessions(is_barred, code)
        self._notifier.wake()


class NameChanges(NamedTuple):
    """What the ledger of names says.

    Attributes:
        names: of the nodes whose names differ from those in effect; None is no name.
        forgotten: the nodes that are to be forgotten once they are retired.
    """

    names: Mapping[str, NodeName | None]
    forgotten: AbstractSet[str]


@define(eq=False, repr=False)
class NameDecisions:
    """Names nodes as the operator does, and forgets those that are retired.

    ``renamed`` is called after names have changed: by them tokens are for nodes, and what is open may end.
    """

    _names: NameLedger
    _fleet: Fleet
    _renamed: Callable[[], None]
    _log: FilteringBoundLogger
    _forgotten: AbstractSet[str] = field(init=False, default=frozenset())
    _retired: frozenset[str] = field(init=False, default=frozenset())

    def applied(self) -> Applied[NameChanges]:
        return Applied(self._read, self._begin, self._apply)

    def _read(self) -> NameChanges:
        """Return what has changed: comparing the names of thousands of nodes takes a millisecond or more."""
        names = self._names.read()
        return NameChanges(self._fleet.names.differences(names.with_proven()), names.forgotten)

    def _begin(self, changes: NameChanges) -> None:
        self._forgotten = changes.forgotten
        self._fleet.rename(changes.names)
        if changes.names:
            self._renamed()
        self.retire(self._retired)

    def _apply(self, changes: NameChanges) -> None:
        self._begin(changes)
        for node_id, name in changes.names.items():
            self._log.info("node named", node_id=node_id, tags=name.tags if name is not None else ())

    def retire(self, retired: frozenset[str]) -> None:
        """List the nodes that are ``retired`` no longer, and forget those that are to be forgotten."""
        self._retired = retired
        # A node that was issued another leaf since it was forgotten is not retired.
        self._fleet.retire(retired, retired & self._forgotten)


def token_decisions(
    tokens: RevokedTokens,
    revoke: Sequence[Callable[[frozenset[str]], None]],
    record: Record,
    log: FilteringBoundLogger,
) -> Applied[frozenset[str]]:
    """Return what ends agents' tokens: ``revoke`` are called with the ``jti`` of all that are revoked."""
    known: set[str] = set()

    def begin(jtis: frozenset[str]) -> None:
        known.update(jtis)
        for act in revoke:
            act(frozenset(known))

    def apply(jtis: frozenset[str]) -> None:
        if not known <= jtis:
            # A list that has shrunk was lost or restored: what was revoked stays so while this process runs.
            log.error("revoked tokens are missing from the list", count=len(known - jtis))
        revoked = jtis - known
        begin(jtis)
        for jti in sorted(revoked):
            record("token_revoked", jti=jti)

    return Applied(tokens.jtis, begin, apply)


def token_key_decisions(
    keys: TokenKeys, accepted: AcceptedKeys, roots: Callable[[], Sequence[str]], record: Record
) -> Applied[Mapping[str, AcceptedKey]]:
    """Return what accepts keys of tokens; ``roots`` returns the trusted: another may endorse other keys."""

    def apply(endorsed: Mapping[str, AcceptedKey]) -> None:
        for kid in sorted(accepted.accept(endorsed)):
            record("token_key_accepted", kid=kid)

    return Applied(keys.accepted, accepted.accept, apply, lambda: tuple(roots()))


def person_decisions(
    people: PeopleLedger, begin: Callable[[People], object], due: Callable[[], None], record: Record
) -> Applied[People]:
    """Return what serves people, by ``begin``, and records who was revoked; ``due`` is called after it."""
    known: set[str] = set()

    def start(state: People) -> None:
        known.update(state.revoked)
        begin(state)

    def apply(state: People) -> None:
        for one in sorted(state.revoked.keys() - known):
            # Another relay's revocation may be here before the person is.
            name = state.by_id[one].name if one in state.by_id else one
            record("person_revoked", sub=name)
        start(state)
        due()

    return Applied(people.read, start, apply)


def seal_decisions(seal: FleetSeal, apply: Callable[[], None]) -> Applied[bool]:
    """Return what seals what this relay says to the others: once, whatever the file says later."""

    def take(sealed: bool) -> None:  # noqa: FBT001 - what was read
        if sealed:
            apply()

    return Applied(seal.is_sealed, take, take)


def key_endorsement(keys: TokenKeys, log: FilteringBoundLogger) -> "Follow":
    """Return what writes to ``keys`` what a new root says of them, where its key is here."""

    async def follow() -> bool:
        try:
            await asyncio.to_thread(keys.endorse_again)
        except (StateError, OSError) as error:
            log.error(  # noqa: TRY400 - the reason says all
                "no root endorses the keys of tokens", reason=printable(str(error))
            )
            return False
        return True

    return follow


def grant_endings(
    people: PeopleLedger, grants: Grants, audit: AuditWriter, log: FilteringBoundLogger
) -> "Follow":
    """Return what ends all that people have given to clients who were revoked, on whichever machine."""

    def end() -> Sequence[Grant]:
        revoked = people.read().revoked
        return grants.end(lambda grant: grant.person in revoked)

    async def follow() -> bool:
        try:
            ended = await asyncio.to_thread(end)
        except (StateError, OSError) as error:
            log.error(  # noqa: TRY400 - the reason says all
                "grants of revoked people not ended", reason=printable(str(error))
            )
            return False
        for grant in ended:
            facts = {"event": "grant_ended", "sub": grant.sub, "tenant": grant.tenant, "grant": grant.id}
            try:
                await audit.record(members_of(facts))
            except AuditUnavailableError as error:
                log.error("not recorded", reason=str(error), what=facts)  # noqa: TRY400 - as above
        return True

    return follow


MAX_UNRECORDED = 10_000


@define(eq=False, repr=False)
class DecisionRecords:
    """Writes decisions to ``audit`` and ``log``: in order, and again after an error."""

    _audit: AuditWriter
    _log: FilteringBoundLogger
    _unrecorded: deque[dict[str, str]] = field(factory=deque, init=False)
    _unwritten: dict[str, str] | None = field(default=None, init=False)

    def add(self, event: str, **facts: str) -> None:
        self._log.warning(event, **facts)
        if len(self._unrecorded) >= MAX_UNRECORDED:
            self._log.error("not recorded", reason="too many are pending", what={"event": event, **facts})
            return
        self._unrecorded.append({"event": event, **facts})

    def write(self) -> None:
        """Write what is kept to the audit; after an error the rest waits for the next time."""
        while self._unrecorded:
            try:
                self._audit.write(**self._unrecorded[0])
            except AuditUnavailableError as error:
                if self._unwritten is not self._unrecorded[0]:
                    self._unwritten = self._unrecorded[0]
                    self._log.error("not recorded", reason=str(error), what=self._unwritten)
                return
            self._unrecorded.popleft()


RETRY_S = 2.0
LONGEST_RETRY_S = 60.0
_ROUND_S = 300.0
"""How long they may take together: the access lists of ten thousand nodes, on a slow disk."""

Follow = Callable[[], Awaitable[bool]]
"""Applies the current state; returns whether it succeeded. Raises nothing."""


class FollowUps:
    """Runs ``follows`` after each change of certificates or roots; all are pending at the start.

    They read and sign much, and a disk may be full: nothing waits for them, and they are retried.
    ``on_bug`` is called with what one of them raises: that must not end the relay, and is retried.

    Attributes:
        loop: the progress of ``run``.
    """

    def __init__(
        self,
        follows: Sequence[Follow] = (),
        retry_s: float = RETRY_S,
        on_bug: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._follows = follows
        self._retry_s = retry_s
        self._on_bug = on_bug
        self._pending = list(follows)
        self._changed = asyncio.Event()
        self.loop = Loop()

    def due(self) -> None:
        self._pending = list(self._follows)
        self._changed.set()

    async def run(self) -> None:
        """Run them until cancelled: now, after each change, and with backoff while one fails."""
        backoff = Backoff(self._retry_s, LONGEST_RETRY_S)
        while True:
            self._changed.clear()
            self.loop.busy(_ROUND_S)
            retry_s = None if await self.follow() else backoff.next_s()
            if retry_s is None:
                self.loop.waits()
            else:
                self.loop.busy(retry_s + _ROUND_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(retry_s):
                    await self._changed.wait()
                backoff.reset()

    async def follow(self) -> bool:
        """Run those that are pending; return whether none is any more."""
        pending, self._pending = self._pending, []
        failed = [follow for follow in pending if not await self._done(follow)]
        # A change in the meantime has made all of them pending again.
        self._pending = self._pending or failed
        return not self._pending

    async def _done(self, follow: Follow) -> bool:
        try:
            return await follow()
        except Exception as error:  # noqa: BLE001 - see on_bug
            self._on_bug(error)
            return False
