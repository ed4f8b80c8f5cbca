"""The relay's own certificates, and TLS at its two ends: to its clients and to the broker.

It serves with a certificate of the root of servers, P-256; to the broker it shows one of the root of nodes,
Ed25519, as all clients of the broker do, and to the relays of its fleet another. All are valid for 90 days,
since only their end keeps a stolen key from being believed, and are issued again when two thirds of that have
passed. A certificate may change while it is served: new connections are shown the new one, open ones go on.
Must not issue anew without a reason.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path

from attrs import define
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from cryptography.x509.oid import NameOID
from structlog.typing import FilteringBoundLogger

from relay.pki.authority import CertificateAuthority, ServerAuthority
from relay.pki.errors import AuthorityStateError, CertificateRefusedError
from relay.pki.roots import load_or_create_server_key
from relay.settings.config import RelayConfig, TlsFiles
from relay.state.key_files import load_or_create_key
from schemas.addresses import host_of
from schemas.certificates import RELAY_NAME, RELAY_URI, moment, relay_name, relay_uri
from schemas.error_roots import PeerError, StateError
from schemas.files import read_given, read_state, write_atomic
from schemas.health import Loop
from schemas.identity import CertificateFormatError, first_certificate_in, validity_of
from schemas.text import printable
from schemas.times import SystemClock
from schemas.tls import FreshContext, TlsFilesError, client_context, load_chain

BROKER_NAME = "edge-broker"
"""The common name of the broker that the relay runs itself; it has no rights at a broker."""
_LOCAL = ("localhost", "127.0.0.1", "::1")
_DAYS = 90
_UNREADABLE = (
    ValueError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
)
"""What the library raises for a certificate that is damaged, by where the damage is."""
INTERVAL_S = 60.0
_ROUND_S = 120.0
_Stamp = tuple[tuple[int, int, int], ...]
PublicKey = EllipticCurvePublicKey | Ed25519PublicKey
Certify = Callable[[str, str], Awaitable[str]]
"""Has a certificate issued for a use and a public key, PEM, by another relay of the fleet; returns its PEM.

