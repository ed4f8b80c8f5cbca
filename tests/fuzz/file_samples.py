"""Good contents of every file that a program reads, from which damaged ones are made."""

import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any, Final

from relay.audit.files import GENESIS, line_hash, opening
from relay.state.certificates import IssuedLeaf, IssuedServer, revocations, rotation
from schemas.keys import base64url
from tests.fakes.kind_package import INPUT, OUTPUT, ROW
from tests.fakes.signer import NODE_ID, NOW_MS, TENANT
from tests.fuzz.samples import JOIN_KEY, LABEL, NODE, compact

_UNTIL_MS: Final = NOW_MS + 1_000_000
_LEAF: Final = IssuedLeaf(NODE_ID, TENANT, NODE.kid, NODE.public_key, 7, _UNTIL_MS, NOW_MS, "0" * 26)
_SERVER: Final = IssuedServer("hub.example", "ab" * 32, 8, _UNTIL_MS, NOW_MS)
_GRANT: Final = {
    "action": "create",
    "ts_ms": NOW_MS,
    "id": "0" * 26,
    "tenant": TENANT,
    "key": base64url(JOIN_KEY),
    "expires_at_ms": _UNTIL_MS,
    "uses": 2,
    "label": LABEL,
    "tags": ["gateway"],
}
_NAMED: Final = {"ts_ms": NOW_MS, "node_id": NODE_ID}


def _lines(*entries: Any) -> bytes:
    return b"".join(compact(entry) + b"\n" for entry in entries)


LEDGERS: Final = (
    _lines(
        _LEAF.entry(),
        _SERVER.entry(),
        *revocations([_LEAF], "lost", NOW_MS),
        rotation("aa", "bb", _UNTIL_MS, NOW_MS),
    ),
    _lines(
        _GRANT,
        {"action": "spend", "ts_ms": NOW_MS, "id": "0" * 26, "node_id": NODE_ID},
        {"action": "revoke", "ts_ms": NOW_MS, "id": "0" * 26},
    ),
    _lines({"jti": "jti-1", "revoked_at_ms": NOW_MS}, {"jti": "jti-2", "revoked_at_ms": NOW_MS}),
    _lines(
        {**_NAMED, "action": "name", "tenant": TENANT, "label": LABEL, "tags": ["site=north"]},
        {**_NAMED, "action": "name", "tenant": TENANT, "label": None, "tags": []},
        {**_NAMED, "action": "forget"},
    ),
)


def _chain() -> Iterator[bytes]:
    prev = GENESIS
    for number in range(3):
        facts = {"ts_ms": NOW_MS + number, "tenant": TENANT, "decision": "allowed", "code": None}
        line = opening(prev) + b"," + compact(facts)[1:]
        prev = line_hash(prev, line)
        yield line + b"\n"


AUDIT: Final = b"".join(_chain())
AUDIT_HEAD: Final = sha256(AUDIT.splitlines()[-1]).hexdigest()
VERIFIED_HEADS: Final = (compact({"head": AUDIT_HEAD, "verified_at_ms": NOW_MS}),)
KEPT_SETTINGS: Final = (
    compact({"public_url": "https://hub.example:8700", "broker": "mqtts://hub.example", "tenant": TENANT}),
    compact({"own_broker": "0.0.0.0:8883"}),
)
TOLD_SETTINGS: Final = (
    compact({"log_level": "warning", "kinds": "acme.oven,acme.kiln", "config": "/etc/kubelet.toml"}),
)
STORED_CONFIGS: Final = (
    compact(
        {
            "relay": "https://hub.example:8700",
            "broker": "mqtts://hub.example:8883",
            "own_root": True,
            "insecure_plain_transports": False,
        }
    ),
    compact(
        {
            "relay": "http://127.0.0.1:8700",
            "broker": None,
            "own_root": False,
            "insecure_plain_transports": True,
        }
    ),
)
NODE_FILES: Final = (compact({"ant": "ab" * 32, "bee": "cd" * 32}), b"%d\n" % NOW_MS, b"-1", b"1_000")
_RELAY_FILE: Final = b"""# a relay
public_url = "https://hub.example"
listen = "0.0.0.0:8700"
view = "kinds"
log_level = "debug"
kinds = ["acme.relay_board"]
no_broker = true
"""
_CLIENT_FILE: Final = b"""# mine
model = "m"

[servers.edge]
command = "old"

[servers.edge.env]
A = "1"

[servers.other]
command = "x"

[[profiles]]
name = "p"
"""
RELAY_SETTINGS: Final = (
    _RELAY_FILE,
    b'broker = "mqtts://mqtt.example"\ncaller_timeout = "15m"\nviews = 1\n[table]\na = 1\n',
)
NODE_SETTINGS: Final = (
    b'relay = "https://hub.example"\nbroker = "mqtts://mqtt.example"\nheartbeat = "60s"\nttl = "15m"\n',
    b'loopback_port = 8701\nno_broker = false\nkinds = ["a.b", "c,d"]\nsystem_roots = true\n',
)
SURFACE: Final = {
    "name": "tool",
    "title": None,
    "description": "Does it.",
    "input_schema": {"type": "object"},
}
PINS: Final = (
    json.dumps({"version": 1, "servers": {"server": {"tool": SURFACE}}}).encode(),
    json.dumps({"version": 1, "servers": {"server": {"tool": {**SURFACE, "title": "Other"}}}}).encode(),
)
BACKUP: Final = {"ca/root.pem": b"root", "ca/ledger.jsonl": b"{}\n"}
SERVER: Final = {"command": "relay", "args": ["stdio", "--url", "https://hub.example"]}
CLIENT_CONFIGURATIONS: Final = (
    json.dumps({"servers": {"other": {"command": "x"}}, "theme": "dark"}, indent=2).encode(),
    _CLIENT_FILE,
    b"",
)
KIND_PACKAGE: Final = b"\0".join(compact(part) for part in (ROW, INPUT, OUTPUT))
