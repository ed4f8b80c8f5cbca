import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import jsonschema_rs
import pytest

from schemas.document_store import SCHEME
from schemas.errors import Failure
from schemas.kinds import SYSTEM_ECHO, KindRegistry
from schemas.registry import TOOL_PREFIX, SchemaRegistry
from schemas.violations import ViolationError
from tests.fakes.documents import document_file
from tests.fakes.frames import ERROR, PAYLOADS, REQUEST_ID, SESSION_ID, message
from tests.fakes.second_opinion import second_opinion
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedCa

if TYPE_CHECKING:
    from schemas.registry import Validator

DOCUMENTS = Path(__file__).parents[2] / "schemas" / "documents"
REFS = sorted(path.name.removesuffix(".json") for path in DOCUMENTS.iterdir())

SAMPLE = {
    "ts_ms": NOW_MS,
    "node_id": NODE_ID,
    "uptime_s": 12,
    "cpu": {"cores": 4, "usage_pct": 12.5, "per_core_pct": [0, 100]},
    "mem": {"total_bytes": 1, "available_bytes": 0},
    "load": {"one": 0, "five": 0.5, "fifteen": 1.25},
    "disk": [{"mount": "/", "fs_type": "ext4", "total_bytes": 2, "available_bytes": 1}],
}
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
EXAMPLES: dict[str, Any] = {
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
    "cluster.ca_request@1.0.0": {
        "relay": REQUEST_ULID,
        "retire": {"node_id": NODE_ID, "kid": "ab" * 32},
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
    "cluster.telemetry_listen@1.0.0": {"node_id": NODE_ID, "principal": PRINCIPAL, "ttl_ms": 30_000},
    "cluster.telemetry_updated@1.0.0": {
        "node_id": NODE_ID,
        "name": ["https://relay.example", "acme", "agent-1"],
    },
    "cluster.telemetry_read@1.0.0": {"uri": f"node://{NODE_ID}/telemetry", "principal": PRINCIPAL},
    "cluster.session_event@1.0.0": {"correlation_id": REQUEST_ULID, "event": "{}"},
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
    "find_nodes.output@1.0.0": {
        "nodes": [
            {
                "node_id": NODE_ID,
                "label": "barn",
                "tags": ["gateway"],
                "online": True,
                "since_ms": NOW_MS,
                "kinds": ["system.metrics"],
                "measured": {
                    "ts_ms": NOW_MS,
                    "uptime_s": 1,
                    "cpu": {"usage_pct": 12.5},
                    "mem": {"total_bytes": 2, "available_bytes": 1},
                    "load": {"one": 0.5},
                },
            },
            {"node_id": NODE_ID, "label": None, "tags": [], "online": False, "kinds": []},
        ],
        "total": 51,
        "page": 2,
        "pages": 2,
    },
    "session_message.input@1.0.0": {
        "node_id": NODE_ID,
        "message": "Hello",
        "context": {"caller_id": "ant", "caller_tools": [{"name": "get_memory"}]},
        "wait_ms": 1000,
    },
    "session_message.output@1.0.0": {**EVENTS, "node_id": NODE_ID},
    "session_events.input@1.0.0": {"session_id": SESSION_ID, "after": 1, "wait_ms": 1000},
    "session_events.output@1.0.0": EVENTS,
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
    "manifest@1.0.0": MANIFEST,
    "manifest@1.1.0": MANIFEST,
    "system.echo.invoke.input@1.0.0": {"message": "ping"},
    "system.echo.invoke.output@1.0.0": {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID},
    "system.metrics.sample@1.0.0": SAMPLE,
    "system.metrics.snapshot.input@1.0.0": {"include": ["cpu", "disk"]},
    "system.metrics.subscribe.input@1.0.0": {"interval_ms": 1000},
    "tool_io@1.0.0": {
        "tool": TOOL_ID,
        "input": {"message": "ping"},
        "version": {"major": 1, "minor": 0, "patch": 0},
        "metadata": {},
    },
    "token.agent_runtime@1.0.0": {
        **CLAIMS,
        "iss": "relay",
        "sub": "agent",
        "tenant": "acme",
        "scope": "tools:call:read_only",
        "token_class": "agent_runtime",
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
}


# Documents of outside issuers contain members that are ignored here; a call of a kind, those of its verb.
OPEN = {"token.agent_external@1.0.0", "token.key_external@1.0.0", "kind_call.input@1.0.0"}


def test_every_file_is_served_by_its_reference_and_nothing_else_is(registry: SchemaRegistry) -> None:
    assert sorted(registry.documents) == REFS


@pytest.mark.parametrize("ref", REFS)
def test_a_document_compiles_under_both_validators(registry: SchemaRegistry, ref: str) -> None:
    document = registry.document(ref)
    jsonschema.Draft202012Validator.check_schema(document)
    jsonschema_rs.meta.validate(document)
    registry.load(ref)
    second_opinion(registry, ref)


@pytest.mark.parametrize("ref", sorted(EXAMPLES))
def test_both_validators_take_a_good_example_and_refuse_a_stray_member_unless_the_document_is_open(
    registry: SchemaRegistry, ref: str
) -> None:
    good = EXAMPLES[ref]
    registry.load(ref).check(good)
    second_opinion(registry, ref).validate(good)
    stray = {**good, "stray": 1}
    assert registry.load(ref).is_valid(stray) == (ref in OPEN)
    assert second_opinion(registry, ref).is_valid(stray) == (ref in OPEN)


@pytest.mark.parametrize("ref", sorted(EXAMPLES))
def test_both_validators_miss_each_required_member(registry: SchemaRegistry, ref: str) -> None:
    good = EXAMPLES[ref]
    for name in registry.document(ref).get("required", []):
        lacking = {member: value for member, value in good.items() if member != name}
        assert not registry.load(ref).is_valid(lacking), name
        assert not second_opinion(registry, ref).is_valid(lacking), name


def test_every_document_has_an_example_but_the_bundle() -> None:
    assert set(REFS) - set(EXAMPLES) == {"system.metrics@1.0.0"}


@pytest.mark.parametrize("ref", REFS)
def test_every_object_that_a_document_describes_is_closed_or_says_why_not(
    registry: SchemaRegistry, ref: str
) -> None:
    open_objects = []

    def walk(schema: object, path: str) -> None:
        if isinstance(schema, dict):
            if schema.get("type") == "object" and schema.get("additionalProperties") is not False:
                open_objects.append(path)
            for name, inner in schema.items():
                walk(inner, f"{path}/{name}")
        elif isinstance(schema, list):
            for index, inner in enumerate(schema):
                walk(inner, f"{path}/{index}")

    walk(registry.document(ref), ref)
    # Judged by a document of their own: the manifest, a tool's arguments, result and samples. A call's
    # other members are checked by their own users.
    assert set(open_objects) <= OPEN | {
        "envelope@1.0.0/properties/params",
        "envelope@1.0.0/properties/meta",
        "tool_io@1.0.0/properties/input",
        "tool_io@1.0.0/properties/metadata",
        "session.announce@1.0.0/properties/payload",
        "session.cmd@1.0.0/properties/payload/properties/arguments",
        "cluster.cmd@1.0.0/properties/arguments",
        "cluster.ask@1.0.0/properties/body",
        "cluster.reply@1.0.0/oneOf/0/properties/reply",
        "cluster.frame@1.0.0/properties/payload",
        "cluster.session_call@1.0.0/properties/arguments",
        "session.cmd_ack@1.0.0/properties/payload/oneOf/0/properties/result",
        "session.telemetry@1.0.0/properties/payload/properties/sample",
        "kind_call.output@1.0.0/properties/results/items/properties/result",
        # Judged by the schema that a caller lends, and by the dialect that it is of.
        "session.caller_tool@1.0.0/properties/payload/properties/arguments",
        "session.session_open@1.0.0/properties/payload/properties/tools/items/properties/inputSchema",
        "session_message.input@1.0.0/properties/context/properties/caller_tools/items/properties/inputSchema",
        "session_message.output@1.0.0/properties/events/items/properties/arguments",
        "session_events.output@1.0.0/properties/events/items/properties/arguments",
    }


def test_both_manifest_ids_hold_the_same_rules(registry: SchemaRegistry) -> None:
    first, second = registry.document("manifest@1.0.0"), registry.document("manifest@1.1.0")
    assert first.pop("$id") == "mcp://schemas/manifest@1.0.0"
    assert second.pop("$id") == "mcp://schemas/manifest@1.1.0"
    assert first == second
    assert first["properties"]["manifest_version"] == {"type": "string", "const": "1.1.0"}


def test_the_metrics_bundle_holds_the_three_single_documents(registry: SchemaRegistry) -> None:
    assert registry.document("system.metrics@1.0.0")["$defs"] == {
        "snapshot_input": registry.document("system.metrics.snapshot.input@1.0.0"),
        "subscribe_input": registry.document("system.metrics.subscribe.input@1.0.0"),
        "sample": registry.document("system.metrics.sample@1.0.0"),
    }


def test_the_manifest_admits_exactly_the_registered_kinds(
    registry: SchemaRegistry, kinds: KindRegistry
) -> None:
    capability = registry.document("manifest@1.1.0")["$defs"]["Capability"]
    assert capability["properties"]["kind"]["enum"] == [kind.name for kind in kinds]


def test_every_kind_is_clamped_in_the_manifest(registry: SchemaRegistry, kinds: KindRegistry) -> None:
    clamps = registry.document("manifest@1.1.0")["$defs"]["Capability"]["allOf"]
    assert {clamp["if"]["properties"]["kind"]["const"] for clamp in clamps} == {kind.name for kind in kinds}


def test_the_short_names_are_those_of_rfc_0001_section_3_2(kinds: KindRegistry) -> None:
    short_names = {kind.name: kind.short for kind in kinds}
    assert short_names["system.metrics"] == "sys"
    assert short_names["system.echo"] == "sysecho"


def test_the_error_document_admits_exactly_the_codes_of_the_table(registry: SchemaRegistry) -> None:
    assert set(registry.document("error@1.0.0")["properties"]["code"]["enum"]) == {
        failure.value.code for failure in Failure
    }


@pytest.mark.parametrize(
    ("ref", "value"),
    [
        pytest.param("system.echo.invoke.input@1.0.0", {"message": "ok\n"}, id="a-line-feed-at-the-end"),
        pytest.param("system.echo.invoke.input@1.0.0", {"message": "caf\xe9"}, id="a-letter-beyond-ascii"),
        pytest.param("system.echo.invoke.input@1.0.0", {"message": "\x7f"}, id="delete"),
        pytest.param("system.echo.invoke.input@1.0.0", {"message": "a" * 1025}, id="1025-characters"),
        pytest.param("system.echo.invoke.input@1.0.0", {}, id="no-message"),
        pytest.param("system.echo.invoke.input@1.0.0", {"message": "a", "b": 1}, id="an-invented-argument"),
        pytest.param(
            "system.metrics.subscribe.input@1.0.0", {"interval_ms": 999}, id="an-interval-under-a-second"
        ),
        pytest.param("system.metrics.subscribe.input@1.0.0", {}, id="no-interval"),
        pytest.param("system.metrics.snapshot.input@1.0.0", {"include": ["cpu", "cpu"]}, id="a-part-twice"),
        pytest.param("system.metrics.snapshot.input@1.0.0", {"include": ["gpu"]}, id="an-unknown-part"),
        pytest.param(
            "system.metrics.sample@1.0.0",
            {**SAMPLE, "load": {"one": float("nan"), "five": 0, "fifteen": 0}},
            id="nan",
        ),
        pytest.param("heartbeat@1.0.0", {**EXAMPLES["heartbeat@1.0.0"], "seq": True}, id="a-boolean-number"),
        pytest.param(
            "heartbeat@1.0.0",
            {**EXAMPLES["heartbeat@1.0.0"], "node_id": NODE_ID + "\n"},
            id="an-id-and-a-line",
        ),
        pytest.param("error@1.0.0", {**ERROR, "code": "E_TIMEOUT"}, id="an-unknown-code"),
        pytest.param("error@1.0.0", {**ERROR, "retry_after_ms": -1}, id="a-negative-delay"),
        pytest.param("token.header@1.0.0", {"alg": "none", "kid": "k"}, id="the-algorithm-none"),
        pytest.param("token.header@1.0.0", {"alg": "EdDSA", "kid": "k", "jku": "u"}, id="a-key-url"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(registry: SchemaRegistry, ref: str, value: object) -> None:
    with pytest.raises(ViolationError):
        registry.load(ref).check(value)
    assert not registry.load(ref).is_valid(value)


def test_a_digit_of_another_script_is_no_digit(registry: SchemaRegistry) -> None:
    # ARABIC-INDIC DIGIT ONE, which the pattern of a schema reference would take if \d meant any digit.
    capability = {**MANIFEST["capabilities"][0], "schema_ref": "mcp://schemas/system.metrics@\u0661.0.0"}
    assert not registry.load("manifest@1.1.0").is_valid({**MANIFEST, "capabilities": [capability]})


def test_the_largest_values_are_allowed(registry: SchemaRegistry) -> None:
    registry.load("system.echo.invoke.input@1.0.0").check({"message": "~" * 1024})
    registry.load("system.metrics.subscribe.input@1.0.0").check({"interval_ms": 60_000})


def test_a_violation_says_where_and_which_rule_but_not_what(registry: SchemaRegistry) -> None:
    frame = message("cmd", tool="SECRET")
    with pytest.raises(ViolationError) as caught:
        registry.load("session.cmd@1.0.0").check(frame)
    assert (caught.value.where, caught.value.rule) == ("/payload/tool", "pattern")
    assert str(caught.value) == "/payload/tool violates pattern"
    assert "SECRET" not in repr(caught.value)


def test_a_violation_of_the_whole_value_is_at_the_root(registry: SchemaRegistry) -> None:
    with pytest.raises(ViolationError) as caught:
        registry.load("system.echo.invoke.input@1.0.0").check([])
    assert (caught.value.where, caught.value.rule) == ("/", "type")


def test_a_member_name_in_a_violation_is_made_printable(tmp_path: Path) -> None:
    ref = "open@1.0.0"
    document_file(tmp_path, f"{ref}.json", {"$id": SCHEME + ref, "additionalProperties": {"type": "integer"}})
    with pytest.raises(ViolationError) as caught:
        SchemaRegistry(tmp_path).load(ref).check({"\x1b[31m\n" + "x" * 500: "y"})
    assert caught.value.where.startswith("/\\x1b[31m\\n")
    assert len(caught.value.where) == 128


@pytest.mark.parametrize(
    "ref", ["", "manifest", "manifest@9.9.9", "../documents/manifest@1.1.0", "mcp://schemas/manifest@1.1.0"]
)
def test_an_unknown_reference_is_a_key_error_and_never_a_path(registry: SchemaRegistry, ref: str) -> None:
    with pytest.raises(KeyError):
        registry.load(ref)
    with pytest.raises(KeyError):
        registry.document(ref)


def test_a_document_is_served_in_its_canonical_bytes(registry: SchemaRegistry) -> None:
    served = registry.documents["error@1.0.0"]
    assert served.startswith(b'{"$id":"mcp://schemas/error@1.0.0","$schema":')
    assert json.loads(served) == json.loads((DOCUMENTS / "error@1.0.0.json").read_text())


def test_what_is_handed_out_cannot_be_used_to_change_the_registry(registry: SchemaRegistry) -> None:
    taken = registry.document("error@1.0.0")
    taken["properties"].clear()
    assert registry.document("error@1.0.0")["properties"]
    with pytest.raises(TypeError):
        registry.documents["error@1.0.0"] = b"{}"  # type: ignore[index]


def test_a_document_is_compiled_once(registry: SchemaRegistry) -> None:
    assert registry.load("error@1.0.0") is registry.load("error@1.0.0")
    assert registry.load("error@1.0.0") is not registry.load("heartbeat@1.0.0")


def test_a_text_that_is_none_fits_nothing_and_is_not_repeated(registry: SchemaRegistry) -> None:
    validator = registry.load("system.echo.invoke.input@1.0.0")
    assert not validator.is_valid({"message": "a secret \ud800"})
    with pytest.raises(ViolationError) as caught:
        validator.check({"message": "a secret \ud800"})
    assert "secret" not in str(caught.value)


def number(ref: str, **rules: object) -> dict[str, object]:
    return {"$id": SCHEME + ref, "type": "number", **rules}


def test_equal_documents_of_two_registries_share_one_validator_and_a_changed_one_has_its_own(
    tmp_path: Path,
) -> None:
    compiled: dict[str, Validator] = {}
    document_file(tmp_path, "a@1.0.0.json", number("a@1.0.0", maximum=1))
    before = SchemaRegistry(tmp_path, compiled=compiled)
    first = before.load("a@1.0.0")
    # Other spaces and another order: the same document.
    text = json.dumps(dict(reversed(number("a@1.0.0", maximum=1).items())), indent=8)
    document_file(tmp_path, "a@1.0.0.json", text)
    assert SchemaRegistry(tmp_path, compiled=compiled).load("a@1.0.0") is first
    assert len(compiled) == 1
    document_file(tmp_path, "a@1.0.0.json", number("a@1.0.0", maximum=2))
    changed = SchemaRegistry(tmp_path, compiled=compiled).load("a@1.0.0")
    assert (first.is_valid(2), changed.is_valid(2)) == (False, True)
    assert before.load("a@1.0.0") is first


def test_the_key_of_a_validator_is_the_sha_256_of_the_canonical_document(tmp_path: Path) -> None:
    compiled: dict[str, Validator] = {}
    document_file(tmp_path, "a@1.0.0.json", number("a@1.0.0"))
    SchemaRegistry(tmp_path, compiled=compiled).load("a@1.0.0")
    assert list(compiled) == [sha256(b'{"$id":"mcp://schemas/a@1.0.0","type":"number"}').hexdigest()]


def test_registries_share_nothing_unless_they_are_told_to(registry: SchemaRegistry) -> None:
    assert SchemaRegistry().load("error@1.0.0") is not registry.load("error@1.0.0")


@pytest.mark.parametrize(
    "middle",
    [
        pytest.param({"$ref": "mcp://schemas/c@1.0.0"}, id="directly"),
        pytest.param({"$ref": "mcp://schemas/c@1.0.0#"}, id="with-a-fragment"),
        pytest.param({"allOf": [{"not": {"not": {"$ref": "mcp://schemas/c@1.0.0"}}}]}, id="deep-inside"),
        pytest.param({"$dynamicRef": "mcp://schemas/c@1.0.0"}, id="dynamically"),
    ],
)
def test_a_document_whose_referenced_document_differs_shares_no_validator(
    tmp_path: Path, middle: dict[str, Any]
) -> None:
    compiled: dict[str, Validator] = {}
    validators = []
    for limit in (1, 2):
        # Two steps away, and in a circle.
        document_file(tmp_path, "a@1.0.0.json", {"$id": SCHEME + "a@1.0.0", "$ref": SCHEME + "b@1.0.0"})
        document_file(tmp_path, "b@1.0.0.json", {"$id": SCHEME + "b@1.0.0", **middle})
        properties = {"next": {"$ref": SCHEME + "a@1.0.0"}, "self": {"$ref": "#"}}
        document_file(tmp_path, "c@1.0.0.json", number("c@1.0.0", maximum=limit, properties=properties))
        document_file(tmp_path, "d@1.0.0.json", number("d@1.0.0"))
        documents = SchemaRegistry(tmp_path, compiled=compiled)
        validators.append(documents.load("a@1.0.0"))
        documents.load("d@1.0.0")
    assert [validator.is_valid(2) for validator in validators] == [False, True]
    # `a` twice; `d`, which refers to nothing, once.
    assert len(compiled) == 3


def test_a_property_that_is_called_like_a_reference_is_none(tmp_path: Path) -> None:
    properties = {"$ref": {"type": "string"}}
    document_file(tmp_path, "a@1.0.0.json", {"$id": SCHEME + "a@1.0.0", "properties": properties})
    assert not SchemaRegistry(tmp_path).load("a@1.0.0").is_valid({"$ref": 1})


def test_a_validator_cannot_be_changed_by_who_holds_it(registry: SchemaRegistry) -> None:
    shared = registry.load_envelope()
    for name in ("is_valid", "check", "_compiled", "more"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(shared, name, lambda _: True)
    assert not registry.load_envelope().is_valid({})


def test_the_envelope_is_the_document_of_that_name(registry: SchemaRegistry) -> None:
    assert registry.load_envelope() is registry.load("envelope@1.0.0")


def test_the_documents_of_a_tool_are_those_of_its_kind_and_verb(
    registry: SchemaRegistry, kinds: KindRegistry
) -> None:
    for kind in kinds:
        for verb in kind.verbs.values():
            tool = registry.load_tool_io(f"mcp.tool:{kind.short}.{NODE_ID}.any_cap.{verb.name}")
            assert tool.input is registry.load(verb.input_ref)
            assert tool.output is registry.load(verb.output_ref)


def test_the_validators_of_a_tool_judge_what_that_tool_takes_and_gives(registry: SchemaRegistry) -> None:
    echo = registry.load_tool_io(TOOL_ID)
    echo.input.check(EXAMPLES["system.echo.invoke.input@1.0.0"])
    echo.output.check(EXAMPLES["system.echo.invoke.output@1.0.0"])
    assert not echo.input.is_valid(EXAMPLES["system.echo.invoke.output@1.0.0"])
    assert not echo.output.is_valid(EXAMPLES["system.echo.invoke.input@1.0.0"])


def test_the_pair_of_validators_cannot_be_changed_by_who_holds_it(registry: SchemaRegistry) -> None:
    tool = registry.load_tool_io(TOOL_ID)
    with pytest.raises(AttributeError):
        tool.input = registry.load_envelope()  # type: ignore[misc]


@pytest.mark.parametrize(
    "tool_id",
    [
        pytest.param("", id="nothing"),
        pytest.param("mcp.tool:", id="no-name"),
        pytest.param(TOOL_ID.removeprefix(TOOL_PREFIX), id="no-prefix"),
        pytest.param(TOOL_PREFIX + TOOL_ID, id="the-prefix-twice"),
        pytest.param(TOOL_ID.upper(), id="upper-case"),
        pytest.param(TOOL_PREFIX + TOOL_ID.removeprefix(TOOL_PREFIX).replace(".", "-"), id="the-dashed-name"),
        pytest.param(TOOL_ID + "\n", id="a-line-feed-at-the-end"),
        pytest.param(f" {TOOL_ID}", id="a-space-before"),
        pytest.param(f"mcp.tool:nokind.{NODE_ID}.echo.invoke", id="an-unknown-kind"),
        pytest.param(f"mcp.tool:system.echo.{NODE_ID}.echo.invoke", id="the-long-name-of-a-kind"),
        pytest.param(f"mcp.tool:sysecho.{NODE_ID}.echo.snapshot", id="the-verb-of-another-kind"),
        pytest.param(f"mcp.tool:sys.{NODE_ID}.sysmetrics.stream", id="a-verb-without-a-row"),
        pytest.param(f"mcp.tool:sysecho.{NODE_ID}.echo.__class__", id="a-name-of-the-machinery"),
        pytest.param("mcp.tool:system.echo.invoke.input@1.0.0", id="a-document"),
        pytest.param("mcp.tool:../documents/error@1.0.0", id="a-path"),
        pytest.param("mcp.tool:" + "a" * 100_000, id="very-long"),
    ],
)
def test_what_is_no_tool_has_no_documents(registry: SchemaRegistry, tool_id: str) -> None:
    with pytest.raises(KeyError) as caught:
        registry.load_tool_io(tool_id)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_a_tool_of_a_kind_that_only_this_process_knows_has_its_documents(tmp_path: Path) -> None:
    verb = replace(SYSTEM_ECHO.verbs["invoke"], name="ring", input_ref="in@1.0.0", output_ref="out@1.0.0")
    own = KindRegistry([replace(SYSTEM_ECHO, name="own.bell", short="bell", verbs={"ring": verb})])
    for ref, kind in (("in@1.0.0", "integer"), ("out@1.0.0", "string")):
        document_file(tmp_path, f"{ref}.json", {"$id": SCHEME + ref, "type": kind})
    documents = SchemaRegistry(tmp_path, own)
    bell = documents.load_tool_io(f"mcp.tool:bell.{NODE_ID}.door.ring")
    assert (bell.input.is_valid(1), bell.output.is_valid("ding")) == (True, True)
    with pytest.raises(KeyError):
        documents.load_tool_io(TOOL_ID)


def test_a_tool_whose_documents_are_not_here_has_none(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        SchemaRegistry(tmp_path).load_tool_io(TOOL_ID)
