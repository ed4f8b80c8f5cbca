"""Agents' tokens: how the relay issues them, and how it learns from one who calls.

Deny by default: a token that is not provably ours, for this relay, of this class and in time, is nobody's.
Must not decide what a caller may do: that is ``calls``. Must never log a token.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from nacl.signing import SigningKey

from schemas.files import PRIVATE, make_private_directory, read_private, write_atomic
from schemas.keys import private_key_from_pem, private_key_to_pem
from schemas.registry import SchemaRegistry
from schemas.tokens import AGENT_REF, TokenError, TokenVerifier, sign_token

SCOPE_OF_SAFETY_CLASS: Mapping[str, str] = {
    "read_only": "tools:call:read_only",
    "reversible": "tools:call:reversible",
    "physical_actuation": "tools:call:physical_actuation",
}
"""The scope that a caller needs for a tool of each safety class. A class without one is never allowed."""

SCOPES = (*SCOPE_OF_SAFETY_CLASS.values(), "sessions:message")

_CACHE_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls, as the token proved it."""

    tenant: str
    sub: str
    jti: str
    issuer: str
    scopes: frozenset[str]
    expires_s: int

    @property
    def safety_classes(self) -> frozenset[str]:
        """The safety classes that the scopes reach."""
        return frozenset(cls for cls, scope in SCOPE_OF_SAFETY_CLASS.items() if scope in self.scopes)


class TokenIssuer:
    """Signs agents' tokens with the relay's own key."""

    def __init__(self, key: SigningKey, issuer: str, audience: str, registry: SchemaRegistry) -> None:
        self._claims = registry.load(AGENT_REF)
        self._key = key
        self._issuer = issuer
        self._audience = audience

    def issue(  # noqa: PLR0913 - a token has this many facts
        self, *, sub: str, tenant: str, scopes: list[str], now_s: int, ttl_s: int, jti: str
    ) -> str:
        """Return a token that is good for ``ttl_s`` seconds.

        Raises:
            ViolationError: the token would not be accepted: a tenant or a sub that is not of its form.
        """
        claims = {
            "iss": self._issuer,
            "aud": self._audience,
            "sub": sub,
            "tenant": tenant,
            "scope": " ".join(scopes),
            "iat": now_s,
            "exp": now_s + ttl_s,
            "jti": jti,
            "token_class": "agent_runtime",
        }
        self._claims.check(claims)
        return sign_token(self._key, key_id(bytes(self._key.verify_key)), claims)


class Authenticator:
    """Knows the keys that agents' tokens may be signed with, and remembers what it has verified."""

    def __init__(
        self,
        verifier: TokenVerifier,
        keys: Mapping[str, bytes],
        issuer: str,
        audience: str,
        now_ms: Callable[[], int],
    ) -> None:
        self._verifier = verifier
        self._keys = keys
        self._issuer = issuer
        self._audience = audience
        self._now_ms = now_ms
        self._verified: dict[str, Principal] = {}

    def identify(self, token: str) -> Principal:
        """Return who holds ``token``. The signature is checked once a token, the expiry at every call.

        Raises:
            TokenError: the token is not accepted.
        """
        now_s = self._now_ms() // 1000
        principal = self._verified.get(token)
        if principal is None:
            principal = self._verify(token, now_s)
            if len(self._verified) >= _CACHE_SIZE:
                del self._verified[next(iter(self._verified))]
            self._verified[token] = principal
        if principal.expires_s <= now_s:
            del self._verified[token]
            raise TokenError("expired")
        return principal

    def _verify(self, token: str, now_s: int) -> Principal:
        claims = self._verifier.verify(token, self._keys.get, audience=self._audience, now_s=now_s)
        if claims["iss"] != self._issuer:
            raise TokenError("issuer")
        return Principal(
            tenant=claims["tenant"],
            sub=claims["sub"],
            jti=claims["jti"],
            issuer=claims["iss"],
            scopes=frozenset(claims["scope"].split(" ")),
            expires_s=claims["exp"],
        )


def key_id(public_key: bytes) -> str:
    """Return the ``kid`` of a token key: SHA-256 of its 32 bytes, hex."""
    return sha256(public_key).hexdigest()


def load_or_create_token_key(path: Path) -> SigningKey:
    """Return the relay's token key, made on first use.

    Raises:
        ExposedFileError: others can read it.
        OSError: it holds no key, or cannot be read.
    """
    try:
        return private_key_from_pem(read_private(path))
    except ValueError:
        # Without the error's own text, which can show a byte of the key.
        raise OSError(f"{path} is damaged: it holds no Ed25519 key in PEM") from None
    except FileNotFoundError:
        make_private_directory(path.parent)
        key = SigningKey(os.urandom(32))
        write_atomic(path, private_key_to_pem(key), PRIVATE)
        return key
