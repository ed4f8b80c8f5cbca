"""What relays store for all others, and broadcast: signed by the certificate of the relay that writes it.

A signed document is its JSON with a head: 0x01, the length of the certificate in two bytes, the certificate
in DER, and a signature of 64 bytes, over the subject and the JSON. So it is good under that subject alone. In
a fleet that is not sealed relays write the JSON alone, and read both. Nothing secret is in it: who reads it
is not bounded. It can be put back where it was, under its own subject: what reads it bears that. Must not
know what a document says.
"""

from collections.abc import Callable
from typing import NamedTuple

from attrs import define, field

from relay.cluster.channel import RelayKey
from schemas.certificates import IdentityError, RelayCertificate
from schemas.error_roots import PeerError
from schemas.keys import verifies

_SIGNED = 0x01
_LABEL = b"edge-kubelet signed by a relay 1\x00"
_SIGNATURE_BYTES = 64
MAX_HEAD_BYTES = 1024
"""Of what is before the JSON."""
_MAX_KNOWN = 64


class NotSignedError(PeerError):
    """A document is of no relay of this fleet; the text says why, in fixed words."""


class NoCertificateError(PeerError):
    """This relay has no certificate of its fleet; the text says what to do."""

    def __str__(self) -> str:
        return (
            "the fleet is sealed, and this relay has no certificate of it: start it from another "
            "`relay ca backup --without-ca-key`"
        )


class Signed(NamedTuple):
    """A document, in JSON, and the certificate of the relay that has signed it; None if none has."""

    document: bytes
    by: RelayCertificate | None


@define(eq=False, repr=False)
class SignedDocuments:
    """Signs by what ``key`` returns once the fleet ``is_sealed``, and takes nothing else from then on.

    ``signer`` returns what a certificate says that is accepted, also one that has ended since; ``accepts``
    whether it still is.
    """

    _key: Callable[[], RelayKey | None]
    _signer: Callable[[bytes], RelayCertificate]
    _accepts: Callable[[RelayCertificate], bool]
    _is_sealed: Callable[[], bool]
    _known: dict[bytes, RelayCertificate] = field(init=False, factory=dict)

    def written(self, subject: str, document: bytes) -> bytes:
        """Return ``document`` as it is written under ``subject``.

        Raises:
            NoCertificateError: it cannot be signed.
        """
        if not self._is_sealed():
            return document
        if (own := self._key()) is None:
            raise NoCertificateError
        signature = own.key.sign(_signed(subject, document)).signature
        head = bytes([_SIGNED]) + len(own.certificate).to_bytes(2, "big")
        return b"".join((head, own.certificate, signature, document))

    def read(self, subject: str, data: bytes) -> Signed:
        """Return the document in ``data``, which was read under ``subject``.

        Raises:
            NotSignedError: it has to be signed, and is not.
        """
        if data[:1] != bytes([_SIGNED]):
            if self._is_sealed():
                raise NotSignedError("is not signed")
            return Signed(data, None)
        end = 3 + int.from_bytes(data[1:3], "big")
        begin = end + _SIGNATURE_BYTES
        if begin > min(len(data), MAX_HEAD_BYTES):
            raise NotSignedError("is not of the form of what is signed")
        by = self._certificate(data[3:end])
        if not verifies(by.public_key, _signed(subject, data[begin:]), data[end:begin]):
            raise NotSignedError("is not signed by the relay of its certificate")
        return Signed(data[begin:], by)

    def _certificate(self, der: bytes) -> RelayCertificate:
        by = self._known.get(der)
        if by is None:
            try:
                by = self._signer(der)
            except IdentityError as error:
                raise NotSignedError(f"has a certificate that is not accepted: {error.reason}") from None
            if len(self._known) >= _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[der] = by
        if not self._accepts(by):
            raise NotSignedError("is signed by a relay that was revoked")
        return by


def _signed(subject: str, document: bytes) -> bytes:
    return _LABEL + subject.encode("utf-8") + b"\x00" + document
