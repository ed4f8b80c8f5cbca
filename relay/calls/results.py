"""The answer of a call, and the check of a node's: it fits the tool, names the node, and is printable.

Texts of third parties are escaped first: a node of an earlier version does not, and one character must not
cost its caller the whole answer.

The rules of a kind beyond its schemas are in its row of the registry. Must not know a kind by name.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from relay.auth.permissions import Rights
from relay.fleet.tools import Tool
from relay.observability.ascii_json import encoded
from schemas.errors import Failure, ToolError
from schemas.images import Images, NoImageError, apart
from schemas.kinds import Fault, Verb
from schemas.labels import legible
from schemas.payloads import CmdAck, CmdRefused
from schemas.registry import Validator
from schemas.text import printable_values


class Hop(StrEnum):
    """Where a call failed; the value is fit for a counter's label.

    RELAY: it was refused or failed here. SESSION: it could not be delivered. NODE: it was sent, and the node
    did not answer in time, or with an error, or with a result that is not valid.
    """

    RELAY = "relay"
    SESSION = "session"
    NODE = "node"


class CallAnswer(NamedTuple):
    """A result or an error envelope (``error@1.0.0``), exactly one of them; ``text`` is its ASCII JSON.

    Attributes:
        hop: of an error, the hop that failed.
        correlation_id: the one under which the gateway has recorded the call.
        images: what the result has besides, as content blocks of MCP: ``text`` does not contain them.
        untrusted: the paths of the sentences in it that a third party may have chosen.
        asks: the paths of its members that name a tool to ask next.
    """

    text: str
    result: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    hop: Hop | None = None
    correlation_id: str = ""
    images: Images = ()
    untrusted: tuple[str, ...] = ()
    asks: tuple[tuple[str, ...], ...] = ()


LABELS = MappingProxyType({"label": legible})
"""The texts that the relay's own tools show in their letters."""


def refused_by_node(answer: CmdRefused, faults: Mapping[str, Fault] = MappingProxyType({})) -> ToolError:
    """Return the error of a node's refusal, with our text or one of ``faults``."""
    return ToolError.from_node(answer["error"], faults, by_owner="denied_by" in answer)


def checked(answer: CmdAck, tool: Tool, arguments: Any, rights: Rights | None = None) -> CallAnswer:
    """Return the node's ``answer`` to a call of ``tool`` as its caller gets it (RFC-0005 sections 4 and 6.8).

    Raises:
        ToolError: the node's own error, with our text, or its result is invalid.
    """
    surface = tool.surface
    if not answer["ok"]:
        raise refused_by_node(answer, surface.kind.faults)
    verb = surface.verb
    result = verb.shown(_without_guarded(answer["result"], verb, rights))
    if not surface.result.is_valid(result):
        raise ToolError(Failure.RESULT_INVALID)
    if result.get("node_id") != tool.node_id:
        raise ToolError(Failure.RESULT_INVALID, "The result names another node than the one that was called.")
    if any(result.get(member) != arguments.get(member) for member in verb.verbatim):
        raise ToolError(Failure.RESULT_INVALID, "The result is not what was sent, as it must be.")
    try:
        result, images = apart(result, verb.images)
    except NoImageError as error:
        raise ToolError(Failure.RESULT_INVALID) from error
    found = shown(result, surface.result)
    return found._replace(images=images) if images else found


def _without_guarded(result: Any, verb: Verb, rights: Rights | None) -> Any:
    """Return ``result`` without the members of other kinds that a caller with ``rights`` may not read."""
    if not verb.guarded or not isinstance(result, Mapping):
        return result
    kept_back = {
        member for member, kind in verb.guarded.items() if rights is None or not rights.admit_by_name(kind)
    }
    return {member: value for member, value in result.items() if member not in kept_back}


def shown(
    result: Mapping[str, Any],
    validator: Validator,
    members: Mapping[str, Callable[[str], str]] = MappingProxyType({}),
) -> CallAnswer:
    """Return the answer with ``result``, its strings made printable but for those of ``members``."""
    text = encoded(result)
    if "\\" in text:
        # A character was escaped for JSON, and a client would unescape it: no control character may reach a
        # terminal or a model.
        result = printable_values(result, members)
        if not validator.is_valid(result):
            raise ToolError(Failure.RESULT_INVALID)  # escaped it is longer, and a client would reject it
        text = encoded(result)
    return CallAnswer(text, result=result)
