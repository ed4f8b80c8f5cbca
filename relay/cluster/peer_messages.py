"""What relays of one fleet ask each other besides commands: documents of the registry, as strict JSON.

A question is an envelope, ``cluster.ask``, around a body whose document is ``cluster.<kind>``. Must not send
anything, and must not trust what it reads beyond its documents: another relay may be of another version.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from relay.ascii_json import encoded
from relay.routing.cluster_messages import ClusterMessageError
from schemas.errors import Failure, ToolError
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads

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
        """Return the message that asks for ``body``."""
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
        """Return the message that answers a question."""
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
