"""Enrolment: the join token that an operator copies to a node, and the proofs that both ends make with it.

The token's key is never sent. Each message carries an HMAC with this key over its own canonical form, so that
an attacker in between, or one that poses as the relay, learns no secret and changes nothing undetected.
Must not decide who is enrolled, and must not read files, clocks or randomness.
"""

import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

from schemas.canonical import jcs
from schemas.error_roots import OperatorError
from schemas.keys import base64url, from_base64url

REQUEST_REF = "enrol.request@1.0.0"
RESPONSE_REF = "enrol.response@1.0.0"
ENROL_PATH = "/enroll"
JOIN_TOKEN_VARIABLE = "EDGE_JOIN_TOKEN"  # noqa: S105 - the name of a variable, not a secret
"""The environment variable that can hold a join token on the node."""
MAX_REQUEST_BYTES = 16 * 1024
MAX_RESPONSE_BYTES = 64 * 1024

# The role of the sender, part of the HMAC: a proof of one end cannot be sent back to it as the other's.
NODE = b"edge-kubelet enrol request\n"
RELAY = b"edge-kubelet enrol response\n"

_PROOF = "proof"
_ENDORSED = "server-roots-endorsement: "
_TOKEN = re.compile(r"ekj1\.([0-9A-HJKMNP-TV-Z]{26})\.([A-Za-z0-9_-]{43})\.([A-Za-z0-9_-]{43})")


class JoinTokenError(OperatorError):
    """The text is not a join token. The error does not quote it: a mistyped token is nearly a secret."""


@dataclass(frozen=True, slots=True)
class JoinToken:
    """The right of a node to enrol, and the identity of the relay.

    Attributes:
        id: a ULID in upper case, which identifies the token at the relay and is not secret.
        key: 32 secret bytes.
        fingerprint: the SHA-256 of the DER of the root that the relay's CA had when it made the token.
    """

    id: str
    key: bytes = field(repr=False)
    fingerprint: bytes

    def text(self) -> str:
        return f"ekj1.{self.id}.{base64url(self.key)}.{base64url(self.fingerprint)}"

    @classmethod
    def parse(cls, text: str) -> "JoinToken":
        """Return the token in ``text``, which white space may surround.

        Raises:
            JoinTokenError: ``text`` is not a join token.
        """
        match = _TOKEN.fullmatch(text.strip())
        if match is None:
            raise JoinTokenError("not a join token: one begins with ekj1. and has four parts")
        try:
            return cls(match[1], from_base64url(match[2]), from_base64url(match[3]))
        except ValueError:
            raise JoinTokenError("the join token is damaged: copy all of it again") from None


class EnrolRequest(TypedDict):
    """``enrol.request@1.0.0``: a node asks for its first leaf, by a join token."""

    join_id: str
    csr: str
    server_roots: NotRequired[Literal[True]]
    nonce: str
    proof: str


class EnrolAnswer(TypedDict):
    """``enrol.response@1.0.0`` without its proof."""

    certificate: str
    roots: str
    server_roots: NotRequired[str]
    relay_url: str
    broker: str | None
    own_root: bool
    nonce: str
    server_time_ms: int


class EnrolResponse(EnrolAnswer):
    """``enrol.response@1.0.0``."""

    proof: str


def shown_roots(roots_pem: str, server_roots_pem: str, server_endorsements: Sequence[str]) -> str:
    """Return what ``GET`` answers: all roots in PEM, and before those of servers their endorsements."""
    return roots_pem + "".join(f"{_ENDORSED}{each}\n" for each in server_endorsements) + server_roots_pem


def shown_endorsements(text: str) -> list[str]:
    """Return the endorsements of the roots of servers that ``shown_roots`` has put into ``text``."""
    return [line.removeprefix(_ENDORSED) for line in text.splitlines() if line.startswith(_ENDORSED)]


def proof_of(message: Mapping[str, Any], key: bytes, sender: bytes) -> str:
    """Return the proof of ``message`` that ``sender``, ``NODE`` or ``RELAY``, has the ``key``."""
    return base64url(_mac(message, key, sender))


def proven(message: Mapping[str, Any], key: bytes, sender: bytes) -> dict[str, Any]:
    """Return ``message`` with its proof."""
    return {**message, _PROOF: proof_of(message, key, sender)}


def is_proven(message: Mapping[str, Any], key: bytes, sender: bytes) -> bool:
    """Return whether ``sender`` has the ``key`` and sent exactly this. ``message`` fits its schema."""
    try:
        proof = from_base64url(message[_PROOF])
    except ValueError:
        return False
    unproven = {name: value for name, value in message.items() if name != _PROOF}
    return hmac.compare_digest(proof, _mac(unproven, key, sender))


def _mac(message: Mapping[str, Any], key: bytes, sender: bytes) -> bytes:
    return hmac.digest(key, sender + jcs(dict(message)), "sha256")
