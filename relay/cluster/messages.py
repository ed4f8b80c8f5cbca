"""What relays of one fleet send each other: documents of the registry, as strict JSON.

Commands and their answers, requests for certificates, and all other questions, which are an envelope,
``cluster.ask``, around a body whose document is ``cluster.<kind>``. No private key and no join token is in
any of them: a node's request carries proofs that it made with these. Must not send anything, must not judge
what is asked, and must not trust what it reads beyond its document: another relay may be of another
version.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from relay.ascii_json import encoded
from relay.routing.authority_port import AuthorityAction, AuthorityRefusedError
from relay.routing.port import Command, Idempotency
from schemas.enrolment import MAX_RESPONSE_BYTES
from schemas.error_roots import PeerError
from schemas.errors import Failure, ToolError
from schemas.frames import MAX_FRAME_BYTES
from schemas.payloads import CmdAck
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads

MAX_MESSAGE_BYTES = 3 * MAX_FRAME_BYTES + 8192
"""A command or an answer that fits a node's frame, and what the document has around it.

Messages are ASCII, in which the characters of other scripts take up to three times the bytes of UTF-8.
"""

_CMD_REF = "cluster.cmd@1.0.0"
_CANCEL_REF = "cluster.cancel@1.0.0"
_ANSWER_REF = "cluster.answer@1.0.0"

_CALLER = "Edge-Caller"
_DIGEST = re.compile(r"[0-9a-f]{64}")

_TOLD = frozenset(
    {
        Failure.NODE_OFFLINE,
        Failure.RATE_LIMITED,
        Failure.DEADLINE_EXCEEDED,
        Failure.ATTESTATION_FAILED,
        Failure.ENVELOPE_INVALID,
        Failure.RESULT_INVALID,
    }
)
"""The failures that one relay tells another; any other is INTERNAL. No text goes with them."""
_DETAILS = MappingProxyType(
    {Failure.ENVELOPE_INVALID: "The idempotency key was used for other arguments of this tool."}
)


class ClusterMessageError(PeerError):
    """A message of another relay is none that this relay accepts."""


class AskedCommand(NamedTuple):
    """A command that another relay asks for.

    Attributes:
        relay: the process that asks.
        sent_at_ms: when, by a clock of that process.
    """

    command: Command
    relay: str
    sent_at_ms: int


def command_headers(command: Command) -> dict[str, str]:
    """Return what a relay may know besides the document of ``command``, and can do without."""
    return {} if command.caller is None else {_CALLER: command.caller}


def command_subject(fleet: str, node_id: str) -> str:
    """Return the subject on which the relay that holds the session of ``node_id`` is asked."""
    return f"edge.{fleet}.cmd.{node_id}"


def cancel_subject(fleet: str) -> str:
    """Return the subject on which every relay hears which commands are cancelled."""
    return f"edge.{fleet}.cancel"


class ClusterMessages:
    """Encodes and reads the messages by the documents of ``registry``."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._cmd = registry.load(_CMD_REF)
        self._cancel = registry.load(_CANCEL_REF)
        self._answer = registry.load(_ANSWER_REF)

    def command(self, asked: AskedCommand) -> bytes:
        command = asked.command
        message: dict[str, Any] = {
            "relay": asked.relay,
            "node_id": command.node_id,
            "tool": command.tool,
            "arguments": command.arguments,
            "deadline_ms": command.deadline_ms,
            "sent_at_ms": asked.sent_at_ms,
            "correlation_id": command.correlation_id,
            "cost": command.cost,
        }
        if command.traceparent is not None:
            message["traceparent"] = command.traceparent
        if (idempotency := command.idempotency) is not None:
            message["idempotency"] = {
                "caller": idempotency.caller,
                "key": idempotency.key,
                "arguments": idempotency.arguments,
                "repeatable": idempotency.repeatable,
            }
        return encoded(message).encode("ascii")

    def read_command(self, data: bytes, headers: Mapping[str, str] | None = None) -> AskedCommand:
        """Return the command that ``data`` asks for, and ``headers`` name the agent of.

        Raises:
            ClusterMessageError: it is no such message.
        """
        message = read_document(data, self._cmd.is_valid)
        keyed = message.get("idempotency")
        command = Command(
            node_id=message["node_id"],
            tool=message["tool"],
            arguments=message["arguments"],
            deadline_ms=message["deadline_ms"],
            correlation_id=message["correlation_id"],
            traceparent=message.get("traceparent"),
            cost=message["cost"],
            idempotency=None
            if keyed is None
            else Idempotency(tuple(keyed["caller"]), keyed["key"], keyed["arguments"], keyed["repeatable"]),
            caller=_caller_in(headers),
        )
        return AskedCommand(command, message["relay"], message["sent_at_ms"])

    def cancel(self, relay: str, correlation_id: str) -> bytes:
        """Return the message that the answer to a command is no longer needed."""
        return encoded({"relay": relay, "correlation_id": correlation_id}).encode("ascii")

    def read_cancel(self, data: bytes) -> str:
        """Return the correlation id of the command that ``data`` cancels.

        Raises:
            ClusterMessageError: it is no such message.
        """
        correlation_id: str = read_document(data, self._cancel.is_valid)["correlation_id"]
        return correlation_id

    def ack(self, ack: CmdAck) -> bytes:
        return encoded({"ack": ack}).encode("ascii")

    def failure(self, error: ToolError) -> bytes:
        """Return the message that a command has failed before the node has answered."""
        known = error if error.failure in _TOLD else ToolError(Failure.INTERNAL)
        failure: dict[str, Any] = {"name": known.failure.name}
        if known.retry_after_ms is not None:
            failure["retry_after_ms"] = known.retry_after_ms
        return encoded({"failure": failure}).encode("ascii")

    def read_answer(self, data: bytes) -> CmdAck:
        """Return the node's answer to a command.

        Raises:
            ToolError: the command has failed before that.
            ClusterMessageError: ``data`` is no answer.
        """
        message = read_document(data, self._answer.is_valid)
        if (failure := message.get("failure")) is not None:
            told = Failure[failure["name"]]
            raise ToolError(told, _DETAILS.get(told), retry_after_ms=failure.get("retry_after_ms"))
        ack: CmdAck = message["ack"]
        return ack


