"""Authenticates a connecting node: by its certificate, and a token that proves the key for one challenge.

Also counts, audits and logs what nodes do wrong. Must not keep state: the identity goes to the sessions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from attrs import define
from structlog.typing import FilteringBoundLogger

from relay.audit.refusal_counts import RefusalCounter, RefusalEvent, RefusalReason
from relay.fleet.fleet import Fleet
from relay.http.websocket_protocol import BROKEN_BY_PEER, FLOODED, TOO_LARGE, SocketClosedError
from relay.observability.metrics import Metrics
from relay.sessions.session import NodeConnection
from schemas.certificates import IdentityError, IdentityReason
from schemas.error_roots import PeerError
from schemas.frames import Frame
from schemas.identity import Identity
from schemas.keys import base64url
from schemas.payloads import Auth, Challenge
from schemas.session import CloseCode, ProtocolError
from schemas.text import printable
from schemas.tokens import TokenError, TokenVerifier

_NONCE_BYTES = 32
_MAX_TOKEN_LIFE_S = 60


class HandshakeRejection(StrEnum):
    """Why a node is not admitted, for the audit, where no ``IdentityReason`` or ``TokenReason`` says it."""

    PROTOCOL = "protocol"
    FLOODED = "flooded"
    GONE = "gone"
    LATE = "late"
    NO_AUTH = "no_auth"
    CONNECTIONS = "connections"
    TOKEN_NONCE = "token_nonce"  # noqa: S105 - a reason, and no password
    TOKEN_SUBJECT = "token_subject"  # noqa: S105 - as above
    TOKEN_LIFE = "token_life"  # noqa: S105 - as above


class HandshakeError(PeerError):
    """The node is rejected. ``code`` closes the connection; ``reason`` is one of fixed words."""

    def __init__(self, reason: str, code: CloseCode = CloseCode.AUTH_FAILED) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


def rejection_of(error: Exception) -> tuple[str, CloseCode]:
    """Return the reason for which ``error`` ends a handshake, and the code that closes it."""
    match error:
        case HandshakeError():
            return error.reason, error.code
        case ProtocolError():
            return HandshakeRejection.PROTOCOL, error.code
        case SocketClosedError():
            flooded = error.code == FLOODED
            reason = HandshakeRejection.FLOODED if flooded else HandshakeRejection.GONE
            return reason, CloseCode.AUTH_FAILED
        case _:
            return HandshakeRejection.LATE, CloseCode.AUTH_FAILED


@dataclass(frozen=True, slots=True)
class Handshake:
    """Challenges nodes, and verifies their answers. ``audience`` is the relay's public URL.

    ``now_ms`` is the session's time. The node computes the times of its token from that of the challenge, and
    they are checked against that of the answer.
    """

    fleet: Fleet
    verifier: TokenVerifier
    audience: str
    random_bytes: Callable[[int], bytes]

    def challenge(self, now_ms: int) -> Challenge:
        return {
            "nonce": base64url(self.random_bytes(_NONCE_BYTES)),
            "audience": self.audience,
            "server_time_ms": now_ms,
        }

    def judge(self, auth: Frame, nonce: object, now_ms: int) -> Identity:
        """Return the identity that ``auth``, the answer to the challenge with ``nonce``, proves.

        Raises:
            HandshakeError: it proves none.
        """
        proof: Auth = auth.payload
        node_id = proof["node_id"]
        try:
            identity = self.fleet.identify(node_id, proof["certificate"])
        except IdentityError as error:
            code = CloseCode.REVOKED if error.reason is IdentityReason.REVOKED else CloseCode.AUTH_FAILED
            raise HandshakeError(error.reason, code) from None
        try:
            claims = self.verifier.verify(
                proof["token"],
                {identity.kid: identity.public_key}.get,
                audiences=frozenset({self.audience}),
                now_s=now_ms // 1000,
            )
        except TokenError as error:
            raise HandshakeError(f"token_{error.reason}") from None
        if claims["nonce"] != nonce:
            raise HandshakeError(HandshakeRejection.TOKEN_NONCE)
        if not claims["iss"] == claims["sub"] == node_id:
            raise HandshakeError(HandshakeRejection.TOKEN_SUBJECT)
        if claims["exp"] - claims["iat"] > _MAX_TOKEN_LIFE_S:
            raise HandshakeError(HandshakeRejection.TOKEN_LIFE)
        return identity


@define(eq=False, repr=False)
class PeerFaults:
    """Counts, audits and logs what nodes do wrong. Must not act on it."""

    _metrics: Metrics
    _refusals: RefusalCounter
    _log: FilteringBoundLogger

    def refused(self, address: str, error: Exception) -> CloseCode:
        """Record that ``error`` ended the handshake with ``address``; return the code that closes it."""
        reason, code = rejection_of(error)
        self._metrics.sessions.labels(f"refused_{reason}").inc()
        if self._refusals.count(RefusalEvent.NODE_REFUSED, address, reason):
            self._log.warning("node refused", address=address, reason=reason)
        return code

    def identity_twice(self, node_id: str) -> None:
        self._metrics.sessions.labels("duplicate_identity").inc()
        if self._refusals.count(RefusalEvent.IDENTITY_TWICE, node_id, RefusalReason.SUPERSEDED):
            self._log.warning("two machines use one identity; the newer stays", node_id=node_id)

    def newer_elsewhere(self, node_id: str, relay: str) -> None:
        """Record that the node has a newer session at another relay: it has moved, or there are two of it."""
        self._metrics.sessions.labels("superseded_elsewhere").inc()
        self._log.warning("node has a newer session at another relay", node_id=node_id, relay=relay)

    def broken(self, node_id: str, reason: str) -> None:
        self._metrics.sessions.labels("protocol_violation").inc()
        if self._refusals.count(RefusalEvent.SESSION_BROKEN, node_id, RefusalReason.PROTOCOL):
            self._log.warning("node broke the protocol", node_id=node_id, reason=printable(reason))

    def closed_by_server(self, node_id: str, code: int) -> None:
        """Record that the server closed the connection by itself, before a frame reached this package."""
        if code in BROKEN_BY_PEER:
            self.broken(node_id, f"closed with {code} of RFC 6455")
        elif code == TOO_LARGE:
            self._refusals.count(RefusalEvent.SESSION_BROKEN, node_id, RefusalReason.FRAME_TOO_LARGE)
        elif code == FLOODED:
            self._metrics.sessions.labels("flooded").inc()
            if self._refusals.count(RefusalEvent.SESSION_BROKEN, node_id, RefusalReason.FLOODED):
                self._log.warning("node sent more frames than its rate", node_id=node_id)

    def dropped(self, node_id: str, connection: NodeConnection) -> None:
        for reason, count in connection.take_dropped().items():
            self._metrics.frames_dropped.labels(reason).inc(count)
            if self._refusals.count(RefusalEvent.FRAME_DROPPED, node_id, reason, count):
                self._log.warning("frame dropped", node_id=node_id, reason=reason)
