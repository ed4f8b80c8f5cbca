"""Targets: JSON, manifests, frames, and the other documents that programs send each other."""

from functools import partial
from typing import Any, Final

from pydantic_core import from_json

from schemas.canonical import is_canonical, jcs
from schemas.errors import Failure, ToolError
from schemas.frames import MAX_FRAME_BYTES, FrameError, FrameReader, Role, known_announce
from schemas.kinds import MANIFEST_REF, KindRegistry
from schemas.manifest import MAX_MANIFEST_BYTES
from schemas.registry import SchemaRegistry
from schemas.session import ProtocolError, SessionMachine, SessionState
from schemas.strict_json import JsonReason, StrictJsonError, loads
from schemas.text import inert, printable_values
from schemas.trust import BEHIND_CAPABILITIES, Known, Outcome, TrustRules, read_tail
from tests.fakes.hostile_texts import is_clean, strings_in
from tests.fakes.seconds import Seconds
from tests.fakes.signer import ECHO, NODE_ID, NOW_MS
from tests.fuzz import samples
from tests.fuzz.target import REFUSED, Target, text_of, tried

_REGISTRY = SchemaRegistry()
_READER = FrameReader(_REGISTRY)
_RULES = TrustRules(_REGISTRY, KindRegistry())
_KNOWN = Known({samples.NODE.kid: samples.NODE.identity()})
_ERROR = _REGISTRY.load("error@1.0.0")
_HEARTBEAT = _REGISTRY.load("heartbeat@1.0.0")
_SAMPLE = _REGISTRY.load("system.metrics.sample@1.0.0")
_MANIFEST = _REGISTRY.load(MANIFEST_REF)
_LIMIT = 1 << 16
_FIXED: Final = {"node_attestation", "attestation", "signer"}
_NOT_JSON: Final = {JsonReason.NOT_JSON, JsonReason.NOT_UTF_8, JsonReason.LONE_SURROGATE}


def strict_json(data: bytes) -> None:
    """Another parser, in another language, reads the same value, and refuses what is not JSON."""
    try:
        value = loads(data, max_bytes=_LIMIT)
    except StrictJsonError as error:
        assert is_clean(error.reason)  # noqa: PT017 - there is no pytest around a fuzzer
        assert error.reason not in _NOT_JSON or _second_reading(data) is REFUSED  # noqa: PT017 - as above
        return
    assert _second_reading(data) == value
    assert loads(data.decode("utf-8"), max_bytes=_LIMIT) == value
    assert is_canonical(data, value) is (_canonical(value) == data)
    assert all(map(is_clean, strings_in(printable_values(value))))
    for text in strings_in(value):
        assert is_clean(inert(text, 64))
        assert " " not in inert(text, 64)


def _second_reading(data: bytes) -> Any:
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError:
        return REFUSED


def _canonical(value: Any) -> bytes | None:
    try:
        return jcs(value)
    except ValueError:
        return None  # a fraction beyond 2^53 that is whole has no canonical form


def manifest(data: bytes) -> None:
    """Whatever is not the manifest that the node signed is not accepted, and nothing is raised."""
    verdict = _RULES.accept(data, NODE_ID, NOW_MS, _KNOWN)
    assert (verdict.outcome is Outcome.ACCEPTED) is (data == samples.MANIFEST)


def signed_manifest(data: bytes) -> None:
    """The same where hash and signature fit whatever the node has been made to sign."""
    members = tried(lambda: loads(data, max_bytes=MAX_MANIFEST_BYTES), StrictJsonError)
    if not isinstance(members, dict):
        return
    try:
        wire = samples.NODE.manifest(**{name: value for name, value in members.items() if name not in _FIXED})
    except ValueError:
        return  # there is no canonical form, so that nothing can be signed
    verdict = _RULES.accept(wire, NODE_ID, NOW_MS, _KNOWN)
    if verdict.manifest is not None:
        assert verdict.manifest.issued_at_ms <= NOW_MS + 300_000
        assert verdict.manifest.expires_at_ms > NOW_MS
        assert all(map(is_clean, strings_in(verdict.capabilities)))


