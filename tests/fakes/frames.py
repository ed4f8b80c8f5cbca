"""A good payload of every frame of the session, and texts made of them."""

import json
from collections.abc import Mapping
from typing import Any, Final

from schemas.payloads import Cmd, ErrorEnvelope
from tests.fakes.signer import NODE_ID, NOW_MS

ERROR: Final[ErrorEnvelope] = {"code": "E_INTERNAL", "message": "It broke.", "suggested_fix": "Wait."}

COMMAND: Final[Cmd] = {
    "tool": f"sysecho.{NODE_ID}.echo.invoke",
    "arguments": {"message": "ping"},
    "deadline_ms": 2000,
    "sent_at_ms": NOW_MS,
    "correlation_id": "01HZX9K3M4P7Q8R9S0T1V2W3XW",
}

SESSION_ID: Final = "gogol_20261122_021500_00c0ffee"
REQUEST_ID: Final = "0d9c3f1e-5a7b-4c2d-8e6f-1a2b3c4d5e6f"

PAYLOADS: Final[Mapping[str, Mapping[str, Any]]] = {
    "challenge": {"nonce": "n" * 43, "audience": "https://relay.example", "server_time_ms": NOW_MS},
    "auth": {
        "node_id": NODE_ID,
        "certificate": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        "token": "aa.bb.cc",
        "boot_id": "01HZX9K3M4P7Q8R9S0T1V2W3XY",
    },
    "welcome": {
        "session_id": "01HZX9K3M4P7Q8R9S0T1V2W3XZ",
        "heartbeat_interval_ms": 60_000,
        "max_frame_bytes": 262_144,
        "server_time_ms": NOW_MS,
        "resumed": False,
    },
    "announce": {"manifest_version": "1.1.0"},
    "announce_ack": {"ok": True, "manifest_etag": "ab" * 32},
    "heartbeat": {"manifest_etag": "ab" * 32, "expires_at_ms": NOW_MS, "inflight": 0},
    "heartbeat_ack": {"server_time_ms": NOW_MS},
    "cmd": COMMAND,
    "cmd_ack": {"ok": True, "result": {"message": "ping"}},
    "cmd_cancel": {"reason": "deadline"},
    "renew": {"csr": "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"},
    "renew_ack": {
        "ok": True,
        "certificate": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        "roots": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        "endorsement": "e" * 86,
    },
    "retire": {},
    "retire_ack": {"ok": True},
    "bye": {"reason": "shutting_down"},
    "telemetry_lease": {"cap_id": "sysmetrics", "interval_ms": 1000, "include": ["cpu"], "ttl_ms": 30_000},
    "telemetry": {"cap_id": "sysmetrics", "sample": {"ts_ms": NOW_MS, "node_id": NODE_ID, "uptime_s": 1}},
    "findings": {
        "findings": [{"code": "unit_failed", "severity": "error", "count": 2, "since_ms": NOW_MS}],
    },
    "session_open": {
        "session_id": SESSION_ID,
        "caller_id": "ant",
        "owner": "ab" * 32,
        "tools": [{"name": "get_memory", "description": "Retrieve stored memories for context"}],
        "timeout_ms": 60_000,
    },
    "session_message": {"session_id": SESSION_ID, "message": "Hello"},
    "session_end": {"session_id": SESSION_ID, "reason": "ended"},
    "session_event": {"session_id": SESSION_ID, "message": "Hello"},
    "caller_tool": {
        "session_id": SESSION_ID,
        "request_id": REQUEST_ID,
        "tool": "get_memory",
        "arguments": {"about": "the weather"},
    },
    "caller_tool_cancel": {"session_id": SESSION_ID, "request_id": REQUEST_ID},
    "caller_tool_result": {"session_id": SESSION_ID, "request_id": REQUEST_ID, "result": {"found": 2}},
}

REPLIES: Final = frozenset(
    {
        "auth",
        "welcome",
        "announce_ack",
        "heartbeat_ack",
        "cmd_ack",
        "cmd_cancel",
        "renew_ack",
        "retire_ack",
    }
)
"""The types that must say what they answer."""


def message_id(number: int) -> str:
    """Return the ULID of ``number``."""
    return f"{number:026d}"


def message(type_: str, number: int = 1, *, answers: int | None = None, **payload: object) -> dict[str, Any]:
    """Return a good frame of ``type_`` as an object, with members of its payload overridden."""
    frame: dict[str, Any] = {
        "type": type_,
        "msg_id": message_id(number),
        "payload": {**PAYLOADS[type_], **payload},
    }
    if answers is not None or type_ in REPLIES:
        frame["in_reply_to"] = message_id(answers or 0)
    return frame


def frame_text(type_: str, number: int = 1, *, answers: int | None = None, **payload: object) -> str:
    return json.dumps(message(type_, number, answers=answers, **payload))
