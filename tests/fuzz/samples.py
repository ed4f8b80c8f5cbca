"""Good documents of every kind, from which hostile ones are made."""

import base64
import json
from typing import Any, Final

from relay.pki.roots import make_server_key, server_key_to_pem
from relay.state.tokens import key_id
from schemas.certificates import endorse, make_csr
from schemas.enrolment import NODE as SPEAKER
from schemas.enrolment import JoinToken, proven
from schemas.frames import FRAME_TYPES, SUBPROTOCOL, Role
from schemas.identity import certificates_in, first_certificate_in, to_pem
from schemas.keys import base64url, private_key_to_pem
from schemas.manifest import etag_of
from schemas.session import SENDS, SessionState
from schemas.tokens import sign_token
from tests.fakes.documents import HOSTILE
from tests.fakes.frames import ERROR, SESSION_ID, frame_text
from tests.fakes.hostile_texts import HOSTILE_TEXTS
from tests.fakes.node_end import device_token
from tests.fakes.raw_http import ws_frame
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
AGENT_CLAIMS: Final = {
    "iss": AUDIENCE,
    "aud": AUDIENCE,
    "sub": "agent-1",
    "tenant": "acme",
    "scope": "tools:call:read_only sessions:message",
    "iat": NOW_MS // 1000,
    "exp": NOW_MS // 1000 + 60,
    "jti": "jti-1",
    "token_class": "agent_runtime",
}
AGENT_TOKENS: Final = (sign_token(NODE.key, key_id(NODE.public_key), AGENT_CLAIMS).encode(),)
JWK: Final = {
    "kty": "OKP",
    "crv": "Ed25519",
    "alg": "EdDSA",
    "use": "sig",
    "kid": "key-1",
    "x": base64url(bytes(key_named("another issuer").verify_key)),
}
JWKS: Final = (
    compact({"keys": [JWK]}),
    compact({"keys": [JWK, {**JWK, "kid": "ours"}, {**JWK, "x": base64url(NODE.public_key)}]}),
)
LEAVES: Final = (NODE.leaf_pem.encode(), CA.root_pem.encode(), (NODE.leaf_pem + CA.root_pem).encode())
LEAVES_DER: Final = tuple(der for pem in LEAVES for der in certificates_in(pem.decode()))
REQUESTS: Final = (make_csr(NODE.key, NODE_ID).encode(),)
REQUESTS_DER: Final = tuple(base64.b64decode(b"".join(pem.splitlines()[1:-1])) for pem in REQUESTS)
NEW_ROOT: Final = first_certificate_in(SimulatedCa("next").root_pem)
ENDORSEMENT: Final = endorse(CA.key, to_pem([NEW_ROOT]))
KEYS: Final = (private_key_to_pem(key_named("a key")).encode(),)
SERVER_KEYS: Final = (server_key_to_pem(make_server_key(bytes)).encode(), *KEYS)
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