def manifest_tail(data: bytes) -> None:
    """What is read without a JSON parser is canonical, fits the document, and is what the parser reads."""
    tail = read_tail(data)
    if tail is None:
        return
    wire = b'{"capabilities":[%b]%b' % (jcs(ECHO), data)
    members = loads(wire, max_bytes=MAX_MANIFEST_BYTES)
    assert is_canonical(wire, members)
    assert _MANIFEST.is_valid(members)
    assert (members["node_id"], members["node_attestation"]) == (tail.node_id, tail.attestation)
    assert (members["issued_at_ms"], members["expires_at_ms"]) == (tail.issued_at_ms, tail.expires_at_ms)


def frame(data: bytes) -> None:
    """What is read fits a frame again; an announce that is known is the one that the parser reads."""
    text = text_of(data) if data.isascii() else data
    read = tried(lambda: _READER.read(text, MAX_FRAME_BYTES), FrameError)
    known = known_announce(text, MAX_FRAME_BYTES, samples.MANIFEST.__eq__)
    if read is REFUSED:
        assert known is None
        return
    assert _READER.read(read.encode(), MAX_FRAME_BYTES * 6) == read
    jcs(read.payload)
    if known is not None:
        assert (known.type, known.msg_id, known.wire) == (read.type, read.msg_id, read.wire)
        assert known.in_reply_to is read.in_reply_to is None


def session(data: bytes) -> None:
    """Either end, in any state, ends the session or goes on; nothing brings one back that is closed."""
    for role in Role:
        for state in SessionState:
            end = SessionMachine(role, _READER, Seconds())
            end.state = state
            read = tried(partial(end.receive, data), ProtocolError)
            assert state is not SessionState.CLOSED or (
                read in {None, REFUSED} and end.state is SessionState.CLOSED
            )
            assert read is not REFUSED or end.state is state


def heartbeat(data: bytes) -> None:
    """A document judges whatever JSON there is, without an error."""
    beat = tried(lambda: loads(data, max_bytes=1024), StrictJsonError)
    if beat is not REFUSED and _HEARTBEAT.is_valid(beat):
        assert is_clean(beat["node_id"])
        assert is_clean(beat["manifest_etag"])


def error_envelope(data: bytes) -> None:
    """What a node says of a failure becomes our own words."""
    envelope = tried(lambda: loads(data, max_bytes=_LIMIT), StrictJsonError)
    if envelope is not REFUSED and _ERROR.is_valid(envelope):
        ours = ToolError.from_node(envelope).envelope("0" * 26)
        assert _ERROR.is_valid(ours)
        assert ours["code"] in {failure.value.code for failure in Failure}
        assert ours["message"] != envelope["message"] or envelope["message"] == ""
        assert ours.get("retry_after_ms", 0) <= 60_000


def result(data: bytes) -> None:
    """A result that fits its document is harmless once its texts are escaped."""
    value = tried(lambda: loads(data, max_bytes=_LIMIT), StrictJsonError)
    if value is not REFUSED and _SAMPLE.is_valid(value):
        assert all(map(is_clean, strings_in(printable_values(value))))


_TAIL = BEHIND_CAPABILITIES + samples.MANIFEST.partition(BEHIND_CAPABILITIES)[2]

TARGETS: Final = {
    "strict_json": Target(strict_json, (*samples.JSON, *samples.HOSTILE_DOCUMENTS)),
    "manifest": Target(manifest, (samples.MANIFEST,)),
    "signed_manifest": Target(signed_manifest, (samples.MANIFEST,)),
    "manifest_tail": Target(manifest_tail, (_TAIL,)),
    "frame": Target(frame, samples.FRAMES, share=2),
    "session": Target(session, samples.FRAMES, share=2),
    "heartbeat": Target(heartbeat, (samples.compact(samples.HEARTBEAT),)),
    "error_envelope": Target(error_envelope, samples.ERRORS),
    "result": Target(result, samples.RESULTS),
}
