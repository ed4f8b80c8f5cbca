"""Agents' tokens as an attacker would have them: any header and claims, signed with any key.

Made from the bare libraries, so that nothing depends on the product's own signing. The one key that no
attacker holds is here too: only with it does a token differ from a good one in the one fact that is tried.
"""

import base64
import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Final

from nacl.signing import SigningKey

from schemas.addresses import mcp_url
from tests.fakes.hub import READ_ONLY, Hub
from tests.fakes.signer import ABSENT, NOW_MS, TENANT, key_named

RELAY_KEY: Final = key_named("the relay's token key")
NOW_S: Final = NOW_MS // 1000

_Signs = Callable[[bytes], bytes]


def kid_of(key: SigningKey) -> str:
    """Return the ``kid`` under which a relay would know ``key``."""
    return sha256(bytes(key.verify_key)).hexdigest()


def agent_claims(hub: Hub, **claims: object) -> dict[str, Any]:
    """Return the claims of a good token with ``claims`` in place of its own."""
    good = {
        "iss": hub.public_url,
        "aud": mcp_url(hub.public_url),
        "sub": "agent-1",
        "tenant": TENANT,
        "scope": READ_ONLY,
        "iat": NOW_S,
        "exp": NOW_S + 3600,
        "jti": "jti-1",
        "token_class": "agent_runtime",
    }
    return {name: value for name, value in {**good, **claims}.items() if value is not ABSENT}


def jws(header: Mapping[str, Any], claims: Mapping[str, Any], sign: _Signs) -> str:
    """Return a compact JWS with just this header."""
    signing_input = f"{_segment(json.dumps(header).encode())}.{_segment(json.dumps(claims).encode())}"
    return f"{signing_input}.{_segment(sign(signing_input.encode()))}"


def agent_token(
    hub: Hub, *, header: Mapping[str, Any] | None = None, key: SigningKey = RELAY_KEY, **claims: object
) -> str:
    """Return a token signed with ``key``, with members of its header and claims overridden."""
    whole = {"alg": "EdDSA", "kid": kid_of(RELAY_KEY), "typ": "JWT", **(header or {})}
    whole = {name: value for name, value in whole.items() if value is not ABSENT}
    return jws(whole, agent_claims(hub, **claims), lambda data: key.sign(data).signature)


def _segment(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