def read_document(
    data: bytes, is_valid: Callable[[object], bool], max_bytes: int = MAX_MESSAGE_BYTES
) -> dict[str, Any]:
    """Return the message in ``data``, of at most ``max_bytes``, for which ``is_valid`` is true.

    Raises:
        ClusterMessageError: it is none.
    """
    try:
        message = loads(data, max_bytes=max_bytes)
    except StrictJsonError as error:
        raise ClusterMessageError(f"a message of another relay is {error.reason}") from None
    if not is_valid(message):
        raise ClusterMessageError("a message of another relay does not fit its document")
    read: dict[str, Any] = message
    return read


def _caller_in(headers: Mapping[str, str] | None) -> str | None:
    """Return the digest of the agent that ``headers`` name; None if they name none, or not as a digest."""
    digest = headers.get(_CALLER, "") if headers else ""
    return digest if _DIGEST.fullmatch(digest) else None


MAX_CA_MESSAGE_BYTES = MAX_RESPONSE_BYTES + 8192
"""An answer that fits the node's, and what the document has around it."""

_CA_REQUEST_REF = "cluster.ca_request@1.0.0"
_CA_ANSWER_REF = "cluster.ca_answer@1.0.0"
_REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class AskedOfAuthority:
    """What another relay asks.

    Attributes:
        relay: the process that asks.
    """

    relay: str
    action: AuthorityAction
    members: Mapping[str, Any]


def authority_subject(fleet: str) -> str:
    """Return the subject on which the relay that has the CA's key is asked."""
    return f"edge.{fleet}.ca.request"


