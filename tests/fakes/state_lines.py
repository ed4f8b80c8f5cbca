"""Lines by which a relay decides something of a kind of state: one for each number."""

from collections.abc import Callable, Mapping

from relay.state.join_tokens import digest_of
from relay.state.ledger import Entry
from schemas.keys import base64url
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, TENANT, key_named

NUMBERS = range(3)
NODES = [f"{NODE_ID[:-1]}{number}" for number in NUMBERS]
JOIN_ID = "01HZX9K3M4P7Q8R9S0T1V2W3X4"
LATER_MS = NOW_MS + DAY_MS
_PUBLIC_KEYS = [bytes(key_named(f"token key {number}").verify_key).hex() for number in NUMBERS]
_ENDORSED = {"root": "ab" * 32, "signature": base64url(bytes(64))}


def person_id(number: int) -> str:
    return f"{JOIN_ID[:-1]}{number}"


def token_made(join_id: str = JOIN_ID) -> Entry:
    """Return the line that makes a join token."""
    return {
        "action": "create",
        "ts_ms": NOW_MS,
        "id": join_id,
        "tenant": TENANT,
        "key": base64url(bytes(32)),
        "expires_at_ms": LATER_MS,
        "uses": len(NUMBERS),
    }


LINE: Mapping[str, Callable[[int], Entry]] = {
    "token_revocation": lambda number: {"jti": f"jti-{number}", "revoked_at_ms": NOW_MS},
    "revocation": lambda number: {
        "action": "revoke",
        "ts_ms": NOW_MS,
        "kid": f"{number:064x}",
        "node_id": NODES[number],
        "reason": "lost",
    },
    "join_token_revocation": lambda number: {
        "action": "revoke_other",
        "ts_ms": NOW_MS,
        "token": digest_of(str(number)),
    },
    "join_token_use": lambda number: {
        "action": "spend",
        "ts_ms": NOW_MS,
        "id": JOIN_ID,
        "node_id": NODES[number],
    },
    "leaf": lambda number: {
        "action": "issue",
        "ts_ms": NOW_MS,
        "node_id": NODES[number],
        "tenant": TENANT,
        "public_key": "ab" * 32,
        "kid": f"{number:064x}",
        "serial": f"{number + 1}f",
        "not_after_ms": LATER_MS,
    },
    "person": lambda number: {
        "action": "person",
        "ts_ms": NOW_MS,
        "person": person_id(number),
        "name": f"ada-{number}",
        "role": "member",
        "tenant": TENANT,
    },
    "person_revocation": lambda number: {
        "action": "revoke",
        "ts_ms": NOW_MS,
        "person": person_id(number),
    },
    "redemption": lambda number: {
        "action": "claim",
        "ts_ms": NOW_MS,
        "what": f"{number:064x}",
        "by": JOIN_ID,
        "expires_at_ms": LATER_MS,
    },
    "token_key": lambda number: {
        "public_key": _PUBLIC_KEYS[number],
        "made_ms": number,
        "others_until_ms": 0,
        **_ENDORSED,
    },
    "seal": lambda number: {"sealed_ms": number, **_ENDORSED, "root": f"{number:064x}"},
    "pin": lambda number: {"ts_ms": NOW_MS, "node_id": NODES[number], "pinned": True},
}
