"""What relays of one fleet send each other: documents of the registry, as strict JSON.

Commands and their answers, requests for certificates, and all other questions, which are an envelope,
``cluster.ask``, around a body whose document is ``cluster.<kind>``. No private key and no join token is in
any of them: a node's request carries proofs that it made with these. Must not send anything, must not judge
what is asked, and must not trust what it reads beyond its document: another relay may be of another
version.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, NamedTuple

from relay.observability.ascii_json import encoded
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
MAX_CA_MESSAGE_BYTES = MAX_RESPONSE_BYTES + 8192
"""An answer that fits the node's, and what the document has around it."""
MAX_PEER_BYTES = 1000 * 1024
"""What a server takes by default. The largest is the history of a node's telemetry, which is cut to fit."""

MAX_WIRE_BYTES = MAX_PEER_BYTES + 16 * 1024
"""That, sealed, and the token that goes along."""

FRAME = "frame"
KINDS = (
    *(FRAME, "session_call", "session_event", "session_left"),
    *("telemetry_read", "telemetry_listen", "telemetry_updated", "sign_in"),
)
"""The kinds of questions."""
_VERSIONS = dict.fromkeys(("session_call", "telemetry_read", "telemetry_listen"), "1.1.0")
"""The documents of questions that are not 1.0.0: those with a principal, whose token may be narrowed."""

CountMessage = Callable[[str, str, str], None]
"""Counts a message by its kind, by ``asked`` or ``answered``, and by what became of it: fixed words."""

CALLER_HEADER = "Edge-Caller"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REFUSED = "refused"
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
"""The failures of a command that one relay tells another; any other is INTERNAL."""
_DETAILS = MappingProxyType(
    {Failure.ENVELOPE_INVALID: "The idempotency key was used for other arguments of this tool."}
)


class ClusterMessageError(PeerError):
    """A message of another relay is not one that this relay accepts."""


