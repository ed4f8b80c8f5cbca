"""JWTs by which a client proves itself at the token endpoint (RFC 7523, ``private_key_jwt``).

RS256, ES256 and EdDSA, by keys that the client publishes; each is good once, and for minutes. Must not take
a key that the assertion itself names.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, field

from relay.auth.signatures import Jwt
from relay.sign_in.clients import ClientError

ASSERTION_TYPE = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
MAX_LENGTH = 8 * 1024
_MAX_LIFE_S, _SKEW_S = 600, 60
_MAX_SEEN = 4096


@define(eq=False, repr=False)
class Assertions:
    """Verifies assertions that are for one of ``audiences``; ``now_ms`` is since 1970."""

    _audiences: frozenset[str]
    _now_ms: Callable[[], int]
    _seen: dict[tuple[str, str], int] = field(init=False, factory=dict)

    def verify(self, assertion: str, client_id: str, keys: Sequence[Mapping[str, Any]]) -> None:
        """Return if ``assertion`` proves that its sender is ``client_id``, whose keys are ``keys``.

        Raises:
            ClientError: it does not.
        """
        jwt = _parsed(assertion)
        if not jwt.has_known_algorithm:
            raise _refused("is not signed by RS256, ES256 or EdDSA")
        if not any(map(jwt.is_verified_by, keys)):
            raise _refused("is not signed by a key of this client")
        self._check(jwt.claims, client_id)

    @staticmethod
    def subject_of(assertion: str) -> str:
        """Return the client that ``assertion`` says it is of: to find its keys by, and nothing more.

        Raises:
            ClientError: it is no JWT.
        """
        subject = _parsed(assertion).claims.get("sub")
        return subject if isinstance(subject, str) else ""

    def _check(self, claims: Mapping[str, Any], client_id: str) -> None:
        now = self._now_ms() // 1000
        audiences = claims.get("aud")
        audiences = audiences if isinstance(audiences, list) else [audiences]
        if claims.get("iss") != client_id or claims.get("sub") != client_id:
            raise _refused("is of another client")
        if not any(isinstance(each, str) and each in self._audiences for each in audiences):
            raise _refused("is for another server")
        expires, issued, jti = _time(claims.get("exp")), _time(claims.get("iat", now)), claims.get("jti")
        if expires <= now - _SKEW_S or issued > now + _SKEW_S or expires > now + _MAX_LIFE_S:
            raise _refused("has expired, or is valid for too long")
        if not isinstance(jti, str) or not jti:
            raise _refused("has no jti")
        self._seen = {known: until for known, until in self._seen.items() if until > now - _SKEW_S}
        if (client_id, jti) in self._seen or len(self._seen) >= _MAX_SEEN:
            raise _refused("was used before")
        self._seen[client_id, jti] = expires


def _time(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 40:
        raise _refused("has no exp")
    return int(value)


def _refused(why: str) -> ClientError:
    return ClientError("invalid_client", f"The client assertion {why}.")


def _parsed(assertion: str) -> Jwt:
    try:
        return Jwt.of(assertion, MAX_LENGTH)
    except ValueError:
        raise _refused("is no JWT") from None
