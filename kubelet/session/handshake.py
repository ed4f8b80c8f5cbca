"""How a node answers the relay's challenge: its certificate, and a token that its key signs for this once.

Must never answer a challenge for another audience than the pinned one: a rogue relay could forward the
real one's.
"""

from collections.abc import Mapping
from typing import Any

from schemas.error_roots import PeerError
from schemas.identity_files import NodeIdentity
from schemas.payloads import Auth
from schemas.tokens import sign_token

_TOKEN_LIFE_S = 60


class AudienceError(PeerError):
    """The relay named an audience that this node has not pinned."""


def answer_to(
    challenge: Mapping[str, Any], identity: NodeIdentity, pinned: str, jti: str, boot_id: str
) -> Auth:
    """Return the payload of ``auth``, but for ``resume``, to the payload of a ``challenge``.

    Raises:
        AudienceError: the challenge is not of the relay whose URL is ``pinned``.
    """
    if challenge["audience"] != pinned:
        raise AudienceError
    # Counted from the relay's clock: a node's own may be off by more than a token lives.
    issued_s = challenge["server_time_ms"] // 1000
    claims = {
        "iss": identity.node_id,
        "sub": identity.node_id,
        "aud": pinned,
        "nonce": challenge["nonce"],
        "iat": issued_s,
        "exp": issued_s + _TOKEN_LIFE_S,
        "jti": jti,
        "scope": "device:connect",
        "token_class": "device_runtime",
    }
    return {
        "node_id": identity.node_id,
        "certificate": identity.chain_pem,
        "token": sign_token(identity.key, identity.kid, claims),
        "boot_id": boot_id,
    }
