"""Documents in files, and good JSON objects made hostile: what two readers read differently, or choke on."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jsonschema
import referencing
from referencing.jsonschema import DRAFT202012

from schemas.kinds import RFC_0001
from schemas.registry import SCHEME, SchemaRegistry
from schemas.times import iso
from tests.fakes.frames import ERROR, PAYLOADS, REQUEST_ID, SESSION_ID, message
from tests.fakes.shipped_kinds import examples
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedCa

Spoil = Callable[[bytes], bytes]

TWICE = "a duplicate key in an object"
NOT_FINITE = "a number that is not finite"
TOO_GREAT = "an integer beyond 2^53-1"
TOO_DEEP = "nested too deeply"
TOO_LARGE = "larger than the limit"
SURROGATE = "a lone surrogate"
NOT_UTF_8 = "not UTF-8"
NOT_JSON = "not JSON"

_DEPTH = 10_000


def _with(member: bytes) -> Spoil:
    """Put a member before the others."""
    return lambda good: b'{"x":' + member + b"," + good[1:]


def _repeated(good: bytes) -> bytes:
    """Say the first key twice, at first with another value."""
    key = good[1 : good.index(b":")]
    return b"{" + key + b":null," + good[1:]


def _repeated_escaped(good: bytes) -> bytes:
    """Say the first key twice, at first with its letters escaped."""
    key = good[2 : good.index(b":") - 1].decode("ascii")
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in key)
    return b'{"' + escaped.encode("ascii") + b'":null,' + good[1:]


HOSTILE: Final[Mapping[str, tuple[Spoil, str]]] = MappingProxyType(
    {
        "a key twice": (_repeated, TWICE),
        "a key twice, once escaped": (_repeated_escaped, TWICE),
        "NaN": (_with(b"NaN"), NOT_FINITE),
        "Infinity": (_with(b"Infinity"), NOT_FINITE),
        "minus Infinity": (_with(b"-Infinity"), NOT_FINITE),
        "a number that overflows": (_with(b"1e400"), NOT_FINITE),
        "a number of 5000 digits that overflows": (_with(b"9" * 5000 + b".0"), NOT_FINITE),
        "an exponent of 1000 digits": (_with(b"1e" + b"9" * 1000), NOT_FINITE),
        "2^53": (_with(b"9007199254740992"), TOO_GREAT),
        "2^53+1": (_with(b"9007199254740993"), TOO_GREAT),
        "minus 2^53+1": (_with(b"-9007199254740993"), TOO_GREAT),
        "an integer of 5000 digits": (_with(b"9" * 5000), TOO_GREAT),
        "a lone high surrogate": (_with(b'"\\ud800"'), SURROGATE),
        "a lone low surrogate": (_with(b'"\\udc00"'), SURROGATE),
        "surrogates the wrong way round": (_with(b'"\\udc00\\ud800"'), SURROGATE),
        "33 deep": (_with(b"[" * 33 + b"]" * 33), TOO_DEEP),
        "10000 arrays deep": (_with(b"[" * _DEPTH + b"]" * _DEPTH), TOO_DEEP),
        "10000 objects deep": (_with(b'{"":' * _DEPTH + b"0" + b"}" * _DEPTH), TOO_DEEP),
        "10000 deep and never closed": (lambda good: b"[" * _DEPTH + good, TOO_DEEP),
        "a string of 1 MiB": (_with(b'"' + b"a" * (1 << 20) + b'"'), TOO_LARGE),
        "1 MiB of white space": (lambda good: good + b" " * (1 << 20), TOO_LARGE),
        "a stray byte": (_with(b'"\xff"'), NOT_UTF_8),
        "an overlong slash": (_with(b'"\xc0\xaf"'), NOT_UTF_8),
        "a surrogate in UTF-8": (_with(b'"\xed\xa0\x80"'), NOT_UTF_8),
        "UTF-16": (lambda good: good.decode("ascii").encode("utf-16"), NOT_UTF_8),
        "a byte order mark": (lambda good: b"\xef\xbb\xbf" + good, NOT_JSON),
        "a NUL after the end": (lambda good: good + b"\0", NOT_JSON),
        "another document after the end": (lambda good: good + good, NOT_JSON),
        "a comment": (lambda good: good + b"//", NOT_JSON),
        "cut short": (lambda good: good[:-1], NOT_JSON),
        "nothing": (lambda _good: b"", NOT_JSON),
        "a leading zero": (_with(b"01"), NOT_JSON),
        "single quotes": (_with(b"'a'"), NOT_JSON),
        "a bare control character": (_with(b'"\x1b[31m"'), NOT_JSON),
    }
)
"""By what is wrong with it: how a good object in ASCII is spoilt, and the reason of ``strict_json``."""

NO_OBJECTS: Final = (b"[]", b"null", b"true", b"0", b'"{}"', b"[[{}]]")
"""Good JSON, but none of it an object."""


def document_file(directory: Path, name: str, document: object) -> None:
    """Write ``document`` to the file ``name``: a text as it is, anything else as JSON."""
    (directory / name).write_text(document if isinstance(document, str) else json.dumps(document))


def write_contract(directory: Path) -> None:
    """Write the documents that every process has into ``directory``, which this makes."""
    directory.mkdir()
    for ref, text in SchemaRegistry().documents.items():
        (directory / f"{ref}.json").write_bytes(text)


# --- A good example of each document.


OF_KINDS = examples(*RFC_0001)
SAMPLE = OF_KINDS["system.metrics.sample@1.0.0"]
REQUEST_ULID = "01HZX9K3M4P7Q8R9S0T1V2W3XA"
TOOL_ID = f"mcp.tool:sysecho.{NODE_ID}.echo.invoke"
CLAIMS = {"aud": "relay", "iat": 1, "exp": 2, "jti": "j"}
MANIFEST = json.loads(SimulatedCa().issue().manifest())
EVENTS = {
    "session_id": SESSION_ID,
    "events": [
        {
            "type": "caller_tool_request",
            "session_id": SESSION_ID,
            "cursor": 1,
            "request_id": REQUEST_ID,
            "tool": "get_memory",
            "arguments": {"about": "the weather"},
        }
    ],
    "next": 1,
    "more": False,
    "missed": False,
    "ended": False,
}
PRINCIPAL = {
    "tenant": "acme",
    "sub": "agent-1",
    "jti": REQUEST_ULID,
    "issuer": "https://relay.example",
    "scopes": [],
    "expires_s": 1,
    "kid": "ab" * 32,
}
NARROWED = {**PRINCIPAL, "kinds": ["linux.*"], "nodes": ["tag:greenhouse", "!site=north"]}
AGENT_CLAIMS = {
    **CLAIMS,
    "iss": "relay",
    "sub": "agent",
    "tenant": "acme",
    "scope": "tools:call:read_only",
    "token_class": "agent_runtime",
}
NOW_ISO = iso(NOW_MS)
MEASURED = {
    "ts_ms": NOW_MS,
    "uptime_s": 1,
    "cpu": {"usage_pct": 12.5},
    "mem": {"total_bytes": 2, "available_bytes": 1},
    "load": {"one": 0.5},
}
FOUND = {
    "node_id": NODE_ID,
    "label": "barn",
    "tags": ["gateway"],
    "online": True,
    "since_ms": NOW_MS,
    "kinds": ["system.metrics"],
    "measured": MEASURED,
}


def found(node: dict[str, Any]) -> dict[str, Any]:
    """Return a page of an answer that lists ``node``, and one that is not connected."""
    offline: dict[str, Any] = {"node_id": NODE_ID, "label": None, "tags": [], "online": False, "kinds": []}
    return {"nodes": [node, offline], "total": 51, "page": 2, "pages": 2}


EXAMPLES: dict[str, Any] = {
    **OF_KINDS,
    "capability@1.0.0": MANIFEST["capabilities"][0],
    "enrol.request@1.0.0": {
        "join_id": "01HZX9K3M4P7Q8R9S0T1V2W3XY",
        "csr": "PEM",
        "nonce": "n" * 43,
        "proof": "p" * 43,
    },
    "cluster.cmd@1.0.0": {
        "relay": REQUEST_ULID,
        "node_id": NODE_ID,
        "tool": f"sysecho.{NODE_ID}.echo.invoke",
        "arguments": {"message": "ping"},
        "deadline_ms": 2000,
        "sent_at_ms": 1,
        "correlation_id": REQUEST_ULID,
        "cost": 1.0,
        "idempotency": {
            "caller": ["https://relay.example", "acme", "agent"],
            "key": "ab" * 32,
            "arguments": "ab" * 32,
            "repeatable": False,
        },
    },
    "cluster.cancel@1.0.0": {"relay": REQUEST_ULID, "correlation_id": REQUEST_ULID},
    "cluster.answer@1.0.0": {"failure": {"name": "RATE_LIMITED", "retry_after_ms": 100}},
    "cluster.answer@1.1.0": {"ack": {"ok": False, "error": ERROR, "denied_by": "owner"}},
    "cluster.ca_request@1.0.0": {
        "relay": REQUEST_ULID,
        "retire": {"node_id": NODE_ID, "kid": "ab" * 32},
    },
    "cluster.ca_request@1.1.0": {
        "relay": REQUEST_ULID,
        "certify": {"use": "cluster", "public_key": "-----BEGIN PUBLIC KEY-----"},
    },
    "cluster.ca_answer@1.0.0": {"refused": {"reason": "id_taken", "retry_after_ms": 100}},
    "cluster.ask@1.0.0": {"relay": REQUEST_ULID, "id": REQUEST_ULID, "body": {}},
    "cluster.reply@1.0.0": {"reply": {}},
    "cluster.session_call@1.0.0": {
        "tool": "session_events",
        "arguments": {},
        "correlation_id": REQUEST_ULID,
        "stream": False,
        "principal": PRINCIPAL,
    },
    "cluster.session_call@1.1.0": {
        "tool": "session_events",
        "arguments": {},
        "correlation_id": REQUEST_ULID,
        "stream": False,
        "principal": NARROWED,
    },
    "cluster.telemetry_listen@1.0.0": {"node_id": NODE_ID, "principal": PRINCIPAL, "ttl_ms": 30_000},
    "cluster.telemetry_listen@1.1.0": {"node_id": NODE_ID, "principal": NARROWED, "ttl_ms": 30_000},
    "cluster.telemetry_updated@1.0.0": {
        "node_id": NODE_ID,
        "name": ["https://relay.example", "acme", "agent-1"],
    },
    "cluster.telemetry_read@1.0.0": {"uri": f"node://{NODE_ID}/telemetry", "principal": PRINCIPAL},
    "cluster.telemetry_read@1.1.0": {"uri": f"node://{NODE_ID}/telemetry", "principal": NARROWED},
    "cluster.session_event@1.0.0": {"correlation_id": REQUEST_ULID, "event": "{}"},
    "cluster.session_left@1.0.0": {
        "session_id": SESSION_ID,
        "tenant": "acme",
        "sub": "agent",
        "issuer": "https://relay.example",
        "plainly": True,
    },
    "cluster.frame@1.0.0": {
        "node_id": REQUEST_ULID.lower(),
        "session_id": REQUEST_ULID,
        "type": "telemetry",
        "payload": {},
    },
    "cluster.identity@1.0.0": {
        "relay": REQUEST_ULID,
        "url": "https://relay.example",
        "roots": ["ab" * 32],
    },
    "cluster.node@1.0.0": {"relay": REQUEST_ULID, "session_id": REQUEST_ULID, "connected": True},
    "cluster.findings@1.0.0": {
        "session_id": REQUEST_ULID,
        "findings": [{"code": "hot", "severity": "warning", "count": 1, "since_ms": None}],
    },
    "cluster.relay@1.0.0": {"url": "https://relay.example"},
    "cluster.name@1.0.0": {"node_id": NODE_ID, "tenant": "acme", "label": "pi", "tags": ["site=north"]},
    "cluster.leaf@1.0.0": {
        "kid": "ab" * 32,
        "serial": "1f",
        "node_id": NODE_ID,
        "tenant": "acme",
        "public_key": "cd" * 32,
        "issued_ms": NOW_MS,
        "not_after_ms": NOW_MS + 1,
    },
    "cluster.token_key@1.0.0": {
        "public_key": "ab" * 32,
        "made_ms": NOW_MS,
        "others_until_ms": NOW_MS,
        "root": "cd" * 32,
        "signature": "x" * 86,
    },
    "cluster.seal@1.0.0": {"sealed_ms": NOW_MS, "root": "cd" * 32, "signature": "x" * 86},
    "cluster.person@1.0.0": {"person": REQUEST_ULID, "name": "ada", "role": "member", "tenant": "*"},
    "cluster.person_revocation@1.0.0": {"person": REQUEST_ULID, "revoked_ms": NOW_MS},
    "cluster.redemption@1.0.0": {"what": "ab" * 32, "by": REQUEST_ULID, "expires_at_ms": NOW_MS + 1},
    "cluster.sign_in@1.0.0": {
        "method": "POST",
        "path": "/sign-in/passkey",
        "query": "",
        "headers": [["origin", "https://relay.example"]],
        "address": "192.0.2.1",
        "body": "e30",
    },
    "cluster.join_token_revocation@1.0.0": {"token": "ab" * 32, "revoked_ms": NOW_MS},
    "cluster.join_token_use@1.0.0": {
        "token": "ab" * 32,
        "use": 1,
        "node_id": NODE_ID,
        "expires_at_ms": NOW_MS + 1,
    },
    "cluster.token_revocation@1.0.0": {"jti": "a token of another issuer", "revoked_ms": NOW_MS},
    "cluster.revocation@1.0.0": {
        "kid": "ab" * 32,
        "serial": "1f",
        "not_after_ms": NOW_MS + 1,
        "revoked_ms": NOW_MS,
    },
    "enrol.response@1.0.0": {
        "certificate": "PEM",
        "roots": "PEM",
        "relay_url": "https://relay.example",
        "broker": "mqtts://mqtt.example:8883",
        "own_root": True,
        "nonce": "n" * 43,
        "server_time_ms": NOW_MS,
        "proof": "p" * 43,
    },
    "envelope@1.0.0": {
        "id": 1,
        "jsonrpc": "2.0",
        "method": "tools/call",
        "params": {"name": f"sysecho.{NODE_ID}.echo.invoke", "arguments": {"message": "ping"}},
        "meta": {},
        "idempotencyKey": "k",
    },
    "error@1.0.0": ERROR,
    "find_nodes.input@1.0.0": {
        "query": "greenhouse",
        "kind": "system.metrics",
        "tags": ["site=north", "gateway"],
        "online": True,
        "page": 2,
    },
    "find_nodes.input@1.1.0": {"query": "greenhouse", "finding": "hot", "page": 2},
    "find_nodes.output@1.0.0": found(FOUND),
    "find_nodes.output@1.1.0": found({**FOUND, "since": NOW_ISO, "measured": {**MEASURED, "ts": NOW_ISO}}),
    "session_message.input@1.0.0": {
        "node_id": NODE_ID,
        "message": "Hello",
        "context": {"caller_id": "ant", "caller_tools": [{"name": "get_memory"}]},
        "wait_ms": 1000,
    },
    "session_message.output@1.0.0": {**EVENTS, "node_id": NODE_ID},
    "session_message.output@1.1.0": {**EVENTS, "node_id": NODE_ID},
    "session_events.input@1.0.0": {"session_id": SESSION_ID, "after": 1, "wait_ms": 1000},
    "session_events.output@1.0.0": EVENTS,
    "session_events.output@1.1.0": EVENTS,
    "caller_tool_response.input@1.0.0": {
        "session_id": SESSION_ID,
        "request_id": REQUEST_ID,
        "result": {"found": 2},
        "error": None,
    },
    "caller_tool_response.output@1.0.0": {
        "session_id": SESSION_ID,
        "request_id": REQUEST_ID,
        "accepted": True,
    },
    "heartbeat@1.0.0": {
        "node_id": NODE_ID,
        "ts_ms": NOW_MS,
        "seq": 0,
        "manifest_etag": "ab" * 32,
        "expires_at_ms": NOW_MS,
    },
    "kind_call.input@1.0.0": {"nodes": ["greenhouse pi", "site=north", "*"], "capability": "sysmetrics"},
    "kind_call.output@1.0.0": {
        "results": [
            {"node_id": NODE_ID, "label": "barn", "manifest_etag": "ab" * 32, "ok": True, "result": SAMPLE},
            {"node_id": NODE_ID, "label": None, "manifest_etag": None, "ok": False, "error": ERROR},
        ],
        "asked": 2,
        "answered": 1,
        "failed": 1,
        "truncated": True,
    },
    "kind_call.input@1.1.0": {
        "nodes": "*",
        "sort": "cpu.usage_pct",
        "where": "mem.available_bytes < 1000000",
        "top": 5,
        "fields": ["cpu.usage_pct", "mem"],
        "cursor": NODE_ID,
        "for_s": 10,
    },
    "kind_call.output@1.1.0": {
        "results": [
            {"node_id": NODE_ID, "label": "barn", "ok": True, "values": {"cpu.usage_pct": 93.5}},
            {"node_id": NODE_ID, "label": None, "manifest_etag": None, "ok": False, "error": ERROR},
        ],
        "asked": 201,
        "answered": 200,
        "failed": 1,
        "matched": 7,
        "lacking": 1,
        "failures": [{"code": "E_NODE_OFFLINE", "nodes": 1}],
        "next": NODE_ID,
        "truncated": True,
        "followed": {
            "times": ["2025-10-09T08:53:20.007Z"],
            "numbers": [{"name": "cpu.usage_pct", "min": 1, "mean": 1.5, "max": 2}],
        },
    },
    "manifest@1.0.0": MANIFEST,
    "manifest@1.1.0": MANIFEST,
    "tool_io@1.0.0": {
        "tool": TOOL_ID,
        "input": {"message": "ping"},
        "version": {"major": 1, "minor": 0, "patch": 0},
        "metadata": {},
    },
    "token.agent_runtime@1.0.0": AGENT_CLAIMS,
    "token.agent_runtime@1.1.0": {
        **AGENT_CLAIMS,
        "kinds": ["linux.*", "linux.journal", "!linux.processes"],
        "nodes": ["tag:greenhouse", "site=n*", "barn pi", NODE_ID, "!tag:secret"],
    },
    "token.device_runtime@1.0.0": {
        **CLAIMS,
        "iss": NODE_ID,
        "sub": NODE_ID,
        "nonce": "n" * 43,
        "scope": "device:connect",
        "token_class": "device_runtime",
    },
    "token.agent_external@1.0.0": {
        **CLAIMS,
        "aud": ["relay", "another"],
        "nbf": 1,
        "iss": "https://issuer.example",
        "sub": "auth0|an agent",
        "tenant": "acme",
        "scope": "openid tools:call:read_only [x]",
        "token_class": "agent_runtime",
    },
    "token.header@1.0.0": {"alg": "EdDSA", "kid": "k", "typ": "JWT"},
    "token.header_external@1.0.0": {"alg": "Ed25519", "kid": "a:b/1=", "typ": "at+jwt"},
    "token.key_external@1.0.0": {"kty": "OKP", "crv": "Ed25519", "kid": "k", "x": "x" * 43, "use": "sig"},
    **{f"session.{type_}@1.0.0": message(type_) for type_ in PAYLOADS},
    "session.heartbeat_ack@1.1.0": message(
        "heartbeat_ack", broker_etag="ab" * 32, heartbeat_interval_ms=300_000
    ),
    "session.welcome@1.1.0": message("welcome", kinds=["linux.health", "system.echo"]),
    "session.cmd_ack@1.1.0": {
        **message("cmd_ack"),
        "payload": {"ok": False, "error": ERROR, "denied_by": "owner"},
    },
}


# --- The other implementation of JSON Schema, over the same documents.


@cache
def second_opinion(registry: SchemaRegistry, ref: str) -> jsonschema.Draft202012Validator:
    """Return the document ``ref`` as ``jsonschema`` reads it."""
    return jsonschema.Draft202012Validator(registry.document(ref), registry=_resources(registry))


@cache
def _resources(registry: SchemaRegistry) -> Any:
    resources = [
        (SCHEME + ref, DRAFT202012.create_resource(registry.document(ref))) for ref in registry.documents
    ]
    return referencing.Registry().with_resources(resources)
