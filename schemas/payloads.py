"""The members of the documents that travel, as types: a misspelled member is an error of mypy.

What is read has passed its document before it has such a type. Must not hold behaviour, nor rules that the
documents in ``documents/`` do not have.
"""

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict


class ErrorEnvelope(TypedDict):
    """``error@1.0.0``: why a call, or a request of a node, has failed."""

    code: str
    message: str
    suggested_fix: str
    retry_after_ms: NotRequired[int]
    correlation_id: NotRequired[str]


class Attestation(TypedDict):
    """``node_attestation`` of a manifest."""

    alg: str
    kid: str
    sig: str
    payload_hash: str


class Fingerprint(TypedDict):
    """``hw_fingerprint`` of a manifest."""

    algo: str
    value: str
    sources: list[str]


class Constraints(TypedDict):
    """``constraints`` of a capability. What is left out has the default of the manifest's document."""

    rate_limit_rps: float
    max_concurrency: NotRequired[int]
    deadline_ms_default: NotRequired[int]


class Capability(TypedDict):
    """One capability of a manifest."""

    cap_id: str
    kind: str
    schema_ref: str
    verbs: list[str]
    safety_class: str
    constraints: Constraints


class Manifest(TypedDict):
    """``manifest@1.1.0``."""

    manifest_version: str
    node_id: str
    hw_fingerprint: Fingerprint
    node_attestation: Attestation
    issued_at_ms: int
    expires_at_ms: int
    capabilities: list[Capability]


class Challenge(TypedDict):
    """Sent by the relay first."""

    nonce: str
    audience: str
    server_time_ms: int


class Auth(TypedDict):
    """The node's answer to a challenge."""

    node_id: str
    certificate: str
    token: str
    boot_id: str
    resume: NotRequired[str]


class Welcome(TypedDict):
    """The session is open."""

    session_id: str
    heartbeat_interval_ms: int
    max_frame_bytes: int
    server_time_ms: int
    resumed: bool
    kinds: NotRequired[list[str]]


class Heartbeat(TypedDict):
    """Sent by the node after each manifest."""

    manifest_etag: str
    expires_at_ms: int
    inflight: int


class HeartbeatAck(TypedDict):
    """The relay's answer to a heartbeat."""

    server_time_ms: int
    broker_etag: NotRequired[str]
    heartbeat_interval_ms: NotRequired[int]


class Cmd(TypedDict):
    """A command for the node."""

    tool: str
    arguments: Mapping[str, Any]
    deadline_ms: int
    sent_at_ms: int
    correlation_id: str
    traceparent: NotRequired[str]


class CmdCancel(TypedDict):
    """The result of a command is not needed any more."""

    reason: str


class Renew(TypedDict):
    """The node's request for a new leaf."""

    csr: str
    server_roots: NotRequired[Literal[True]]


class Bye(TypedDict):
    """Sent before a close."""

    reason: str
    retry_after_ms: NotRequired[int]


class TelemetryLease(TypedDict):
    """How often the node samples a capability, and for how long from now."""

    cap_id: str
    interval_ms: int
    include: NotRequired[list[str]]
    ttl_ms: int


class OpenFinding(TypedDict):
    """A finding of ``linux.health`` that is open, by its code: how many there are, and the worst of them."""

    code: str
    severity: str
    count: int
    since_ms: int | None


class Telemetry(TypedDict):
    """One sample of a capability."""

    cap_id: str
    sample: Mapping[str, Any]


class Refused(TypedDict):
    """Of an answer with an outcome: why what was requested has not been done."""

    ok: Literal[False]
    error: ErrorEnvelope


class AnnounceDone(TypedDict):
    """The relay has accepted a manifest."""

    ok: Literal[True]
    manifest_etag: str


class AnnounceRefused(Refused):
    """It rejects one; ``mark_issued_at_ms`` is the time of the newest that it has accepted."""

    mark_issued_at_ms: NotRequired[int]


AnnounceAck = AnnounceDone | AnnounceRefused
"""The relay's verdict on a manifest. ``ok`` tells which, as in every union of this kind."""


class CmdDone(TypedDict):
    """The node has run a command."""

    ok: Literal[True]
    result: Mapping[str, Any]


class CmdRefused(Refused):
    """It has not: ``denied_by`` is there if the board's owner does not allow it, from protocol 1.2 on."""

    denied_by: NotRequired[Literal["owner"]]


CmdAck = CmdDone | CmdRefused
"""The node's answer to a command."""


class Renewed(TypedDict):
    """What the node installs, beside its key."""

    certificate: str
    roots: str
    endorsement: NotRequired[str]
    server_roots: NotRequired[str]
    server_endorsements: NotRequired[list[str]]


class RenewDone(Renewed):
    """The certificate authority has issued a new leaf."""

    ok: Literal[True]


RenewAck = RenewDone | Refused
"""The relay's answer to a request for a new leaf."""


class RetireDone(TypedDict):
    """Every leaf of the node is revoked."""

    ok: Literal[True]


RetireAck = RetireDone | Refused
"""The relay's answer to a node that leaves for good."""


class CallerTool(TypedDict):
    """A tool that a caller lends; its texts are the caller's own. ``inputSchema`` is as MCP spells it."""

    name: str
    title: NotRequired[str]
    description: NotRequired[str]
    inputSchema: NotRequired[Mapping[str, Any]]


class SessionOpen(TypedDict):
    """A caller has opened a session, or has declared its tools anew."""

    session_id: str
    caller_id: str
    owner: str
    tools: list[CallerTool]
    timeout_ms: NotRequired[int]


class SessionText(TypedDict):
    """``session_message`` and ``session_event``: a message to the local agent, and one from it."""

    session_id: str
    message: str


class SessionEnd(TypedDict):
    """The session has ended."""

    session_id: str
    reason: str


class CallerToolRequest(TypedDict):
    """``caller_tool``: the local agent calls a tool that the caller lends."""

    session_id: str
    request_id: str
    tool: str
    arguments: Mapping[str, Any]


class CallerToolCancel(TypedDict):
    """The result of a request is not needed any more."""

    session_id: str
    request_id: str


class CallerToolFailure(TypedDict):
    """Why a request has no result; ``code`` is a ``CallerToolError``."""

    code: str
    message: str


class CallerToolResult(TypedDict):
    """The end of a request: exactly one of ``result`` and ``error``."""

    session_id: str
    request_id: str
    result: NotRequired[Any]
    error: NotRequired[CallerToolFailure]