class AuthorityMessages:
    """Encodes and reads the messages by the documents of ``registry``."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._request = registry.load(_CA_REQUEST_REF)
        self._answer = registry.load(_CA_ANSWER_REF)

    def request(self, asked: AskedOfAuthority) -> bytes:
        return encoded({"relay": asked.relay, asked.action.value: asked.members}).encode("ascii")

    def read_request(self, data: bytes) -> AskedOfAuthority:
        """Return what ``data`` asks.

        Raises:
            ClusterMessageError: it is no such message.
        """
        message = read_document(data, self._request.is_valid, MAX_CA_MESSAGE_BYTES)
        relay = message.pop("relay")
        ((action, members),) = message.items()
        return AskedOfAuthority(relay, AuthorityAction(action), members)

    def answer(self, action: AuthorityAction, members: Mapping[str, Any]) -> bytes:
        """Return the message that answers ``action``.

        Raises:
            ClusterMessageError: ``members`` are none that another relay accepts: a fault of this one.
        """
        message = {action.answered: members}
        if not self._answer.is_valid(message):
            raise ClusterMessageError("an answer about certificates does not fit its document")
        return encoded(message).encode("ascii")

    def refusal(self, error: AuthorityRefusedError) -> bytes:
        refused: dict[str, Any] = {"reason": error.reason}
        if error.retry_after_ms is not None:
            refused["retry_after_ms"] = error.retry_after_ms
        return encoded({_REFUSED: refused}).encode("ascii")

    def read_answer(self, data: bytes, action: AuthorityAction) -> Mapping[str, Any]:
        """Return the members of the answer to ``action``.

        Raises:
            AuthorityRefusedError: the other relay refuses.
            ClusterMessageError: ``data`` is no answer to it.
        """
        message = read_document(data, self._answer.is_valid, MAX_CA_MESSAGE_BYTES)
        if (refused := message.get(_REFUSED)) is not None:
            raise AuthorityRefusedError(refused["reason"], refused.get("retry_after_ms"))
        members: Mapping[str, Any] | None = message.get(action.answered)
        if members is None:
            raise ClusterMessageError("an answer about certificates is for another request")
        return members


MAX_PEER_BYTES = 1000 * 1024
"""What a server takes by default. The largest is the history of a node's telemetry, which is cut to fit."""

FRAME = "frame"
KINDS = (
    *(FRAME, "session_call", "session_event", "session_left"),
    *("telemetry_read", "telemetry_listen", "telemetry_updated"),
)
"""The kinds of questions."""

CountMessage = Callable[[str, str, str], None]
"""Counts a message by its kind, by ``asked`` or ``answered``, and by what became of it: fixed words."""

_ASK_REF = "cluster.ask@1.0.0"
_REPLY_REF = "cluster.reply@1.0.0"


@dataclass(frozen=True, slots=True)
class Asked:
    """A question of another relay.

    Attributes:
        relay: the process that asks.
        ask_id: names the question, so that it can be cancelled.
    """

    relay: str
    ask_id: str
    body: Mapping[str, Any]


class PeerMessages:
    """Encodes and reads the messages of the relay ``relay`` by the documents of ``registry``."""

    def __init__(self, registry: SchemaRegistry, relay: str) -> None:
        self._relay = relay
        self._ask = registry.load(_ASK_REF)
        self._reply = registry.load(_REPLY_REF)
        self._bodies = {kind: registry.load(f"cluster.{kind}@1.0.0") for kind in KINDS}

    def ask(self, ask_id: str, body: Mapping[str, Any]) -> bytes:
        return encoded({"relay": self._relay, "id": ask_id, "body": body}).encode("ascii")

    def read_ask(self, data: bytes, kind: str | None) -> Asked:
        """Return the question that ``data`` is, whose body is of ``kind``; None: of any form.

        Raises:
            ClusterMessageError: it is no such message.
        """
        message = _loaded(data)
        body = self._bodies.get(kind) if kind is not None else None
        if not self._ask.is_valid(message) or (body is not None and not body.is_valid(message["body"])):
            raise ClusterMessageError("a question of another relay does not fit its document")
        return Asked(message["relay"], message["id"], message["body"])

    def reply(self, body: Mapping[str, Any]) -> bytes:
        return encoded({"reply": body}).encode("ascii")

    def failure(self, error: ToolError) -> bytes:
        """Return the message that a question has failed. Its text stays here."""
        failure: dict[str, Any] = {"name": error.failure.name}
        if error.retry_after_ms is not None:
            failure["retry_after_ms"] = error.retry_after_ms
        return encoded({"failure": failure}).encode("ascii")

    def read_reply(self, data: bytes) -> Mapping[str, Any]:
        """Return the answer to a question.

        Raises:
            ToolError: the question has failed; INTERNAL by a failure that this relay does not know.
            ClusterMessageError: ``data`` is no answer.
        """
        message = _loaded(data)
        if not self._reply.is_valid(message):
            raise ClusterMessageError("an answer of another relay does not fit its document")
        if (failure := message.get("failure")) is not None:
            known = Failure.__members__.get(failure["name"], Failure.INTERNAL)
            raise ToolError(known, retry_after_ms=failure.get("retry_after_ms"))
        reply: Mapping[str, Any] = message["reply"]
        return reply


def _loaded(data: bytes) -> dict[str, Any]:
    try:
        message: dict[str, Any] = loads(data, max_bytes=MAX_PEER_BYTES)
    except StrictJsonError as error:
        raise ClusterMessageError(f"a message of another relay is {error.reason}") from None
    return message
