"""Writes into a result which tool tells more: by the name under which the caller's client lists it.

A result names a kind and a verb, both from an enumeration of its document, at the paths that the row of its
kind has. What the caller does not reach on that node is left out. Must not pass on a name that a node wrote.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

NameOf = Callable[[str, str, str], str | None]
"""Returns the name of a node's tool of a kind and verb, by their names; None if the caller reaches none."""
Paths = Sequence[tuple[str, ...]]
TOOL = "tool"
_OF_MANY = ("result", "values")


def with_tools(result: Mapping[str, Any], paths: Paths, name_of: NameOf) -> dict[str, Any]:
    """Return ``result``, of one node or of several, with the tool of each member at ``paths``."""
    if isinstance(entries := result.get("results"), list):
        return {**result, "results": [_of_one_of_many(entry, paths, name_of) for entry in entries]}
    return _of_node(result, paths, name_of, result.get("node_id"))


def _of_one_of_many(entry: Mapping[str, Any], paths: Paths, name_of: NameOf) -> Mapping[str, Any]:
    named = {
        member: _of_node(entry[member], paths, name_of, entry["node_id"])
        for member in _OF_MANY
        if isinstance(entry.get(member), Mapping)
    }
    return {**entry, **named}


def _of_node(result: Mapping[str, Any], paths: Paths, name_of: NameOf, node_id: Any) -> dict[str, Any]:
    named = dict(result)
    for path in paths:
        named = _at(named, path, lambda ask: _named(ask, name_of, node_id))
    return named


def _at(value: Any, path: Sequence[str], change: Callable[[Mapping[str, Any]], Any]) -> Any:
    if isinstance(value, list):
        return [_at(item, path, change) for item in value]
    if not isinstance(value, Mapping):
        return value
    if not path:
        return change(value)
    return {**value, path[0]: _at(value[path[0]], path[1:], change)} if path[0] in value else value


def _named(ask: Mapping[str, Any], name_of: NameOf, node_id: Any) -> dict[str, Any] | None:
    tool = name_of(node_id, ask["kind"], ask["verb"])
    return None if tool is None else {**ask, TOOL: tool}
