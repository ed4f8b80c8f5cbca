"""Roots of servers and what they issue, and servers' certificates from before there were such roots."""

from collections.abc import Sequence
from hashlib import sha256
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    derive_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID
from nacl.signing import SigningKey

from relay.pki.issuing import issue_server, make_server_root
from schemas.certificates import builder_for, pem_of, private
from tests.fakes.signer import DAY_MS, NOW_MS

_BOTH = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]


def server_key_named(name: str) -> EllipticCurvePrivateKey:
    """Return the P-256 key that is always the one called ``name``."""
    return derive_private_key(int.from_bytes(sha256(name.encode()).digest(), "big") >> 1 | 1, SECP256R1())


class SimulatedServerCa:
    """A root of servers and the certificates that it issues."""

    def __init__(self, name: str = "server root", now_ms: int = NOW_MS) -> None:
        self._now_ms = now_ms
        self._serial = 1
        self.change_root(name)

    def change_root(self, name: str) -> None:
        """Have the root called ``name``, and no other, from now on."""
        self.key = server_key_named(f"ca {name}")
        begin_ms = self._now_ms - DAY_MS
        self.root_pem = make_server_root(self.key, name, begin_ms, valid_days=3650, serial=1)

    def roots(self) -> list[str]:
        return [self.root_pem]

    def issue(
        self,
        name: str,
        hosts: Sequence[str],
        public_key: EllipticCurvePublicKey,
        valid_days: int = 90,
        now_ms: int | None = None,
    ) -> str:
        self._serial += 1
        return issue_server(
            self.root_pem,
            self.key,
            name=name,
            hosts=hosts,
            public_key=public_key,
            now_ms=self._now_ms if now_ms is None else now_ms,
            valid_days=valid_days,
            serial=self._serial,
        )


def issue_old_server(  # noqa: PLR0913 - a certificate has this many facts
    root_pem: str,
    root_key: SigningKey,
    *,
    name: str,
    hosts: Sequence[str],
    public_key: bytes,
    now_ms: int,
    valid_days: int,
    serial: int,
) -> str:
    """Return a server's certificate as the CA issued it before it had a root of servers."""
    root = x509.load_pem_x509_certificate(root_pem.encode("ascii"))
    builder = (
        builder_for(
            Ed25519PublicKey.from_public_bytes(public_key),
            name,
            [_name(host) for host in hosts],
            _BOTH,
            now_ms,
            valid_days,
        )
        .issuer_name(root.subject)
        .serial_number(serial)
    )
    return pem_of(builder.sign(private(root_key), None))


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
