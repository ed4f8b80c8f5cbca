"""Relays of a fleet, by their certificates: those that a CA has issued, and which of them are accepted."""

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from relay.cluster.channel import RelayKey
from relay.cluster.sealed_link import RelayTrust, SealedLink
from relay.cluster.signed_entries import SignedDocuments
from relay.pki.issuing import issue_client
from relay.routing.port import NoResponderError
from relay.settings.config import TlsFiles
from relay.settings.environment import ticks_ms
from schemas.certificates import (
    IdentityError,
    IdentityReason,
    RelayCertificate,
    relay_name,
    relay_uri,
    verify_relay,
)
from schemas.files import PRIVATE, make_private_directory, write_atomic
from schemas.identity import first_certificate_in, to_pem
from schemas.keys import private_key_to_pem
from schemas.process.logs import make_logger
from tests.fakes.lines import LogLines
from tests.fakes.signer import SimulatedCa, key_named

if TYPE_CHECKING:
    from relay.cluster.connection import ClusterConnection


@dataclass
class RelayCa:
    """The CA of the fleet named ``name``; ``revoked`` has the names of relays that are not accepted."""

    name: str = "of the relays"
    now_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    revoked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ca = SimulatedCa(self.name, self.now_ms)
        self._serial = 1

    def key(self, relay: str) -> RelayKey:
        """Return what a relay proves with which one it is."""
        self._serial += 1
        key = key_named(f"relay {relay}")
        name = relay_name(bytes(key.verify_key))
        pem = issue_client(
            self.ca.root_pem,
            self.ca.key,
            name=name,
            uri=relay_uri(name),
            public_key=bytes(key.verify_key),
            now_ms=self.now_ms,
            valid_days=90,
            serial=self._serial,
        )
        return RelayKey(first_certificate_in(pem), key)

    def write(self, relay: str, files: TlsFiles) -> str:
        """Write that where a relay reads it; return the relay's name."""
        own = self.key(relay)
        make_private_directory(files.key.parent, shown=True)
        write_atomic(files.certificate, to_pem([own.certificate]))
        write_atomic(files.key, private_key_to_pem(own.key), PRIVATE)
        return relay_name(bytes(own.key.verify_key))

    @property
    def trust(self) -> RelayTrust:
        """What a relay of the fleet judges the others by."""
        return RelayTrust(self.relay, lambda der: self.relay(der, may_have_ended=True), self.accepts)

    def relay(self, der: bytes, *, may_have_ended: bool = False) -> RelayCertificate:
        """Return what a certificate says that is accepted."""
        certificate = verify_relay(der, [self.ca.root_pem], self.now_ms)
        if not may_have_ended and not certificate.valid_at(self.now_ms):
            raise IdentityError(IdentityReason.VALIDITY)
        if not self.accepts(certificate):
            raise IdentityError(IdentityReason.REVOKED)
        return certificate

    def accepts(self, certificate: RelayCertificate) -> bool:
        """Return whether it is not revoked."""
        return certificate.name not in self.revoked


class NoRequests:
    """Carries nothing: there is no connection."""

    async def request(self, *_arguments: Any, **_options: Any) -> bytes:
        raise NoResponderError("not connected")

    async def publish(self, _subject: str, _payload: bytes) -> None:
        """Send nothing."""


def link_of(relay: str) -> SealedLink:
    """Return the channels of a relay without a certificate."""
    return SealedLink(
        requests=cast("ClusterConnection", NoRequests()),
        fleet="main",
        relay=relay,
        key=lambda: None,
        trust=RelayCa().trust,
        random_bytes=os.urandom,
        monotonic=time.monotonic,
        ticks_ms=ticks_ms,
        count=lambda _kind, _side, _event: None,
        log=make_logger("relay", LogLines()),
    )


def unsigned() -> SignedDocuments:
    """Return what signs nothing: of a fleet that is not sealed."""
    trust = RelayCa().trust
    return SignedDocuments(lambda: None, trust.signer, trust.accepts, lambda: False)