Raises PeerError if that relay is away, or refuses."""


class RelayUse(StrEnum):
    """What a relay uses a certificate for, as ``cluster.ca_request`` names it."""

    SERVE = "serve"
    BROKER = "broker"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class WantedCertificate:
    """What a certificate must be for: a common name, all other names, and a key."""

    name: str
    others: frozenset[str]
    public_key: PublicKey


@define(eq=False, repr=False, kw_only=True)
class OwnCertificate:
    """A certificate with this name and ``others``, and its key, in ``files``.

    ``key`` returns the key, made on first use; ``issue`` has the CA issue for it; one of ``roots`` is to have
    issued it.
    """

    use: RelayUse
    files: TlsFiles
    _name: str
    _others: frozenset[str]
    _key: Callable[[], PublicKey]
    _issue: Callable[[], str]
    _roots: Callable[[], Sequence[str]]
    _now_ms: SystemClock

    def renew(self) -> bool:
        """Have a certificate issued if there is a reason to; return whether there was.

        Raises:
            StateError: the CA cannot issue it, or the key is damaged.
            OSError: the files cannot be used; the key may be readable by others.
        """
        if self.due() is None:
            return False
        write_atomic(self.files.certificate, self._issue())
        return True

    def due(self) -> WantedCertificate | None:
        """Return what is to be issued; None if there is no reason to.

        Raises:
            StateError, OSError: as ``renew``.
        """
        wanted = WantedCertificate(self._name, self._others, self._key())
        reason = reason_to_renew(_read_certificate(self.files), wanted, self._roots(), self._now_ms())
        return None if reason is None else wanted

    def install(self, wanted: WantedCertificate, certificate: str) -> None:
        """Use the ``certificate`` that another relay's CA has issued.

        Raises:
            AuthorityStateError: it is not what is ``wanted``; the one in use stays.
            OSError: it cannot be written.
        """
        reason = reason_to_renew(certificate, wanted, self._roots(), self._now_ms())
        if reason is not None:
            text = f"the relay with the CA's key has issued another certificate: {reason}"
            raise AuthorityStateError(text)
        write_atomic(self.files.certificate, certificate)


def served_certificate(  # noqa: PLR0913, PLR0917 - what comes in from outside
    files: TlsFiles,
    ca: ServerAuthority,
    name: str,
    hosts: Sequence[str],
    now_ms: SystemClock,
    random_bytes: Callable[[int], bytes],
) -> OwnCertificate:
    """Return what the server ``name`` serves with: for ``hosts`` and for this machine."""
    names = _with_this_machine(*hosts)

    def key() -> EllipticCurvePublicKey:
        return load_or_create_server_key(files.key, random_bytes).public_key()

    return OwnCertificate(
        use=RelayUse.SERVE,
        files=files,
        name=name,
        others=frozenset(map(_host, names)),
        key=key,
        issue=lambda: ca.issue(name, names, key(), _DAYS),
        roots=ca.roots,
        now_ms=now_ms,
    )


def broker_certificate(
    files: TlsFiles, ca: CertificateAuthority, now_ms: SystemClock, random_bytes: Callable[[int], bytes]
) -> OwnCertificate:
    """Return what the relay shows to the broker."""

    def raw() -> bytes:
        return bytes(load_or_create_key(files.key, random_bytes).verify_key)

    return OwnCertificate(
        use=RelayUse.BROKER,
        files=files,
        name=RELAY_NAME,
        others=frozenset({RELAY_URI}),
        key=lambda: Ed25519PublicKey.from_public_bytes(raw()),
        issue=lambda: ca.issue_client(RELAY_NAME, RELAY_URI, raw(), _DAYS),
        roots=ca.roots,
        now_ms=now_ms,
    )


def cluster_certificate(
    files: TlsFiles, ca: CertificateAuthority, now_ms: SystemClock, random_bytes: Callable[[int], bytes]
) -> OwnCertificate:
    """Return what the relay proves to the others of its fleet by which one it is."""
    public = bytes(load_or_create_key(files.key, random_bytes).verify_key)
    name = relay_name(public)
    return OwnCertificate(
        use=RelayUse.CLUSTER,
        files=files,
        name=name,
        others=frozenset({relay_uri(name)}),
        key=lambda: Ed25519PublicKey.from_public_bytes(public),
        issue=lambda: ca.issue_client(name, relay_uri(name), public, _DAYS),
        roots=ca.roots,
        now_ms=now_ms,
    )


def issue_for_another_relay(
    ca: CertificateAuthority, use: str, public_key_pem: str, public_url: str, relay: str | None = None
) -> str:
    """Return a certificate for a relay of the same fleet that has no CA key, in PEM.

    It is for the names that this relay has itself, or follows from the key: the other relay chooses nothing
    but that. ``relay`` is its name, if it is known.

    Raises:
        CertificateRefusedError: the key cannot have that use.
        AuthorityStateError: the CA cannot issue it.
    """
    key = _sent_key(public_key_pem)
    if use == RelayUse.SERVE and isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        return ca.servers.issue(RELAY_NAME, _with_this_machine(host_of(public_url)), key, _DAYS, relay)
    if use == RelayUse.BROKER and isinstance(key, Ed25519PublicKey):
        return ca.issue_client(RELAY_NAME, RELAY_URI, key.public_bytes_raw(), _DAYS, relay)
    if use == RelayUse.CLUSTER and isinstance(key, Ed25519PublicKey):
        name = relay_name(key.public_bytes_raw())
        return ca.issue_client(name, relay_uri(name), key.public_bytes_raw(), _DAYS)
    raise CertificateRefusedError(f"a relay has sent no key that it could use to {use}")


def named_by(public_key_pem: str) -> str:
    """Return the name of the relay with that key, in PEM; empty if it is no key of a relay."""
    key = _sent_key(public_key_pem)
    return relay_name(key.public_bytes_raw()) if isinstance(key, Ed25519PublicKey) else ""


def _sent_key(pem: str) -> object:
    """Return the public key that ``pem`` is of; None if it is of none."""
    try:
        return load_pem_public_key(pem.encode("utf-8"))
    except (ValueError, UnsupportedAlgorithm):
        return None


def public_key_pem(key: PublicKey) -> str:
    """Return ``key`` as SubjectPublicKeyInfo in PEM."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode("ascii")


def _with_this_machine(*hosts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*hosts, *_LOCAL)))


