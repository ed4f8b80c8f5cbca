"""The certificate authority: the roots of nodes and of servers, and the ledger of what it issues.

The ledger binds each node id to its tenant and key. An id that was issued is issued again only on the
operator's command, which revokes its old leaves, or to the same key: no request can take over a node that
exists or ever did. Must not hold a root's key in memory longer than an issue takes.

The root of servers is P-256 and trusted for servers alone, by its own extension and by every verifier of
nodes. Its files are those of ``roots`` with the prefix ``server-``, and

| file | mode | holds |
|---|---|---|
| `server-cross.pem` | 0644 | the server root as certified by the root of nodes; see ``create`` |
| `server-endorsements` | 0600 or 0640 | where the CA's key is not: their endorsements by roots of nodes |
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.x509.oid import NameOID
from nacl.signing import SigningKey

from relay.pki.errors import (
    AuthorityOptionError,
    AuthorityStateError,
    CertificateRefusedError,
    IdTakenError,
    MalformedNameError,
    UnknownTargetError,
)
from relay.pki.issuing import Issuing, Signer, make_crl, read_request
from relay.pki.roots import (
    ED25519,
    P256,
    RootFiles,
    end_of_overlap,
    make_server_key,
    read_server_key,
    server_key_to_pem,
)
from relay.settings.config import DEFAULT_TENANT
from relay.state.certificates import CaRecords, IssuedLeaf, IssuedServer, revocations, rotation
from relay.state.key_files import KeyFileError, load_or_create_key, read_key
from relay.state.ledger import Ledger, LedgerError
from schemas.certificates import endorse, endorse_seal, endorse_servers, endorse_token_key, is_relay_name
from schemas.error_roots import StateError
from schemas.files import PRIVATE, make_private_directory, read_state, write_atomic
from schemas.identity import CertificateFormatError, certificates_in, to_pem
from schemas.identity_files import IdentityFiles
from schemas.text import quoted
from schemas.times import SystemClock
from schemas.ulids import new_node_id

_SEED_BYTES = 32
# More than answers that were lost on the way can explain; each is an entry that stays.
_MAX_LEAVES = 32
_ENDORSEMENT = re.compile(r"[A-Za-z0-9_-]{86}")
_MAX_ENDORSEMENTS = 4
ENDORSEMENTS = "server-endorsements"
"""The file, on a relay without the CA's key, with what roots of nodes have signed of the roots of servers."""
# Longer than the relay's own: an operator has to issue it again, and what a broker's key gives its thief is
# small: nodes and relay believe nothing that a broker says.
_SERVER_DAYS = 397
READER = re.compile(r"edge-reader-[a-z0-9-]{1,32}")
"""Names of the broker's readers, see ``issue_reader_files``."""
_READER_URI = "urn:edge-kubelet:reader"


class CaLedger(Ledger[CaRecords]):
    """The ledger of the CA in ``directory``. ``check_root`` raises where there is no root.

    Everything raises AuthorityStateError if the CA is missing, or a file of it is damaged. Locking waits for
    others: call it on a thread, not on the event loop.
    """

    def __init__(self, directory: Path, check_root: Callable[[], object]) -> None:
        super().__init__(directory / "ledger.jsonl", CaRecords())
        self._check_root = check_root

    def made(self) -> AbstractContextManager[CaRecords]:
        return super().locked()

    def read(self) -> CaRecords:
        self._check_there()
        try:
            return super().read()
        except LedgerError as error:
            raise AuthorityStateError(str(error)) from None

    @contextmanager
    def locked(self) -> Iterator[CaRecords]:
        """Lock it: two issues at once must not both find an id free."""
        self._check_there()
        try:
            with super().locked() as records:
                yield records
        except LedgerError as error:
            raise AuthorityStateError(str(error)) from None

    def _check_there(self) -> None:
        self._check_root()
        if not self.path.exists():
            # A new, empty one would hold no revocation.
            raise AuthorityStateError(f"{self.path} is missing: restore it from a backup")