LABEL: Final = "Greenhouse pi"
DURATIONS: Final = (b"15m", b"90s", b"1h30m", b"30d", b"1d2h3m4s5ms", b"999999999d")
NODE_NAMES: Final = (
    LABEL.encode(),
    "Gewächshaus Süd".encode(),
    b"xn--Gewchshaus-s5a",
    b"gateway,site=north",
    b"0-1 2~{|}",
    NODE_ID.encode(),
)
REFERENCES: Final = (LABEL.encode(), NODE_ID.encode(), NODE_ID[:8].upper().encode())
QUERIES: Final = (
    b"view=kinds&names=dashed",
    b"view=tools&nodes=%b,Greenhouse+pi&kinds=system.metrics,sysecho&tags=site=north,gateway"
    % NODE_ID.encode(),
    b"nodes=a%2Cb&tags=tag%3Agateway&nodes=%20",
)
CURSORS: Final = (base64url(f"12 sysecho.{NODE_ID}.echo.invoke".encode()).encode(), b"0 sys.a.b.c")
RESOURCES: Final = (
    b"nodes?cursor=%b" % NODE_ID.encode(),
    b"changes?since_ms=1760000000000",
    b"%b?since_ms=1760000000000&cap=sysmetrics" % NODE_ID.encode(),
    b"Greenhouse%20pi?since_ms=%d9%a1",
)
TRACES: Final = (b"00-%b-%b-01" % (b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"),)

LOOPBACK_REQUESTS: Final = (
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:8701\r\nAccept: */*\r\n\r\n",
    b'GET /metrics HTTP/1.0\nHost: localhost\nIf-None-Match: "a"\n folded\n\n',
)
META: Final = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "progressToken": 7}
CALL: Final = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": NAMES[0].decode(), "arguments": {"message": "ping"}, "_meta": META},
}
BODIES: Final = (
    compact(CALL),
    compact({"jsonrpc": "2.0", "id": "a", "method": "tools/list", "params": {"cursor": CURSORS[0].decode()}}),
    compact({"jsonrpc": "2.0", "id": 2, "method": "resources/read", "params": {"uri": "fleet://nodes"}}),
    compact({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}),
    compact({"jsonrpc": "2.0", "id": 3, "result": {}}),
)
SOCKET_LINES: Final = (
    compact({"jsonrpc": "2.0", "id": 1, "method": "caller_tool", "params": {"tool": "t", "arguments": {}}}),
    compact({"jsonrpc": "2.0", "id": "x", "method": "session_attach", "params": {"session_id": SESSION_ID}}),
    compact({"jsonrpc": "2.0", "method": "node"}),
)
LINES: Final = (b"one\r\ntwo\n\n" + b"x" * 70 + b"\nthree\n",)
EVENTS: Final = (
    b'event: message\r\ndata: {"jsonrpc":"2.0"}\r\n\r\n: ping\n\ndata:one\ndata: two\n\n',
    b"id: 7\rdata: x\r\r",
)
WEBSOCKET_FRAMES: Final = (
    ws_frame(b"hello") + ws_frame(b"", opcode=9) + ws_frame(b"x" * 130, fin=False),
    b"\x81\x05hello\x88\x02\x03\xe8",
    b"\x81\x85\x01\x02\x03\x04igo`n",
)
SECRET: Final = "c2VjcmV0LXNlY3JldC1zZWNyZXQ"
TOOL_RESULTS: Final = (
    compact({"content": [{"type": "text", "text": "It broke."}], "isError": True}),
    compact(
        {"content": [], "isError": True, "_meta": {"edge-kubelet/error": {**ERROR, "correlation_id": "0"}}}
    ),
    compact({"content": [], "_meta": {"edge-kubelet/error": {**ERROR, "retry_after_ms": 5}}, "token": "x"}),
)
RPC_ERRORS: Final = (
    compact({"code": -32602, "message": "Unknown tool: x"}),
    compact({"code": -32001, "message": "late", "data": {"canonical": "TIMEOUT", "retryable": True}}),
    compact({"code": -32603, "message": "Server returned an error response"}),
)
SCHEMAS: Final = (
    compact({"type": "object", "properties": {"message": {"type": "string", "pattern": "^(a+)+$"}}}),
    compact(
        {
            "type": "object",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": ["string", "null"]}},
            "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"enum": [1, {}]}, "z": {"$dynamicRef": "#z"}},
            "allOf": [{"required": ["x"]}, {"not": {"$ref": "#/allOf/0"}}],
        }
    ),
)
TOOLS: Final = (
    compact(
        {
            "name": "tool",
            "description": "Does it.",
            "inputSchema": {"type": "object"},
            "annotations": {"readOnlyHint": True, "destructiveHint": False},
            "_meta": {
                "edge-kubelet/safety-class": "read_only",
                "edge-kubelet/schema-ref": "mcp://schemas/system.echo.invoke.input@1.0.0",
            },
        }
    ),
)
BROKER_LINES: Final = (
    b"[12] [WRN] a slow consumer\x1b[31m",
    b"[12] [INF] listening",
    b"panic: runtime error",
)


def _in_state(state: str, *frames: str) -> bytes:
    return "\n".join((state, *frames)).encode()


def _sent_by(role: Role) -> list[str]:
    """Return a good frame of every type that an end sends in an open session."""
    return [frame_text(type_, number) for number, type_ in enumerate(SENDS[role][SessionState.OPEN], 1)]


_ANNOUNCED: Final = FRAMES[len(FRAME_TYPES)].decode()
_AUTH: Final[dict[str, Any]] = {
    "node_id": NODE_ID,
    "certificate": NODE.leaf_pem,
    "token": "@TOKEN@",
    "boot_id": "0" * 26,
}
_ANSWER: Final = frame_text("cmd_ack", 2, result=SAMPLE).replace("0" * 26, "@CALL@")
NODE_LINES: Final = (
    _in_state("open", *_sent_by(Role.NODE)),
    _in_state(
        "open",
        *[frame_text("telemetry", n) for n in range(8)],
        *[frame_text("heartbeat", n) for n in range(8)],
    ),
    _in_state("open", _ANNOUNCED),
    _in_state(
        "call", frame_text("heartbeat"), _ANSWER, _ANSWER, *[frame_text("cmd_ack", n) for n in range(40)]
    ),
    _in_state(
        "stranger", frame_text("auth", **_AUTH).replace("0" * 26, "@ASKED@", 1), frame_text("heartbeat")
    ),
    _in_state("open", "!\x89\x80\0\0\0\0", frame_text("bye")),
)
_UPGRADED: Final = (
    "Upgrade: websocket\r",
    "Connection: Upgrade\r",
    "Sec-WebSocket-Accept: @ACCEPT@\r",
    f"Sec-WebSocket-Protocol: {SUBPROTOCOL}\r",
)
RELAY_LINES: Final = (
    _in_state("open", *_sent_by(Role.RELAY)),
    _in_state("open", *[frame_text("telemetry_lease", n) for n in range(8)], frame_text("cmd", 50)),
    _in_state(
        "call",
        frame_text("cmd_cancel").replace("0" * 26, "@CALL@"),
        frame_text("cmd", 9),
        frame_text("cmd", 9),
    ),
    _in_state("stranger", frame_text("challenge"), frame_text("welcome")),
    _in_state("asked", frame_text("welcome").replace("0" * 26, "@ASKED@"), frame_text("session_open", 3)),
    _in_state("asked", frame_text("bye", retry_after_ms=5)),
    _in_state("upgrade", "HTTP/1.1 101 Switching Protocols\r", *_UPGRADED, "\r", ""),
    _in_state("upgrade", "HTTP/1.1 503 Busy\r", "Retry-After: 7\r", "Content-Length: 4\r", "\r", "busy"),
)
