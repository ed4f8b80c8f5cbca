"""JSON Web Tokens as this system has them: compact JWS, Ed25519, and a schema for header and for claims.

One algorithm, one key per ``kid`` that the verifier already holds, and a header without ``jku``, ``jwk``,
``x5u`` or ``crit``: there is nothing in a token to negotiate. Tokens of our own have no claim that is not
named; those of outside issuers may. Must not read a key from a token, and must never put a token or a part
of one into an exception.
"""

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from nacl.signing import SigningKey

from schemas.error_roots import PeerError
from schemas.keys import base64url, from_base64url, verifies
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads

HEADER_REF = "token.header@1.0.0"
DEVICE_REF = "token.device_runtime@1.0.0"
AGENT_REF = "token.agent_runtime@1.1.0"
EXTERNAL_HEADER_REF = "token.header_external@1.0.0"
EXTERNAL_AGENT_REF = "token.agent_external@1.0.0"
EXTERNAL_KEY_REF = "token.key_external@1.0.0"

MAX_TOKEN_BYTES = 4096
CLOCK_LEEWAY_S = 5


class TokenReason(StrEnum):
    """Why a token is rejected; fit for a counter's label."""

    MALFORMED = "malformed"
    UNKNOWN_KEY = "unknown_key"
    SIGNATURE = "signature"
    CLAIMS = "claims"
    AUDIENCE = "audience"
    ISSUER = "issuer"
    EXPIRED = "expired"
    NOT_YET = "not_yet"
    REVOKED = "revoked"


class TokenError(PeerError):
    """A token is rejected."""

    def __init__(self, reason: TokenReason) -> None:
        super().__init__(reason)
        self.reason = reason


def sign_token(key: SigningKey, kid: str, claims: Mapping[str, Any]) -> str:
    """Return ``claims`` as a compact JWS, signed with ``key``."""
    header = {"alg": "EdDSA", "kid": kid, "typ": "JWT"}
    signing_input = f"{_segment(header)}.{_segment(claims)}"
    signature = key.sign(signing_input.encode("ascii")).signature
    return f"{signing_input}.{base64url(signature)}"


class TokenVerifier:
    """Verifies tokens of one class, named by the references of its claims' and its header's document."""

    def __init__(self, registry: SchemaRegistry, claims_ref: str, header_ref: str = HEADER_REF) -> None:
        self._header = registry.load(header_ref)
        self._claims = registry.load(claims_ref)

    def verify(
        self,
        token: str,
        key_of: Callable[[str], bytes | None],
        *,
        audiences: frozenset[str],
        now_s: int,
        early_s: int = CLOCK_LEEWAY_S,
    ) -> dict[str, Any]:
        """Return the claims of ``token``.

        ``key_of`` gives the 32-byte public key of a ``kid``, or None. ``now_s`` is in seconds, as claims are;
        ``early_s`` is how long before it begins a token is accepted. It must be for one of ``audiences``.

        Raises:
            TokenError: with reason ``malformed``, ``unknown_key``, ``signature``, ``claims``, ``audience``,
                ``expired`` or ``not_yet``.
        """
        public_key = key_of(self.kid_of(token))
        if public_key is None:
            raise TokenError(TokenReason.UNKNOWN_KEY)
        signing_input, _, signature = token.rpartition(".")
        try:
            raw_signature = from_base64url(signature)
        except ValueError:
            raise TokenError(TokenReason.MALFORMED) from None
        if not verifies(public_key, signing_input.encode("ascii"), raw_signature):
            raise TokenError(TokenReason.SIGNATURE)
        claims = _object(signing_input.partition(".")[2])
        if not self._claims.is_valid(claims):
            raise TokenError(TokenReason.CLAIMS)
        _check_claims(claims, audiences, now_s, early_s)
        return claims

    def kid_of(self, token: str) -> str:
        """Return the name of the key that ``token`` claims to be signed with: nothing is verified.

        Raises:
            TokenError: with reason ``malformed``.
        """
        # ASCII first: the claims are encoded before anything has looked at them.
        if len(token) > MAX_TOKEN_BYTES or not token.isascii() or token.count(".") != 2:  # noqa: PLR2004 - header, claims, signature
            raise TokenError(TokenReason.MALFORMED)
        header = _object(token.partition(".")[0])
        if not self._header.is_valid(header):
            raise TokenError(TokenReason.MALFORMED)
        kid: str = header["kid"]
        return kid


def _check_claims(claims: Mapping[str, Any], audiences: frozenset[str], now_s: int, early_s: int) -> None:
    named = claims["aud"]
    if audiences.isdisjoint(named if isinstance(named, list) else [named]):
        raise TokenError(TokenReason.AUDIENCE)
    if claims["exp"] + CLOCK_LEEWAY_S <= now_s:
        raise TokenError(TokenReason.EXPIRED)
    begins = max(claims["iat"], claims.get("nbf", 0))
    if begins - early_s > now_s or claims["exp"] <= begins:
        raise TokenError(TokenReason.NOT_YET)


def _segment(value: Mapping[str, Any]) -> str:
    return base64url(json.dumps(value, separators=(",", ":")).encode("utf-8"))


def _object(segment: str) -> dict[str, Any]:
    try:
        value = loads(from_base64url(segment), max_bytes=MAX_TOKEN_BYTES)
    except (StrictJsonError, ValueError):
        raise TokenError(TokenReason.MALFORMED) from None
    if not isinstance(value, dict):
        raise TokenError(TokenReason.MALFORMED)
    return value
