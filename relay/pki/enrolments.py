"""Decides who is enrolled: issues a leaf to a node that proves a join token's key and the leaf's key.

What is not in the audit is not issued. Must not decide what the CA decides: which id belongs to which key.
Must not know HTTP, or whether the node has asked this relay or another one.
"""

import asyncio
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from attrs import define, field, frozen
from structlog.typing import FilteringBoundLogger

from relay.audit.log import AuditUnavailableError
from relay.audit.refusal_counts import RefusalCounter, RefusalEvent
from relay.audit.writer import AuditWriter
from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityError, IdTakenError
from relay.routing.authority_port import AWAY_RETRY_MS
from relay.state.join_tokens import JoinGrant, JoinRefusedError, JoinTokens
from relay.state.sharer import NotShared, Sharing
from schemas.addresses import BrokerAddress
from schemas.certificates import IdentityError, IdentityReason, read_csr
from schemas.enrolment import NODE, RELAY, EnrolAnswer, EnrolRequest, EnrolResponse, is_proven, proof_of
from schemas.error_roots import PeerError, StateError
from schemas.identity import first_certificate_in, kid_of
from schemas.text import printable
from schemas.times import SystemClock

_AT_ONCE = 4
_MAX_ANSWERS = 5  # of which all but one may be lost
_MAX_WAITING = 1000
NameNode = Callable[[str, str, str, Sequence[str]], bool]
"""Names a node that enrols: node id, tenant, label, tags. Returns False if the label is not given."""
COUNTED_TIMEOUT_S = 4.0
"""How long an enrolment waits for it; one that another relay has forwarded ends there after 6 s."""
_POLL_S = 0.25


@frozen
class PkiEnvironment:
    """What a part that issues certificates of ``ca`` gets.

    Attributes:
        audit: every certificate is in it before it is handed out.
        refusals: counts what is refused, and writes that to the audit.
        now_ms: the system's time in milliseconds since the epoch.
    """

    ca: CertificateAuthority
    audit: AuditWriter
    refusals: RefusalCounter
    log: FilteringBoundLogger
    now_ms: SystemClock


class EnrolmentRefusal(StrEnum):
    """Why an enrolment is refused, for the audit."""

    TOO_LARGE = "too_large"
    SLOW = "slow"
    GONE = "gone"
    MALFORMED = "malformed"
    BUSY = "busy"
    FAILING = "failing"
    UNKNOWN_TOKEN = "unknown_token"  # noqa: S105 - a reason, and no password
    PROOF = "proof"
    NO_CA = "no_ca"
    CA_AWAY = "ca_away"
    NOT_COUNTED = "not_counted"
    USED_UP = "used_up"
    ID_TAKEN = "id_taken"
    AUDIT = "audit"


_STATUS = {
    EnrolmentRefusal.TOO_LARGE: 413,
    EnrolmentRefusal.SLOW: 408,
    EnrolmentRefusal.GONE: 400,
    EnrolmentRefusal.MALFORMED: 400,
    EnrolmentRefusal.BUSY: 429,
    EnrolmentRefusal.FAILING: 500,
    EnrolmentRefusal.NO_CA: 503,
    EnrolmentRefusal.CA_AWAY: 503,
    EnrolmentRefusal.NOT_COUNTED: 503,
    EnrolmentRefusal.AUDIT: 500,
}
"""What a client sees of a reason. Any other is 403: who is not admitted learns no more."""


