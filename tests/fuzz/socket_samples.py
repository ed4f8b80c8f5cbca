"""Good lines and documents of the sockets of one machine."""

from typing import Any, Final

from tests.fakes.caller_tools import ANT, MEMORY, SEND
from tests.fakes.frames import ERROR
from tests.fakes.signer import NODE_ID, NOW_MS
from tests.fuzz.samples import compact


def _request(number: int, method: str, **params: object) -> bytes:
    return compact({"jsonrpc": "2.0", "id": number, "method": method, "params": params})


CLIENT_LINES: Final = (
    b"\n".join(
        (
            _request(1, "node"),
            _request(2, "session_attach", session_id=ANT),
            _request(3, "caller_tool", tool="get_memory", arguments={"a": [1, None]}, caller_id="ant"),
            _request(4, "session_reply", message="Hello"),
        )
    ),
    b"\n".join(
        (_request(1, "caller_tool", tool="get_memory"), b"\r", _request(1, "node"), b"[]", b'{"id":1}')
    ),
)


def _notification(type_: str, **params: object) -> bytes:
    return compact({"type": type_, "params": params})


_LENT: Final = [{"inputSchema": {"type": "object"}, **MEMORY}, {**SEND, "title": "Send"}]
_GREETED: Final = (
    compact({"jsonrpc": "2.0", "id": 1, "result": {"node_id": NODE_ID}}),
    compact({"jsonrpc": "2.0", "id": 2, "result": {}}),
)
DAEMON_LINES: Final = (
    b"\n".join((*_GREETED, _notification("caller_tools_config", caller_id="ant", tools=_LENT))),
    b"\n".join(
        (
            _notification("caller_tools_config", caller_id="ant", tools=_LENT),
            *_GREETED,
            _notification("session_message", session_id=ANT, message="Hello"),
            _notification("caller_tools_config", caller_id="ant", tools=[]),
        )
    ),
    b"\n".join(
        (
            _GREETED[0],
            compact({"jsonrpc": "2.0", "id": 2, "error": {"code": -32000, "message": "no", "data": ERROR}}),
            compact({"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": "no"}}),
        )
    ),
)

_ANY: Final[dict[str, Any]] = {
    "version": "1.0.0",
    "now_ms": NOW_MS,
    "uptime_s": 5.5,
    "watchdog_s": None,
    "pid": 1,
    "resident_bytes": 1 << 24,
    "open_files": 9,
    "max_open_files": 1024,
    "tasks": 3,
    "ready": False,
}
_OUTCOMES: Final = [{"code": "ok", "hop": "", "count": 2}, {"code": "E_INTERNAL", "hop": "node", "count": 1}]
STATUSES: Final = (
    compact(
        {
            **_ANY,
            "subsystems": {
                name: {"ready": name != "relay", "live": True, "state": "x"}
                for name in ("relay", "broker", "caller tools")
            },
            "node_id": NODE_ID,
            "certificate_expires_at_ms": NOW_MS + 86_400_000,
            "relay": {
                "url": "https://a.example",
                "relays": ["https://a.example"],
                "connected_to": None,
                "sessions": 2,
                "acknowledged_s_ago": 3.5,
                "heartbeat_s": 60.0,
            },
            "broker": {"url": "none", "published": [], "relay_received": None},
            "manifest": {"etag": "ab" * 32, "expires_at_ms": NOW_MS},
            "calls": {"in_flight": 0, "outcomes": _OUTCOMES},
            "faults": 0,
        }
    ),
    compact(
        {
            **_ANY,
            "subsystems": {
                name: {"ready": True, "live": True, "state": "x"} for name in ("calls", "cluster")
            },
            "public_url": "https://a.example",
            "listen": "127.0.0.1:8700",
            "broker": {"url": "mqtt://a:1883", "missing": 0},
            "nodes": {"known": 1, "connected": 1, "silent": {NODE_ID: "node"}},
            "calls": {"outcomes": _OUTCOMES},
            "certificates": {"root": NOW_MS},
            "audit_head": "ab" * 32,
        }
    ),
)
