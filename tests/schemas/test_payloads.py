from collections.abc import Mapping
from typing import Any, NotRequired, get_args, get_type_hints, is_typeddict

import pytest

from schemas import enrolment, payloads
from schemas.frames import document_of
from schemas.registry import SchemaRegistry

FRAMES: dict[str, Any] = {
    "challenge": payloads.Challenge,
    "auth": payloads.Auth,
    "welcome": payloads.Welcome,
    "announce_ack": payloads.AnnounceAck,
    "heartbeat": payloads.Heartbeat,
    "heartbeat_ack": payloads.HeartbeatAck,
    "cmd": payloads.Cmd,
    "cmd_ack": payloads.CmdAck,
    "cmd_cancel": payloads.CmdCancel,
    "renew": payloads.Renew,
    "renew_ack": payloads.RenewAck,
    "retire_ack": payloads.RetireAck,
    "bye": payloads.Bye,
    "session_open": payloads.SessionOpen,
    "session_message": payloads.SessionText,
    "session_end": payloads.SessionEnd,
    "session_event": payloads.SessionText,
    "caller_tool": payloads.CallerToolRequest,
    "caller_tool_cancel": payloads.CallerToolCancel,
    "caller_tool_result": payloads.CallerToolResult,
    "telemetry_lease": payloads.TelemetryLease,
    "telemetry": payloads.Telemetry,
}
JSON_TYPES = {"string": str, "integer": int, "boolean": bool, "object": Mapping, "array": list}

CALLER_TOOL = ["properties", "payload", "properties", "tools", "items"]
CALLER_ERROR = ["properties", "payload", "oneOf", 1, "properties", "error"]


def members(type_: type) -> tuple[set[str], set[str]]:
    """Return the members of a type that must be there, and all of them."""
    hints = get_type_hints(type_, include_extras=True)
    required = {name for name, hint in hints.items() if getattr(hint, "__origin__", None) is not NotRequired}
    return required, set(hints)


def stated(schema: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The same of a document; of one with alternatives, what must be there in each and may be in any."""
    forms = schema.get("oneOf", [schema])
    required = set.intersection(*(set(form.get("required", [])) for form in forms))
    return required, set().union(*(form["properties"] for form in forms))


def alternatives(type_: Any, schema: dict[str, Any]) -> list[tuple[type, dict[str, Any]]]:
    """Pair the types of a union with the alternatives of its document; one type is paired with all of it."""
    types = get_args(type_)
    return list(zip(types, schema["oneOf"], strict=True)) if types else [(type_, schema)]


@pytest.mark.parametrize("frame", FRAMES)
def test_the_type_of_a_payload_has_the_members_of_its_document(registry: SchemaRegistry, frame: str) -> None:
    document = registry.document(document_of(frame))["properties"]["payload"]
    for type_, form in alternatives(FRAMES[frame], document):
        assert members(type_) == stated(form)


@pytest.mark.parametrize(
    ("type_", "ref", "path"),
    [
        (payloads.ErrorEnvelope, "error@1.0.0", []),
        (enrolment.EnrolRequest, "enrol.request@1.0.0", []),
        (enrolment.EnrolResponse, "enrol.response@1.0.0", []),
        (payloads.CallerToolFailure, "session.caller_tool_result@1.0.0", CALLER_ERROR),
        (payloads.CallerTool, "session.session_open@1.0.0", CALLER_TOOL),
        (payloads.Manifest, "manifest@1.1.0", []),
        (payloads.Attestation, "manifest@1.1.0", ["properties", "node_attestation"]),
        (payloads.Fingerprint, "manifest@1.1.0", ["properties", "hw_fingerprint"]),
        (payloads.Capability, "manifest@1.1.0", ["$defs", "Capability"]),
        (payloads.Constraints, "manifest@1.1.0", ["$defs", "Capability", "properties", "constraints"]),
    ],
)
def test_the_type_of_a_document_has_its_members(
    registry: SchemaRegistry, type_: type, ref: str, path: list[str | int]
) -> None:
    document: Any = registry.document(ref)
    for name in path:
        document = document[name]
    assert members(type_) == stated(document)


@pytest.mark.parametrize("frame", FRAMES)
def test_each_member_has_the_type_that_its_document_states(registry: SchemaRegistry, frame: str) -> None:
    document = registry.document(f"session.{frame}@1.0.0")["properties"]["payload"]
    for type_, alternative in alternatives(FRAMES[frame], document):
        hints = get_type_hints(type_)
        for form in alternative.get("oneOf", [alternative]):
            for name, schema in form["properties"].items():
                check_type(hints[name], schema)


def check_type(hint: Any, schema: dict[str, Any]) -> None:
    """Assert that a member's ``hint`` is what ``schema`` states of it."""
    if "const" in schema:
        assert get_args(hint) == (schema["const"],)
    if (json_type := schema.get("type")) is not None:
        plain = getattr(hint, "__origin__", hint)
        assert plain is JSON_TYPES[json_type] or (json_type == "object" and is_typeddict(plain))


def test_no_type_is_left_out() -> None:
    known = {type_ for type_ in vars(payloads).values() if is_typeddict(type_)}
    others = {
        "ErrorEnvelope",
        "Manifest",
        "Attestation",
        "Fingerprint",
        "Capability",
        "Constraints",
        "CallerTool",
        "CallerToolFailure",
    }
    of_frames = {type_ for union in FRAMES.values() for type_ in get_args(union) or (union,)}
    # What others are made of, and what is passed on without the rest of its frame.
    parts = {payloads.Refused, payloads.Renewed, payloads.OpenFinding}
    assert known == {*of_frames, *parts, *(getattr(payloads, name) for name in others)}
