"""What relays of one fleet send each other about certificates: documents of the registry, as strict JSON.

No private key and no join token is in any of them: a node's request carries proofs that it made with these.
Must not send anything, and must not judge what is asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relay.ascii_json import encoded
from relay.routing.authority_port import AuthorityAction, AuthorityRefusedError
from relay.routing.cluster_messages import ClusterMessageError, read_document
from schemas.enrolment import MAX_RESPONSE_BYTES
from schemas.registry import SchemaRegistry

MAX_CA_MESSAGE_BYTES = MAX_RESPONSE_BYTES + 8192
"""An answer that fits the node's, and what the document has around it."""

_REQUEST_REF = "cluster.ca_request@1.0.0"
_ANSWER_REF = "cluster.ca_answer@1.0.0"
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
        self._request = registry.load(_REQUEST_REF)
        self._answer = registry.load(_ANSWER_REF)

    def request(self, asked: AskedOfAuthority) -> bytes:
        """Return the message that asks."""
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
        """Return the message that says why there is no such answer."""
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