class EndorsedRoots(NamedTuple):
    """The roots of servers that are trusted now, in PEM, and their endorsement by each root of nodes."""

    pem: str
    endorsements: list[str]


class ServerAuthority:
    """The roots of servers in ``directory``, beside those of nodes, whose ledger and lock they share."""

    def __init__(
        self,
        directory: Path,
        issuing: Issuing,
        ledger: CaLedger,
        now_ms: SystemClock,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._roots = RootFiles(directory, P256, "server-")
        self._cross = directory / "server-cross.pem"
        self._issuing = issuing
        self._ledger = ledger
        self._now_ms = now_ms
        self._random_bytes = random_bytes
        self.root_file = self._roots.certificate

    @property
    def files(self) -> list[Path]:
        return [*([self._cross] if self._cross.exists() else []), *self._roots.files]

    def exist(self) -> bool:
        """Return whether there is a root of servers; a CA of an older version has none."""
        return self.root_file.exists()

    def create(self, known: Signer[SigningKey]) -> None:
        """Make the root of servers. The caller holds the lock.

        ``known``: the root of nodes that every node trusts. Servers show a certificate of the new root by it
        too: a node of an older version, or that was not told of the new root yet, must be able to verify the
        relay. Both roots have one name, without which that certificate would not be valid.

        Raises:
            AuthorityOptionError: there is one already.
            AuthorityStateError: the clock is wrong, or a key that was left behind is damaged.
        """
        key = self._roots.unused_key() or make_server_key(self._random_bytes)
        root = self._issuing.server_root(key, _name_of(known.pem))
        write_atomic(self._cross, self._issuing.cross(known, root.pem))
        self._roots.create(root.pem, key)

    def roots(self) -> list[str]:
        """Return every root of servers that is trusted now, in PEM: the newest, then the one before it.

        Raises:
            AuthorityStateError: there is none, or a file of it is damaged.
        """
        if not self.exist():
            raise AuthorityStateError(
                f"{self._roots.directory} holds no root of servers: run `relay ca init`"
            )
        return self._roots.trusted(self._now_ms())

    def kept_endorsements(self) -> list[str]:
        """Return the endorsements that the relay with the CA's key has made; none if there is no such file.

        Nodes verify them: one of other roots is worth nothing, and does no harm.

        Raises:
            OSError: the file cannot be used.
        """
        try:
            text = read_state(self._roots.directory / ENDORSEMENTS).decode("ascii", "replace")
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines() if _ENDORSEMENT.fullmatch(line)][:_MAX_ENDORSEMENTS]

    def issue(
        self,
        name: str,
        hosts: Sequence[str],
        public_key: EllipticCurvePublicKey,
        valid_days: int,
        relay: str | None = None,
    ) -> str:
        """Return what a server shows that is reached under ``hosts``, in PEM: its certificate comes first.

        ``relay`` is the name of another relay that it is for. Of the roots that are trusted the oldest issues
        it, for that is the one that every node knows.

        Raises:
            AuthorityOptionError: name or hosts are not of their form.
            AuthorityStateError: there is no root of servers, or its key is not here.
        """
        with self._ledger.locked():
            server, pem = self._issuing.server(
                self._signer(self.roots()[-1]), name, hosts, public_key, valid_days
            )
            self._ledger.append(replace(server, relay=relay).entry())
        return pem + self._cross_pem()

    def _cross_pem(self) -> str:
        """Return the certificate, by a root of nodes, of the root that issues; empty if it needs none."""
        try:
            cross = to_pem(certificates_in(read_state(self._cross).decode("utf-8", "replace"))[:1])
        except FileNotFoundError:
            return ""
        except CertificateFormatError:
            raise AuthorityStateError(f"{self._cross} is damaged: it holds no certificate") from None
        return cross if _public_key(cross) == _public_key(self.roots()[-1]) else ""

    def rotate(self, overlap_days: int = 90) -> int:
        """Make a new root of servers; return until when, in ms, the one before it is trusted and issues.

        Raises:
            AuthorityOptionError: the overlap is out of bounds, or the last rotation is still under way.
            AuthorityStateError: there is no root of servers, or its key is not here.
        """
        until_ms = end_of_overlap(self._now_ms(), overlap_days)
        with self._ledger.locked():
            now, roots = self._now_ms(), self.roots()
            if len(roots) > 1:
                raise AuthorityOptionError(
                    "the root of servers before this one is still trusted: rotate when its time is up"
                )
            old = self._signer(roots[0])
            new = self._issuing.server_root(make_server_key(self._random_bytes))
            self._ledger.append({**rotation(new.kid, old.kid, until_ms, now), "of": "servers"})
            self._roots.rotate(new.pem, new.key, until_ms)
        return until_ms

    def _signer(self, root_pem: str) -> Signer[EllipticCurvePrivateKey]:
        return Signer(root_pem, self._roots.key_of(root_pem))