def _read_certificate(files: TlsFiles) -> str:
    try:
        return read_state(files.certificate).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def reason_to_renew(
    held_pem: str, wanted: WantedCertificate, roots: Sequence[str], now_ms: int
) -> str | None:
    """Return why the certificate ``held_pem`` will not do any longer, in a word; None if it will."""
    try:
        held = x509.load_pem_x509_certificate(held_pem.encode("utf-8"))
        names = held.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        public_key = held.public_key()
        # The library reads each part when it is asked for it.
        common_names = [name.value for name in held.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        begin, end = held.not_valid_before_utc, held.not_valid_after_utc
    except _UNREADABLE:
        return "none"
    if public_key != wanted.public_key or common_names != [wanted.name]:
        return "another"
    if {str(name.value) for name in names} != wanted.others:
        return "names"
    if not begin <= moment(now_ms) < end - (end - begin) / 3:
        return "age"
    return None if any(issued_by(held_pem, root) for root in roots) else "root"


def _host(host: str) -> str:
    try:
        return str(ip_address(host))
    except ValueError:
        return host


def issued_by(held_pem: str, root_pem: str) -> bool:
    """Return whether the certificate ``held_pem`` was issued by the root ``root_pem``."""
    try:
        held = x509.load_pem_x509_certificate(held_pem.encode("utf-8"))
        held.verify_directly_issued_by(x509.load_pem_x509_certificate(root_pem.encode("utf-8")))
    except (*_UNREADABLE, TypeError, InvalidSignature):
        return False
    return True


class LiveContext:
    """What the relay serves with: a context whose certificate follows the files.

    Raises:
        OSError: the files cannot be used; the key may be readable by others.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self.context = _server_context()
        self._stamp: _Stamp = ()
        self.refresh()

    def refresh(self) -> bool:
        """Load the files if they have changed; return whether they had.

        Raises:
            OSError: as above. The certificate in use stays.
        """
        stamp = _stamp_of(self._files)
        if stamp == self._stamp:
            return False
        # Into a context for trial first: a half-written chain must not replace the one in use.
        load_chain(_server_context(), self._files.certificate, self._files.key)
        load_chain(self.context, self._files.certificate, self._files.key)
        self._stamp = stamp
        return True


class RelayTls:
    """The relay's contexts according to ``config``; its own certificates are renewed in time.

    ``certify`` issues them where another relay has the CA's key: then those that are there are used at first.

    Attributes:
        to_broker: what all connections to the broker are made with; None where that is not over TLS.

    Raises:
        StateError: the CA cannot issue the relay's own certificates.
        OSError: files cannot be used; a key may be readable by others.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        config: RelayConfig,
        ca: CertificateAuthority,
        *,
        certify: Certify | None = None,
        now_ms: SystemClock,
        random_bytes: Callable[[int], bytes],
        log: FilteringBoundLogger,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._own: list[OwnCertificate] = [
            served_certificate(files, ca.servers, name, hosts, now_ms, random_bytes)
            for files, name, hosts in _served_files(config)
        ]
        self._certify = certify
        self._live: LiveContext | None = None
        self._log = log
        self._sleep = sleep
        self._refreshing = asyncio.Lock()  # the interval and a change of the CA may coincide
        self.to_broker: ssl.SSLContext | None = None
        self.loop = Loop()
        state = config.state
        if config.uses_broker_tls:
            self._own.append(broker_certificate(state.broker_client_tls, ca, now_ms, random_bytes))
            # A broker's certificate from before there was a root of servers is of the root of nodes.
            self.to_broker = broker_context(
                state.broker_client_tls, lambda: [*ca.servers.roots(), *ca.roots()], config.broker_root
            )
        # The first one of a relay without the CA's key comes with its state alone: it is never asked for.
        if config.cluster is not None and (certify is None or state.cluster_tls.certificate.exists()):
            self._own.append(cluster_certificate(state.cluster_tls, ca, now_ms, random_bytes))
        for certificate in self._own:
            if certify is None:
                certificate.renew()
            elif not certificate.files.certificate.exists():
                raise AuthorityStateError(
                    f"{certificate.files.certificate} is missing: make another `relay ca backup "
                    "--without-ca-key` on the relay that has the CA's key, once that serves with one"
                )
        if config.tls is not None:
            self._live = LiveContext(config.tls)

    @property
    def served(self) -> ssl.SSLContext | None:
        """What is served with; None where that is not over TLS."""
        return self._live.context if self._live else None

    async def run(self) -> None:
        while True:
            self.loop.busy(INTERVAL_S + _ROUND_S)
            await self._sleep(INTERVAL_S)
            await self.refresh()

    async def refresh(self) -> bool:
        """Renew and load now what is due; return whether it succeeded. A failure is logged."""
        async with self._refreshing:
            # Each by itself: one that cannot be renewed must not let the others expire.
            done = [await self._tried(self._renew(own)) for own in self._own]
            return all([*done, await self._tried(self._load())])

    async def _tried(self, work: Awaitable[None]) -> bool:
        try:
            await work
        except (StateError, PeerError, OSError) as error:
            self._log.error("certificate not renewed", reason=printable(str(error)))
            return False
        return True

    async def _load(self) -> None:
        # Not on a thread: a context must not change during a handshake.
        if self._live is not None and self._live.refresh():
            self._log.info("certificate loaded")

    async def _renew(self, own: OwnCertificate) -> None:
        if await self._renewed(own):
            self._log.info("own certificate issued", file=str(own.files.certificate))

    async def _renewed(self, own: OwnCertificate) -> bool:
        # On a thread: issuing waits for the ledger's lock and for the disk.
        if self._certify is None:
            return await asyncio.to_thread(own.renew)
        if (wanted := await asyncio.to_thread(own.due)) is None:
            return False
        issued = await self._certify(own.use, public_key_pem(wanted.public_key))
        await asyncio.to_thread(own.install, wanted, issued)
        return True


def _served_files(config: RelayConfig) -> Iterator[tuple[TlsFiles, str, Sequence[str]]]:
    """Yield files, name and hosts of what the relay and its own broker serve with."""
    if config.own_root:
        yield config.state.own_tls, RELAY_NAME, [host_of(config.public_url)]
    if config.own_broker is not None and config.broker is not None and config.broker.tls:
        told = config.node_broker or config.broker
        yield config.state.broker_tls, BROKER_NAME, list(dict.fromkeys((told.host, config.broker.host)))


def broker_context(
    shown: TlsFiles, roots: Callable[[], list[str]], broker_root: Path | None
) -> ssl.SSLContext:
    """Return a context for all connections to the broker, which is shown the relay's own certificate.

    The broker is verified by the roots in ``broker_root`` alone; by default by the relay's own ``roots``.
    """

    def make() -> ssl.SSLContext:
        try:
            trusted = (
                read_given(broker_root, wait_s=0).decode("ascii", "replace")
                if broker_root
                else "".join(roots())
            )
        except StateError as error:
            # paho retries after an OSError only.
            raise TlsFilesError(str(error)) from None
        return client_context(trusted, (shown.certificate, shown.key))

    return FreshContext.of(make)


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Renegotiation costs the server more than the client.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    return context


def _stamp_of(files: TlsFiles) -> _Stamp:
    facts = (files.certificate.stat(), files.key.stat())
    return tuple((fact.st_ino, fact.st_size, fact.st_mtime_ns) for fact in facts)


class Expiries:
    """The ends of the certificates that ``config`` and ``root_pem`` name, in ms since the epoch."""

    def __init__(self, config: RelayConfig, root_pem: Callable[[], str]) -> None:
        self._root_pem = root_pem
        served = {} if config.tls is None else {"server": config.tls.certificate}
        shown = (
            {"broker_client": config.state.broker_client_tls.certificate} if config.uses_broker_tls else {}
        )
        cluster = config.state.cluster_tls.certificate
        joined = {"cluster": cluster} if config.cluster is not None and cluster.exists() else {}
        self._files = served | shown | joined

    @property
    def names(self) -> tuple[str, ...]:
        return ("root", *self._files)

    def end_ms(self, name: str) -> int:
        """Return when the certificate ``name`` ends; 0 if it cannot be read."""
        try:
            pem = self._root_pem() if name == "root" else read_state(self._files[name]).decode("ascii")
            return validity_of(first_certificate_in(pem))[1]
        except (OSError, StateError, UnicodeDecodeError, CertificateFormatError):
            return 0