class EnrolmentRefusedError(PeerError):
    """The request is refused. ``reason`` is for the audit; the client sees ``status`` alone.

    Attributes:
        retry_after_ms: when a repetition may help; None if that is not known.
    """

    def __init__(
        self, reason: EnrolmentRefusal | IdentityReason, *, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_ms = retry_after_ms

    @property
    def status(self) -> int:
        return _STATUS.get(self.reason, 403) if isinstance(self.reason, EnrolmentRefusal) else 403


class EnrolmentService(Protocol):
    """Enrols nodes: this relay's CA does, or the relay that has the key of the CA."""

    async def enrol(self, message: EnrolRequest) -> EnrolResponse:
        """Return the ``enrol.response`` to ``message``, which is an ``enrol.request``.

        Raises:
            EnrolmentRefusedError: the node is not enrolled.
        """
        ...


@frozen
class _Issued:
    node_id: str
    grant: JoinGrant
    certificate: str
    roots: str
    server_roots: str
    label_given: bool


@frozen
class EnrolmentInfo:
    """What a node learns of this relay when it enrols.

    Attributes:
        public_url: in its normal form; the node pins it.
        broker: the MQTT broker as nodes reach it; None: they announce themselves by their sessions alone.
        own_root: whether relay and broker show certificates of this relay's own CA.
    """

    public_url: str
    broker: BrokerAddress | None
    own_root: bool


class NotCountedError(PeerError):
    """The servers that all relays share do not answer."""


@define(eq=False, repr=False)
class CountedUses:
    """Has uses of join tokens counted by the stream that the relays share. ``connect`` it before it is used.

    A relay that was restored from an older backup does not know by its own file what was used since; the
    stream does, and each use in it is one node's. So a use that is not in the stream is none.
    """

    _tokens: JoinTokens
    _timeout_s: float = COUNTED_TIMEOUT_S
    _sharing: Sharing = field(init=False, factory=NotShared)

    def connect(self, sharing: Sharing) -> None:
        self._sharing = sharing

    async def count(self, join_id: str, node_id: str) -> None:
        """Return once the use is counted that ``node_id`` has spent here.

        Raises:
            JoinRefusedError: others have used the token up.
            NotCountedError: it is not counted in time; it may be later.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                while not await asyncio.to_thread(self._is_counted, join_id, node_id):
                    self._sharing.changed("join_token_use")
                    await self._sharing.written(_POLL_S)
        except TimeoutError:
            raise NotCountedError("the use of the join token is not counted: NATS does not answer") from None

    def _is_counted(self, join_id: str, node_id: str) -> bool:
        grant = self._tokens.find(join_id)
        if grant is None:
            raise JoinRefusedError("the join token has ended meanwhile")
        uses = dict(grant.counted)
        if node_id in uses.values():
            return True
        if len(uses) >= grant.uses:
            raise JoinRefusedError("others have used the join token up")
        return False


@define(eq=False, repr=False)
class Enrolments:
    """Enrols by the CA of ``environment`` and ``join_tokens``, which are of this machine.

    ``fleet`` counts uses of tokens where other relays may hold them too; None where there are none.
    """

    _environment: PkiEnvironment
    _join_tokens: JoinTokens = field(kw_only=True)
    _fleet: CountedUses | None = field(kw_only=True)
    _name_node: NameNode = field(kw_only=True)
    _info: EnrolmentInfo = field(kw_only=True)
    _ca: CertificateAuthority = field(init=False)
    _log: FilteringBoundLogger = field(init=False)
    _slots: asyncio.Semaphore = field(init=False, factory=lambda: asyncio.Semaphore(_AT_ONCE))
    _waiting: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._ca, self._log = self._environment.ca, self._environment.log

    async def enrol(self, message: EnrolRequest) -> EnrolResponse:
        return self._answer(message, await self._in_turn(message))

    async def _in_turn(self, message: EnrolRequest) -> _Issued:
        """Decide on threads: they wait for the disk and for locks that a command may hold."""
        if self._waiting >= _MAX_WAITING:
            raise EnrolmentRefusedError(EnrolmentRefusal.BUSY)
        self._waiting += 1
        try:
            async with self._slots:
                grant, node_id = await asyncio.to_thread(self._spend, message)
            # Without a slot: it waits for servers that may be away.
            if self._fleet is not None:
                await self._fleet.count(grant.id, node_id)
            async with self._slots:
                return await asyncio.to_thread(self._issue, message["csr"], node_id, grant)
        except JoinRefusedError:
            raise EnrolmentRefusedError(EnrolmentRefusal.USED_UP) from None
        except NotCountedError as error:
            self._log.warning("a node cannot be enrolled", reason=str(error))
            raise EnrolmentRefusedError(EnrolmentRefusal.NOT_COUNTED, retry_after_ms=AWAY_RETRY_MS) from None
        except (AuthorityError, StateError, OSError) as error:
            failing = (RefusalEvent.ENROLMENT_FAILING, "relay", EnrolmentRefusal.FAILING)
            if self._environment.refusals.count(*failing):
                self._log.error("a node cannot be enrolled", reason=printable(str(error)))
            raise EnrolmentRefusedError(EnrolmentRefusal.FAILING) from None
        finally:
            self._waiting -= 1

    def _spend(self, message: EnrolRequest) -> tuple[JoinGrant, str]:
        """Spend a use of the token on the node, before its leaf is issued; return both.

        After a crash in between, the same node alone can enrol with it again.
        """
        join_id = message["join_id"]
        grant = self._join_tokens.find(join_id)
        if grant is None:
            raise EnrolmentRefusedError(EnrolmentRefusal.UNKNOWN_TOKEN)
        if not is_proven(message, grant.key, NODE):
            raise EnrolmentRefusedError(EnrolmentRefusal.PROOF)
        if not self._ca.can_issue():
            raise EnrolmentRefusedError(EnrolmentRefusal.NO_CA)
        try:
            node_id, public_key = read_csr(message["csr"])
        except IdentityError as error:
            raise EnrolmentRefusedError(error.reason) from None
        self._check_free(node_id, public_key, grant)
        self._join_tokens.spend(join_id, node_id)
        return grant, node_id

    def _issue(self, csr: str, node_id: str, grant: JoinGrant) -> _Issued:
        try:
            leaf = self._ca.enrol(csr, grant.tenant, grant.id, grant.replaces)
        except IdTakenError:
            raise EnrolmentRefusedError(EnrolmentRefusal.ID_TAKEN) from None
        # The label may be another node's by now.
        has_names = bool(grant.label or grant.tags)
        given = not has_names or self._name_node(node_id, grant.tenant, grant.label, grant.tags)
        roots, server_roots = "".join(self._ca.roots()), "".join(self._ca.servers.roots())
        return _Issued(node_id, grant, leaf, roots, server_roots, given)

    def _check_free(self, node_id: str, public_key: bytes, grant: JoinGrant) -> None:
        """Refuse what the CA would refuse, before the token is spent on it."""
        records, join_id = self._ca.records(), grant.id
        if grant.replaces not in {"", node_id}:
            raise EnrolmentRefusedError(EnrolmentRefusal.ID_TAKEN)
        if records.was_issued(node_id) and not records.may_replace(node_id, join_id, grant.replaces):
            held = {(leaf.public_key, leaf.join_id) for leaf in records.unrevoked(node_id)}
            if (public_key, join_id) not in held:
                raise EnrolmentRefusedError(EnrolmentRefusal.ID_TAKEN)
            # Each is an entry that stays, and a recorded request can be replayed.
            if sum(leaf.join_id == join_id for leaf in records.unrevoked(node_id)) >= _MAX_ANSWERS:
                raise EnrolmentRefusedError(EnrolmentRefusal.USED_UP)

    def _answer(self, message: EnrolRequest, issued: _Issued) -> EnrolResponse:
        """Return the answer once it is in the audit: what is not recorded is not issued."""
        kid = kid_of(first_certificate_in(issued.certificate))
        facts = {"node_id": issued.node_id, "tenant": issued.grant.tenant, "join_id": message["join_id"]}
        try:
            self._environment.audit.write(event="enrolled", kid=kid, **facts)
        except AuditUnavailableError as error:
            self._log.error("an enrolment is not recorded", reason=printable(str(error)))
            raise EnrolmentRefusedError(EnrolmentRefusal.AUDIT) from None
        self._log.info("node enrolled", kid=kid, **facts)
        if not issued.label_given:
            self._log.warning("node enrolled without the label of its join token", **facts)
        answer = EnrolAnswer(
            certificate=issued.certificate,
            roots=issued.roots,
            relay_url=self._info.public_url,
            broker=None if self._info.broker is None else str(self._info.broker),
            own_root=self._info.own_root,
            nonce=message["nonce"],
            server_time_ms=self._environment.now_ms(),
        )
        if "server_roots" in message:
            answer["server_roots"] = issued.server_roots
        return {**answer, "proof": proof_of(answer, issued.grant.key, RELAY)}