class CertificateAuthority:
    """The CA in ``directory``. Time and randomness come in from outside.

    Issuing and revoking wait for the ledger's lock and for the disk: call them on a thread, not on the event
    loop. Everything raises AuthorityStateError if the CA is missing or a file of it is damaged.

    Attributes:
        ledger: what was issued and revoked.
    """

    def __init__(self, directory: Path, now_ms: SystemClock, random_bytes: Callable[[int], bytes]) -> None:
        self._roots = RootFiles(directory, ED25519)
        self.ledger = CaLedger(directory, self.root_pem)
        self._issuing = Issuing(now_ms, random_bytes)
        self.servers = ServerAuthority(directory, self._issuing, self.ledger, now_ms, random_bytes)
        self._now_ms = now_ms
        self._random_bytes = random_bytes
        self.root_file = self._roots.certificate

    # --- roots ------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Make the root of nodes and the root of servers.

        Raises:
            AuthorityOptionError: there are some already, which are never overwritten.
            AuthorityStateError: the clock is wrong.
        """
        make_private_directory(self._roots.directory, shown=True)
        with self.ledger.made():
            root = self._issuing.root()
            self._roots.create(root.pem, root.key)
            self.servers.create(root)

    def add_server_root(self) -> bool:
        """Make the root of servers if this CA is of a version that had none; return whether it was.

        Raises:
            AuthorityStateError: the key of the root of nodes is not here.
        """
        if self.servers.exist():
            return False
        with self.ledger.locked():
            if self.servers.exist():
                return False
            # The oldest is the one that every node trusts.
            self.servers.create(self._signer(self.roots()[-1]))
        return True

    def root_pem(self) -> str:
        return self._roots.current()

    def roots(self) -> list[str]:
        """Return every root that is trusted now, in PEM: the one that issues, then the one before it."""
        return self._roots.trusted(self._now_ms())

    def endorsement(self) -> str | None:
        """Return the endorsement of the current root by the one before it; None if there was none."""
        return self._roots.endorsement()

    def server_roots(self) -> EndorsedRoots:
        """Return the roots of servers, endorsed by each trusted root of nodes; without the keys, as kept."""
        pem = "".join(self.servers.roots())
        made = self._endorsed(lambda key: endorse_servers(key, pem))
        return EndorsedRoots(pem, [*made.values()] or self.servers.kept_endorsements())

    def endorse_token_key(self, statement: bytes) -> Mapping[str, str]:
        """Return the endorsement of ``statement`` by each trusted root whose key is here, by its kid."""
        return self._endorsed(lambda key: endorse_token_key(key, statement))

    def endorse_seal(self, statement: bytes) -> Mapping[str, str]:
        """Return the same for the decision that relays seal what they say."""
        return self._endorsed(lambda key: endorse_seal(key, statement))

    def _endorsed(self, sign: Callable[[SigningKey], str]) -> Mapping[str, str]:
        made = {}
        for root in self.roots():
            with suppress(AuthorityStateError):
                signer = self._signer(root)
                made[signer.kid] = sign(signer.key)
        return made

    def can_issue(self) -> bool:
        """Return whether the root's key is here: it may be kept elsewhere."""
        try:
            self._signer()
        except (StateError, OSError):
            return False
        return True

    def rotate_root(self, overlap_days: int = 90) -> int:
        """Make a new root that issues from now on; return until when, in ms, the old one is trusted too.

        Raises:
            AuthorityOptionError: the overlap is out of bounds, or the last rotation is still under way.
            AuthorityStateError: the old root's key is not here.
        """
        until_ms = end_of_overlap(self._now_ms(), overlap_days)
        with self.ledger.locked():
            now = self._now_ms()
            if len(self._roots.trusted(now)) > 1:
                raise AuthorityOptionError(
                    "the root before this one is still trusted: rotate when its time is up"
                )
            old, new = self._signer(), self._issuing.root()
            self.ledger.append(rotation(new.kid, old.kid, until_ms, now))
            self._roots.rotate(new.pem, new.key, until_ms, endorse(old.key, new.pem))
        return until_ms

    # --- leaves -----------------------------------------------------------------------------------------

    def issue(self, csr_pem: str, tenant: str | None = None, *, replace: bool = False) -> str:
        """Return a leaf for the node that the request names, in PEM.

        Without ``tenant``, a node that is replaced keeps its own; a new one is in the default one.

        Raises:
            CertificateRefusedError: the request proves nothing.
            AuthorityOptionError: the node id is taken and ``replace`` is not given.
        """
        node_id, public_key = read_request(csr_pem)
        with self.ledger.locked() as records:
            held = records.unrevoked(node_id)
            if records.was_issued(node_id) and not replace:
                todo = (
                    "has a certificate: say --replace to revoke it" if held else "was revoked: say --replace"
                )
                raise AuthorityOptionError(f"{node_id} {todo} and issue another")
            if tenant is None:
                tenant = records.tenant_of(node_id) or DEFAULT_TENANT
            leaf, pem = self._issuing.leaf(self._signer(), node_id, tenant, public_key)
            self.ledger.append(*revocations(held, "replaced", self._now_ms()), leaf.entry())
        return pem

    def enrol(self, csr_pem: str, tenant: str, join_id: str, replaces: str = "") -> str:
        """Return a leaf for a node that never was one, or that lost the answer to the same enrolment.

        The node ``replaces`` may be one that was: its leaves are revoked, and its key may be another.

        Raises:
            IdTakenError: the id was issued before; only the operator gives it away again.
            CertificateRefusedError: the request proves nothing.
        """
        node_id, public_key = read_request(csr_pem)
        with self.ledger.locked() as records:
            gone: list[IssuedLeaf] = []
            if records.may_replace(node_id, join_id, replaces):
                gone = records.unrevoked(node_id)
            elif records.was_issued(node_id):
                held = _in_use(records, node_id, self._now_ms())
                if (held.public_key, held.tenant, held.join_id) != (public_key, tenant, join_id):
                    raise IdTakenError(f"{node_id} has a certificate")
            leaf, pem = self._issuing.leaf(self._signer(), node_id, tenant, public_key, join_id)
            self.ledger.append(*revocations(gone, "replaced", self._now_ms()), leaf.entry())
        return pem

    def renew(self, csr_pem: str, node_id: str) -> str:
        """Return another leaf for ``node_id`` with the key that it has; the old one stays valid.

        Raises:
            CertificateRefusedError: none is in force, or the request is not for this node and this key.
        """
        asked_id, public_key = read_request(csr_pem)
        with self.ledger.locked() as records:
            held = _in_use(records, node_id, self._now_ms())
            if (asked_id, public_key) != (node_id, held.public_key):
                raise CertificateRefusedError(f"the request is not for {node_id} with the key that it has")
            leaf, pem = self._issuing.leaf(self._signer(), node_id, held.tenant, public_key)
            self.ledger.append(leaf.entry())
        return pem

    def issue_mock(
        self,
        count: int,
        out: Path,
        tenant: str,
        in_directory: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[str]:
        """Make ``count`` whole identities below ``out`` for ``kubelet fleet``; return their node ids.

        ``in_directory`` is held while they are written: ``out`` may be of another user than the CA.
        """
        made = []
        with self.ledger.locked():
            signer, servers = self._signer(), "".join(self.servers.roots())
            for _ in range(count):
                key = SigningKey(self._random_bytes(_SEED_BYTES))
                node_id = new_node_id(self._now_ms(), self._random_bytes)
                made.append((key, *self._issuing.leaf(signer, node_id, tenant, bytes(key.verify_key))))
            self.ledger.append(*(leaf.entry() for _, leaf, _ in made))
        with in_directory():
            for key, leaf, pem in made:
                IdentityFiles(out / leaf.node_id).write_mock(leaf.node_id, key, pem, signer.pem, servers)
        return [leaf.node_id for _, leaf, _ in made]

    def issue_client(
        self, name: str, uri: str, public_key: bytes, valid_days: int, relay: str | None = None
    ) -> str:
        """Return the certificate of a client of the broker that is no node, or of a relay, in PEM.

        ``relay`` is the name of another relay that it is for. Of the roots that are trusted the oldest issues
        it, for that is the one that every broker knows.

        Raises:
            AuthorityOptionError: name or key are not of their form.
        """
        with self.ledger.locked():
            signer = self._signer(self.roots()[-1])
            client, pem = self._issuing.client(signer, name, uri, public_key, valid_days)
            self.ledger.append(replace(client, relay=relay).entry())
        return pem

    # --- what the ledger holds ------------------------------------------------------------------------------

    def revoke(self, target: str, reason: str = "revoked") -> list[str]:
        """Revoke every leaf of a node, or the one certificate of a kid; return the kids newly revoked.

        Raises:
            UnknownTargetError: there never was such a node or kid.
        """
        with self.ledger.locked() as records:
            held = records.find(target)
            if held is None:
                raise UnknownTargetError(f"no node and no kid is {quoted(target)}: see `relay ca list`")
            if held:
                self.ledger.append(*revocations(held, reason, self._now_ms()))
        return [each.kid for each in held]

    def revoke_relay(self, name: str) -> list[str]:
        """Revoke every certificate of another relay of the fleet; return the kids newly revoked.

        Raises:
            UnknownTargetError: none was issued here to a relay of that name.
        """
        with self.ledger.locked() as records:
            if not (issued := records.of_relay(name) if is_relay_name(name) else []):
                raise UnknownTargetError(
                    f"no relay is {quoted(name)}: see `relay ca list` on the relay with the CA's key"
                )
            held = [each for each in issued if each.kid not in records.revoked]
            if held:
                self.ledger.append(*revocations(held, "relay revoked", self._now_ms()))
        return [each.kid for each in held]

    def records(self) -> CaRecords:
        return self.ledger.read()

    def readers(self) -> list[str]:
        """Return the names of the broker's readers that have a certificate in force."""
        records, now = self.records(), self._now_ms()
        names = {
            each.name
            for each in records.issued.values()
            if isinstance(each, IssuedServer)
            and READER.fullmatch(each.name)
            and records.state(each, now) == "in force"
        }
        return sorted(names)

    def in_force(self) -> dict[str, IssuedLeaf]:
        """Return the newest leaf of each node that has one that is not revoked."""
        return self.records().in_force()

    def revoked_kids(self) -> frozenset[str]:
        return frozenset(self.records().revoked)

    def crl_pem(self) -> str:
        """Return a list of the revoked for each root that is trusted, one after the other, in PEM.

        Each names all of them: serial numbers are random, so one that another root issued does no harm.
        """
        records, now = self.records(), self._now_ms()
        serials, number = records.revoked_serials(), len(records.revoked)
        signers = map(self._signer, self.roots())
        return "".join(make_crl(signer.pem, signer.key, serials, now, number) for signer in signers)

    @property
    def stamp(self) -> tuple[object, ...]:
        """What differs after any change, and when a root expires. Read it before what it is compared for."""
        return (*self.ledger.stamp, *self.roots())

    @contextmanager
    def unchanged(self) -> Iterator[list[Path]]:
        """Let nothing be issued or revoked, and yield the files that the CA is made of.

        Raises:
            AuthorityStateError: the root's key is not here.
        """
        with self.ledger.locked():
            self._signer()
            yield [*self._roots.files, *self.servers.files, self.ledger.path]

    def _signer(self, root: str | None = None) -> Signer[SigningKey]:
        return Signer(root := root or self.root_pem(), self._roots.key_of(root))


def _in_use(records: CaRecords, node_id: str, now_ms: int) -> IssuedLeaf:
    """Return the leaf of the node that another may follow.

    Raises:
        IdTakenError: none is in force.
        CertificateRefusedError: there are so many that something is wrong.
    """
    held = [leaf for leaf in records.unrevoked(node_id) if leaf.not_after_ms > now_ms]
    if not held:
        raise IdTakenError(f"{node_id} has no certificate in force: only the operator can issue it again")
    if len(held) >= _MAX_LEAVES:
        raise CertificateRefusedError(
            f"{node_id} has {len(held)} certificates in force: revoke them by their kid"
        )
    return held[-1]


def _name_of(pem: str) -> str:
    (name,) = x509.load_pem_x509_certificate(pem.encode("ascii")).subject.get_attributes_for_oid(
        NameOID.COMMON_NAME
    )
    return str(name.value)


def _public_key(pem: str) -> object:
    return x509.load_pem_x509_certificate(pem.encode("ascii")).public_key()


def issue_server_files(
    ca: CertificateAuthority,
    hosts: Sequence[str],
    directory: Path,
    random_bytes: Callable[[int], bytes],
    in_directory: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Write into ``directory`` what a server needs that is reached under ``hosts``; the first is its name.

    ``in_directory`` is held while files of it are read and written: it may be of another user than the CA.

    Raises:
        AuthorityError: the CA does not issue it.
        KeyFileError: the key that is there is damaged.
        OSError: a file cannot be written, or others can read the key.
    """
    key_file = directory / "server.key"
    roots = "".join(ca.roots())
    with in_directory():
        held = _held_key(key_file)
        if held is None:
            make_private_directory(directory)
        # First: where nothing can be written, nothing must be issued.
        write_atomic(directory / "roots.pem", roots)
    key = held or make_server_key(random_bytes)
    certificate = ca.servers.issue(hosts[0].strip("[]"), hosts, key.public_key(), _SERVER_DAYS)
    with in_directory():
        if held is None:
            write_atomic(key_file, server_key_to_pem(key), PRIVATE)
        write_atomic(directory / "server.pem", certificate)


def issue_reader_files(
    ca: CertificateAuthority,
    name: str,
    directory: Path,
    random_bytes: Callable[[int], bytes],
    in_directory: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> str:
    """Write into ``directory`` what an MQTT client shows that may read all manifests, and nothing else.

    Return the name by which the broker knows it. A key that is there is kept. ``in_directory`` as in
    ``issue_server_files``.

    Raises:
        AuthorityError: the name is not of its form, or the CA does not issue it.
        KeyFileError: the key that is there is damaged.
        OSError: a file cannot be written, or others can read the key.
    """
    common_name = f"edge-reader-{name}"
    if not READER.fullmatch(common_name):
        raise MalformedNameError("a reader's name is 1 to 32 of a-z, 0-9 and -, for example inventory")
    with in_directory():
        make_private_directory(directory)
        key = load_or_create_key(directory / "reader.key", random_bytes)
    certificate = ca.issue_client(common_name, _READER_URI, bytes(key.verify_key), _SERVER_DAYS)
    with in_directory():
        write_atomic(directory / "roots.pem", "".join(ca.servers.roots()))
        write_atomic(directory / "reader.pem", certificate)
    return common_name


def _held_key(key_file: Path) -> EllipticCurvePrivateKey | None:
    """Return the key that is there; None for one of the kind from before servers had a root of their own."""
    try:
        return read_server_key(key_file)
    except FileNotFoundError:
        return None
    except KeyFileError as error:
        try:
            read_key(key_file)
        except KeyFileError:
            raise KeyFileError(f"{error}: restore it, or remove it and another is made") from None
        return None
