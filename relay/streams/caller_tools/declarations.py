"""What a caller declares: who it says it is, and the tools that it lends. Checked before a node sees it.

The form is that of the input document; here are the rules that a document cannot express. Must not change a
schema that a caller lends.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from relay.streams.caller_tools.session import Lent
from schemas.caller_tools import MAX_SCHEMA_BYTES, MAX_TOOLS_BYTES, MAX_VALUE_BYTES, size_of
from schemas.errors import Failure, ToolError
from schemas.payloads import CallerTool


def lent(tools: Sequence[CallerTool]) -> Lent:
    """Return what ``tools`` lend.

    Raises:
        ToolError: ARGUMENTS_INVALID: a name twice, or too large.
    """
    by_name = {tool["name"]: tool for tool in tools}
    if len(by_name) < len(tools):
        raise ToolError(Failure.ARGUMENTS_INVALID, "Two of caller_tools have the same name.")
    if any(size_of(tool.get("inputSchema", {})) > MAX_SCHEMA_BYTES for tool in tools):
        text = f"An inputSchema of caller_tools is larger than {MAX_SCHEMA_BYTES} bytes."
        raise ToolError(Failure.ARGUMENTS_INVALID, text)
    size = size_of(tools)
    if size > MAX_TOOLS_BYTES:
        text = f"The caller_tools are together larger than {MAX_TOOLS_BYTES} bytes."
        raise ToolError(Failure.ARGUMENTS_INVALID, text)
    return Lent(by_name, size)


def checked_size(name: str, value: object) -> int:
    """Return the size of the argument ``name``.

    Raises:
        ToolError: ARGUMENTS_INVALID: it is too large for a frame.
    """
    size = size_of(value)
    if size > MAX_VALUE_BYTES:
        text = f"The argument {name} is larger than {MAX_VALUE_BYTES} bytes as JSON in ASCII."
        raise ToolError(Failure.ARGUMENTS_INVALID, text)
    return size


def caller_id_of(context: Mapping[str, Any], present: str | None) -> str:
    """Return the caller_id that ``context`` declares for a session that has ``present``, if it exists.

    Raises:
        ToolError: ARGUMENTS_INVALID: there is none, or another than before.
    """
    declared: str | None = context.get("caller_id", present)
    if declared is None:
        raise ToolError(Failure.ARGUMENTS_INVALID, "A new session needs context.caller_id.")
    if present is not None and declared != present:
        raise ToolError(Failure.ARGUMENTS_INVALID, "A session keeps its caller_id; open another session.")
    return declared
