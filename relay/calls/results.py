"""Checks a node's answer before its caller gets it: it fits the tool, names the node, and is printable.

Texts of third parties are escaped first: a node of an earlier version does not, and one character must not
cost its caller the whole answer.

The rules of a kind beyond its schemas are in its row of the registry. Must not know a kind by name.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from relay.ascii_json import encoded
from relay.calls.call_record import CallAnswer
from relay.fleet.tools import Tool
from relay.state.labels import legible
from schemas.errors import Failure, ToolError
from schemas.images import NoImageError, apart
from schemas.payloads import CmdAck
from schemas.registry import Validator
from schemas.text import printable_values

LABELS = MappingProxyType({"label": legible})
"""The texts that the relay's own tools show in their letters."""


def checked(answer: CmdAck, tool: Tool, arguments: Any) -> CallAnswer:
    """Return the node's ``answer`` to a call of ``tool`` as its caller gets it (RFC-0005 sections 4 and 6.8).

    Raises:
        ToolError: the node's own error, with our text, or its result is invalid.
    """
    surface = tool.surface
    if not answer["ok"]:
        raise ToolError.from_node(answer["error"], surface.kind.faults)
    verb = surface.verb
    result = verb.shown(answer["result"])
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


def shown(
    result: Mapping[str, Any],
    validator: Validator,
    members: Mapping[str, Callable[[str], str]] = MappingProxyType({}),
) -> CallAnswer:
    """Return the answer with ``result``, whose strings are made printable, but for those of ``members``.

    Raises:
        ToolError: so it does not fit ``validator`` any more.
    """
    text = encoded(result)
    if "\\" in text:
        # A character was escaped for JSON, and a client would unescape it: no control character may reach a
        # terminal or a model.
        result = printable_values(result, members)
        if not validator.is_valid(result):
            raise ToolError(Failure.RESULT_INVALID)  # escaped it is longer, and a client would reject it
        text = encoded(result)
    return CallAnswer(text, result=result)
