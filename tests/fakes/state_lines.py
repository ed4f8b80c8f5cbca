"""Lines of every kind of state, as the relay writes them: the sample that each row of the table has."""

from collections.abc import Iterable, Mapping, Sequence

from relay.state.join_tokens import digest_of
from relay.state.kinds import KINDS, StateFile, StateKind
from relay.state.ledger import Entry
from schemas.keys import base64url
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, key_named

KID, OTHER_KID, SERVER_KID = "ab" * 32, "cd" * 32, "ef" * 32
JOIN_ID = "01HZX9K3M4P7Q8R9S0T1V2W3X4"
KEY = bytes(key_named("a token key").verify_key).hex()
_SIGNATURE = base64url(bytes(64))
_LATER = NOW_MS + DAY_MS
_LEAF = {"tenant": TENANT, "public_key": KID, "not_after_ms": _LATER}
_NAMES = {"tenant": TENANT, "label": "pump", "tags": ["gateway", "site=north"]}

LINES: Mapping[str, Sequence[Entry]] = {
    "leaf": [
        _LEAF | {"action": "issue", "ts_ms": NOW_MS, "node_id": node_id, "kid": kid, "serial": serial}
        for node_id, kid, serial in ((NODE_ID, KID, "1f"), (OTHER_NODE_ID, OTHER_KID, "2f"))
    ],
    "server_certificate": [
        {
            "action": "serve",
            "ts_ms": NOW_MS,
            "name": "relay",
            "kid": SERVER_KID,
            "serial": "3f",
            "not_after_ms": _LATER,
        }
    ],
    "revocation": [{"action": "revoke", "ts_ms": NOW_MS, "kid": KID, "node_id": NODE_ID, "reason": "lost"}],
    "root_rotation": [
        {
            "action": "rotate",
            "ts_ms": NOW_MS,
            "root": KID,
            "previous": OTHER_KID,
            "previous_until_ms": _LATER,
        }
    ],
    "join_token": [
        {
            "action": "create",
            "ts_ms": NOW_MS,
            "id": join_id,
            "tenant": TENANT,
            "key": base64url(bytes(32)),
            "expires_at_ms": _LATER,
            "uses": 2,
        }
        for join_id in (JOIN_ID, JOIN_ID[:-1] + "5")
    ],
    "join_token_use": [
        {"action": "spend", "ts_ms": NOW_MS, "id": JOIN_ID, "node_id": NODE_ID},
        {"action": "count", "ts_ms": NOW_MS, "id": JOIN_ID, "use": 1, "node_id": NODE_ID},
    ],
    "join_token_revocation": [
        {"action": "revoke", "ts_ms": NOW_MS, "id": JOIN_ID[:-1] + "5"},
        {"action": "revoke_other", "ts_ms": NOW_MS, "token": digest_of("another")},
    ],
    "token_revocation": [{"jti": jti, "revoked_at_ms": NOW_MS} for jti in ("one", "another")],
    "token_key": [
        {
            "public_key": KEY,
            "made_ms": 0,
            "others_until_ms": 0,
            "root": KID,
            "signature": base64url(bytes(64)),
        },
    ],
    "issued_token": [
        {
            "jti": "one",
            "tenant": TENANT,
            "sub": "ant",
            "scopes": ["read_only"],
            "audience": "https://hub.example",
            "issued_at_ms": NOW_MS,
            "expires_at_ms": _LATER,
        }
    ],
    "name": [
        _NAMES | {"action": "name", "ts_ms": NOW_MS, "node_id": NODE_ID},
        {"action": "forget", "ts_ms": NOW_MS, "node_id": OTHER_NODE_ID},
    ],
}


def lines_of(file: StateFile, kinds: Iterable[StateKind] = KINDS) -> Sequence[Entry]:
    """Return the lines of every kind in ``file``: what is made before what is said of it."""
    return [line for kind in sorted(kinds, key=_made_first) if kind.file is file for line in LINES[kind.name]]


def _made_first(kind: StateKind) -> int:
    return list(LINES).index(kind.name)
