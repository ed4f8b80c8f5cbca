"""Puts into effect what the operator decides while the relay runs: revocations, and another root.

The commands write ledgers; a look at them, four times a second, costs less than anything that would have to
reach this process. Also ends the sessions whose leaf has run out. Must not decide who is revoked.
"""

import asyncio
from collections.abc import Callable, Sequence

from structlog.typing import FilteringBoundLogger

from relay.audit import AuditLog, AuditUnavailableError
from relay.ca import AuthorityError, CertificateAuthority
from relay.fleet import Fleet
from relay.ledger import LedgerError
from relay.notifier import Notifier
from relay.revoked_tokens import RevokedTokens
from relay.sessions import NodeSessions
from schemas.certificates import IdentityError, verify_leaf
from schemas.identity import Identity
from schemas.session import CloseCode
from schemas.text import printable

INTERVAL_S = 0.25


class TrustWatch:
    """Watches the CA and the list of revoked tokens for one relay.

    ``on_leaves`` is called after every change of who holds a leaf, ``on_tokens`` with all revoked tokens when
    there is another.
    """

    def __init__(  # noqa: PLR0913 - what it moves
        self,
        *,
        ca: CertificateAuthority,
        tokens: RevokedTokens,
        fleet: Fleet,
        sessions: NodeSessions,
        notifier: Notifier,
        audit: AuditLog,
        on_leaves: Sequence[Callable[[], None]],
        on_tokens: Sequence[Callable[[frozenset[str]], None]],
        now_ms: Callable[[], int],
        log: FilteringBoundLogger,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._ca = ca
        self._tokens = tokens
        self._fleet = fleet
        self._sessions = sessions
        self._notifier = notifier
        self._audit = audit
        self._on_leaves = on_leaves
        self._on_tokens = on_tokens
        self._now_ms = now_ms
        self._log = log
        self._interval_s = interval_s
        self._seen: dict[str, object] = {}
        self._unread: dict[str, str] = {}
        self._roots: list[str] = []
        self._kids: frozenset[str] = frozenset()
        self._jtis: frozenset[str] = frozenset()

    def begin(self) -> None:
        """Put into effect what was decided before the relay was started.

        Raises:
            AuthorityError, LedgerError, OSError: it cannot be read. A relay that does not know who is revoked
                must not run.
        """
        self._seen = {"leaves": self._ca.stamp, "tokens": self._tokens.stamp}
        self._roots, self._kids = self._ca.roots(), self._ca.revoked_kids()
        self._jtis = self._tokens.jtis()
        self._fleet.believe(self._roots, self._kids)
        for act in self._on_tokens:
            act(self._jtis)
        for refresh in self._on_leaves:
            refresh()

    async def run(self) -> None:
        """Look again and again until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            self.look()

    def look(self) -> None:
        """Put into effect what has been decided since the last look."""
        self._when_changed("leaves", lambda: self._ca.stamp, self._leaves_changed)
        self._when_changed("tokens", lambda: self._tokens.stamp, self._tokens_changed)
        now = self._now_ms()
        self._sessions.shut_out(lambda leaf: not leaf.valid_at(now), CloseCode.AUTH_FAILED)

    def _when_changed(self, name: str, look: Callable[[], object], act: Callable[[], None]) -> None:
        try:
            if (stamp := look()) != self._seen.get(name):
                act()
                self._seen[name] = stamp
            self._unread.pop(name, None)
        except (AuthorityError, LedgerError, OSError) as error:
            # What is in effect stays, and the next look tries again; one line a reason is enough.
            reason = printable(str(error))
            if reason != self._unread.get(name):
                self._log.error("a change cannot be read", what=name, reason=reason)
            self._unread[name] = reason

    def _leaves_changed(self) -> None:
        roots, kids = self._ca.roots(), self._ca.revoked_kids()
        revoked, gone = kids - self._kids, set(self._roots) - set(roots)
        self._roots, self._kids = roots, kids
        self._fleet.believe(roots, kids)
        if revoked:
            self._end(lambda leaf: leaf.kid in kids, CloseCode.REVOKED)
            for kid in sorted(revoked):
                self._record("leaf_revoked", kid=kid)
        if gone:
            self._end(self._is_orphan, CloseCode.AUTH_FAILED)
            self._record("root_withdrawn")
        for refresh in self._on_leaves:
            refresh()

    def _end(self, is_barred: Callable[[Identity], bool], code: CloseCode) -> None:
        self._fleet.bar(is_barred)
        self._sessions.shut_out(is_barred, code)
        self._notifier.wake()

    def _is_orphan(self, leaf: Identity) -> bool:
        try:
            verify_leaf(leaf.pem, self._roots, self._now_ms())
        except IdentityError:
            return True
        return False

    def _tokens_changed(self) -> None:
        jtis = self._tokens.jtis()
        revoked, self._jtis = jtis - self._jtis, jtis
        for act in self._on_tokens:
            act(jtis)
        for jti in sorted(revoked):
            self._record("token_revoked", jti=jti)

    def _record(self, event: str, **facts: str) -> None:
        self._log.warning(event, **facts)
        try:
            self._audit.write(event=event, **facts)
        except AuditUnavailableError as error:
            self._log.error("not recorded", what=event, reason=str(error), **facts)