class Document:
    """The messages that fit the document ``ref`` and have at most ``max_bytes``."""

    def __init__(self, registry: SchemaRegistry, ref: str, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.is_valid = registry.load(ref).is_valid
        self._max_bytes = max_bytes

    def read(self, data: bytes) -> dict[str, Any]:
        """Return the message in ``data``.

        Raises:
            ClusterMessageError: it is none of these.
        """
        try:
            message = loads(data, max_bytes=self._max_bytes)
        except StrictJsonError as error:
            raise ClusterMessageError(f"a message of another relay is {error.reason}") from None
        if not self.is_valid(message):
            raise ClusterMessageError("a message of another relay does not fit its document")
        read: dict[str, Any] = message
        return read


def _written(message: Mapping[str, Any]) -> bytes:
    return encoded(message).encode("ascii")


def _failure(failure: Failure, retry_after_ms: int | None) -> bytes:
    """Return the message that what was asked has failed: by its name, for its text stays here."""
    told: dict[str, Any] = {"name": failure.name}
    if retry_after_ms is not None:
        told["retry_after_ms"] = retry_after_ms
    return _written({"failure": told})


def _told(failure: Mapping[str, Any], details: Mapping[Failure, str] = MappingProxyType({})) -> ToolError:
    """Return the failure of another relay; INTERNAL, where this relay does not know it."""
    known = Failure.__members__.get(failure["name"], Failure.INTERNAL)
    return ToolError(known, details.get(known), retry_after_ms=failure.get("retry_after_ms"))


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
    return {} if command.caller is None else {CALLER_HEADER: command.caller}


def command_subject(fleet: str, node_id: str) -> str:
    """Return the subject on which the relay that holds the session of ``node_id`` is asked."""
    return f"edge.{fleet}.cmd.{node_id}"


def cancel_subject(fleet: str) -> str:
    """Return the subject on which every relay hears which commands are cancelled."""
    return f"edge.{fleet}.cancel"


class ClusterMessages:
    """Commands, by the documents of ``registry``."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._cmd = Document(registry, "cluster.cmd@1.0.0")
        self._cancel = Document(registry, "cluster.cancel@1.0.0")
        self._answer = Document(registry, "cluster.answer@1.1.0")

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
            message["idempotency"] = asdict(idempotency)
        return _written(message)

    def read_command(self, data: bytes, caller: str = "") -> AskedCommand:
        """Return the command that ``data`` asks for, of the agent whose digest ``caller`` may be.

        Raises:
            ClusterMessageError: it is no such message.
        """
        message = self._cmd.read(data)
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
            caller=caller if _DIGEST.fullmatch(caller) else None,
        )
        return AskedCommand(command, message["relay"], message["sent_at_ms"])

    def cancel(self, relay: str, correlation_id: str) -> bytes:
        """Return the message that the answer to a command is no longer needed."""
        return _written({"relay": relay, "correlation_id": correlation_id})

    def read_cancel(self, data: bytes) -> str:
        """Return the correlation id of the command that ``data`` cancels.

        Raises:
            ClusterMessageError: it is no such message.
        """
        correlation_id: str = self._cancel.read(data)["correlation_id"]
        return correlation_id

    def ack(self, ack: CmdAck) -> bytes:
        return _written({"ack": ack})

    def failure(self, error: ToolError) -> bytes:
        """Return the message that a command has failed before the node has answered."""
        told = error if error.failure in _TOLD else ToolError(Failure.INTERNAL)
        return _failure(told.failure, told.retry_after_ms)

    def read_answer(self, data: bytes) -> CmdAck:
        """Return the node's answer to a command.

        Raises:
            ToolError: the command has failed before that.
            ClusterMessageError: ``data`` is no answer.
        """
        message = self._answer.read(data)
        if (failure := message.get("failure")) is not None:
            raise _told(failure, _DETAILS)
        ack: CmdAck = message["ack"]
        return ack


class AskedOfAuthority(NamedTuple):
    """What the process ``relay`` of another relay asks."""

    relay: str
    action: AuthorityAction
    members: Mapping[str, Any]


def authority_subject(fleet: str) -> str:
    """Return the subject on which the relay that has the CA's key is asked."""
    return f"edge.{fleet}.ca.request"


class AuthorityMessages:
    """Requests for certificates, by the documents of ``registry``."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._request = Document(registry, "cluster.ca_request@1.1.0", MAX_CA_MESSAGE_BYTES)
        self._answer = Document(registry, "cluster.ca_answer@1.0.0", MAX_CA_MESSAGE_BYTES)

    def request(self, asked: AskedOfAuthority) -> bytes:
        return _written({"relay": asked.relay, asked.action.value: asked.members})

    def read_request(self, data: bytes) -> AskedOfAuthority:
        """Return what ``data`` asks.

        Raises:
            ClusterMessageError: it is no such message.
        """
        message = self._request.read(data)
        relay = message.pop("relay")
        ((action, members),) = message.items()
        return AskedOfAuthority(relay, AuthorityAction(action), members)

    def answer(self, action: AuthorityAction, members: Mapping[str, Any]) -> bytes:
        """Return the message that answers ``action``.

        Raises:
            ClusterMessageError: ``members`` are not what another relay accepts: a fault of this one.
        """
        message = {action.answered: members}
        if not self._answer.is_valid(message):
            raise ClusterMessageError("an answer about certificates does not fit its document")
        return _written(message)

    def refusal(self, error: AuthorityRefusedError) -> bytes:
        refused: dict[str, Any] = {"reason": error.reason}
        if error.retry_after_ms is not None:
            refused["retry_after_ms"] = error.retry_after_ms
        return _written({_REFUSED: refused})

    def read_answer(self, data: bytes, action: AuthorityAction) -> Mapping[str, Any]:
        """Return the members of the answer to ``action``.

        Raises:
            AuthorityRefusedError: the other relay refuses.
            ClusterMessageError: ``data`` is no answer to it.
        """
        message = self._answer.read(data)
        if (refused := message.get(_REFUSED)) is not None:
            raise AuthorityRefusedError(refused["reason"], refused.get("retry_after_ms"))
        members: Mapping[str, Any] | None = message.get(action.answered)
        if members is None:
            raise ClusterMessageError("an answer about certificates is for another request")
        return members


class Asked(NamedTuple):
    """A question of the process ``relay``. ``ask_id`` names it, so that it can be cancelled."""

    relay: str
    ask_id: str
    body: Mapping[str, Any]


class PeerMessages:
    """The questions of the relay ``relay``, by the documents of ``registry``."""

    def __init__(self, registry: SchemaRegistry, relay: str) -> None:
        self._relay = relay
        self._ask = Document(registry, "cluster.ask@1.0.0", MAX_PEER_BYTES)
        self._reply = Document(registry, "cluster.reply@1.0.0", MAX_PEER_BYTES)
        self._bodies = {
            kind: registry.load(f"cluster.{kind}@{_VERSIONS.get(kind, '1.0.0')}") for kind in KINDS
        }

    def ask(self, ask_id: str, body: Mapping[str, Any]) -> bytes:
        return _written({"relay": self._relay, "id": ask_id, "body": body})

    def read_ask(self, data: bytes, kind: str | None) -> Asked:
        """Return the question that ``data`` is, whose body is of ``kind``; None: of any form.

        Raises:
            ClusterMessageError: it is no such message.
        """
        message = self._ask.read(data)
        body = self._bodies.get(kind) if kind is not None else None
        if body is not None and not body.is_valid(message["body"]):
            raise ClusterMessageError("a question of another relay does not fit its document")
        return Asked(message["relay"], message["id"], message["body"])

    def reply(self, body: Mapping[str, Any]) -> bytes:
        return _written({"reply": body})

    def failure(self, error: ToolError) -> bytes:
        return _failure(error.failure, error.retry_after_ms)

    def read_reply(self, data: bytes) -> Mapping[str, Any]:
        """Return the answer to a question.

        Raises:
            ToolError: the question has failed.
            ClusterMessageError: ``data`` is no answer.
        """
        message = self._reply.read(data)
        if (failure := message.get("failure")) is not None:
            raise _told(failure)
        reply: Mapping[str, Any] = message["reply"]
        return reply
