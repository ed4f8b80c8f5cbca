"""Good documents of every kind, from which hostile ones are made."""

import base64
import json
from typing import Final

from schemas.certificates import make_csr
from schemas.enrolment import NODE as SPEAKER
from schemas.enrolment import JoinToken, proven
from schemas.frames import FRAME_TYPES
from schemas.identity import certificates_in
from schemas.keys import private_key_to_pem
from schemas.manifest import etag_of
from tests.fakes.documents import HOSTILE
from tests.fakes.frames import ERROR, frame_text
from tests.fakes.hostile_texts import HOSTILE_TEXTS
from tests.fakes.node_end import device_token
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedCa, key_named

CA: Final = SimulatedCa()
NODE: Final = CA.issue()
AUDIENCE: Final = "https://relay.example"
CHALLENGE: Final = {"nonce": "n" * 43, "audience": AUDIENCE, "server_time_ms": NOW_MS}
CLAIMS: Final = {
    "iss": NODE_ID,
    "sub": NODE_ID,
    "aud": AUDIENCE,
    "nonce": "n" * 43,
    "iat": NOW_MS // 1000,
    "exp": NOW_MS // 1000 + 60,
    "jti": "jti-1",
    "scope": "device:connect",
    "token_class": "device_runtime",
}
MANIFEST: Final = NODE.manifest()
HEARTBEAT: Final = {
    "node_id": NODE_ID,
    "ts_ms": NOW_MS,
    "seq": 1,
    "manifest_etag": etag_of(MANIFEST),
    "expires_at_ms": NOW_MS + 60_000,
}
DISK: Final = {"mount": "/", "fs_type": "ext4", "total_bytes": 2, "available_bytes": 1}
SAMPLE: Final = {
    "ts_ms": NOW_MS,
    "node_id": NODE_ID,
    "uptime_s": 1,
    "load": {"one": 0.5, "five": 1.0, "fifteen": 1e-7},
    "disk": [DISK],
}


def compact(value: object) -> bytes:
    """Return ``value`` as JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


JSON: Final = (MANIFEST, compact(HEARTBEAT), compact(SAMPLE), b"[1,-2.5e-3,true,null]", b'"\\ud83d\\ude00"')
FRAMES: Final = (
    *(frame_text(type_).encode() for type_ in FRAME_TYPES),
    b'{"type":"announce","msg_id":"%b","payload":%b}' % (b"0" * 26, MANIFEST),
    frame_text("cmd_ack", result=SAMPLE).encode(),
)
ERRORS: Final = (
    compact(ERROR),
    compact({**ERROR, "code": "E_RATE_LIMITED", "retry_after_ms": 1500, "correlation_id": "0" * 26}),
)
RESULTS: Final = (
    compact(SAMPLE),
    compact({"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}),
    *(compact({**SAMPLE, "disk": [{**DISK, "mount": text}]}) for text in HOSTILE_TEXTS.values()),
)
TOKENS: Final = (device_token(NODE, CHALLENGE).encode(),)
LEAVES: Final = (NODE.leaf_pem.encode(), CA.root_pem.encode(), (NODE.leaf_pem + CA.root_pem).encode())
LEAVES_DER: Final = tuple(der for pem in LEAVES for der in certificates_in(pem.decode()))
REQUESTS: Final = (make_csr(NODE.key, NODE_ID).encode(),)
REQUESTS_DER: Final = tuple(base64.b64decode(b"".join(pem.splitlines()[1:-1])) for pem in REQUESTS)
KEYS: Final = (private_key_to_pem(key_named("a key")).encode(),)
JOIN_KEY: Final = b"k" * 32
JOIN_TOKENS: Final = (JoinToken("0" * 26, JOIN_KEY, b"f" * 32).text().encode(),)
ENROL_REQUEST: Final = compact(
    proven({"join_id": "0" * 26, "csr": REQUESTS[0].decode(), "nonce": "n" * 43}, JOIN_KEY, SPEAKER)
)
NAMES: Final = (f"sysecho.{NODE_ID}.echo.invoke".encode(), f"sys-{NODE_ID}-sysmetrics-snapshot".encode())
TOPICS: Final = (f"$devices/{NODE_ID}/announce".encode(), f"$devices/{NODE_ID}/identity".encode())
ADDRESSES: Final = (
    b"mqtts://mqtt.example:8883",
    b"[::1]:1883",
    b"wss://Relay.Example:443/",
    b"http://127.0.0.1:8700",
)
HOSTILE_DOCUMENTS: Final = tuple(
    document for spoil, _ in HOSTILE.values() if len(document := spoil(compact(HEARTBEAT))) < 1 << 15
)
