"""What ``tools/list`` lists to one caller: the nodes' tools, and those that the relay answers itself.

A page is bounded in tools and in bytes, and has a cursor to continue from. A result names which tool tells
more by the same name as the list. Must not decide which nodes' tools a caller reaches: the fleet does. Must
not pass on a name that a node wrote.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import Any

from attrs import define, field

from relay.auth.permissions import Rights
from relay.calls.relay_tools import RelayTool, RelayTools
from relay.fleet.fleet import Fleet
from relay.fleet.selection import Selection
from relay.fleet.tools import BEFORE_ALL, Position, Tool, hints
from relay.mcp_api.url_options import UrlOptionReader, UrlOptions
from relay.observability.ascii_json import encoded
from schemas.addresses import View
from schemas.error_roots import PeerError
from schemas.keys import base64url, from_base64url
from schemas.projection import META_CANONICAL_NAME, META_SAFETY_CLASS, META_SCHEMA_REF, alias_of
from schemas.registry import SCHEME

PAGE_SIZE = 1000
MAX_PAGE_BYTES = 768 * 1024
"""Clients reject an event of more than a mebibyte: the official one closes the stream."""

NameOf = Callable[[str, str, str], str | None]
"""Returns the name of a node's tool of a kind and verb, by their names; None if the caller reaches none."""
Paths = Sequence[tuple[str, ...]]
_TOOL = "tool"
_OF_MANY = ("result", "values")
_PLACE = re.compile(r"(?P<turn>[0-9]{1,4}) (?P<name>[a-z0-9_.]+)")


class CursorError(PeerError):
    """The cursor is not one that was issued."""


@dataclass(frozen=True, slots=True)
class RelayToolEntry:
    """The entry of one tool that the relay answers, encoded once, under both forms of its name."""

    place: Position
    texts: Sequence[str]
    documents: Sequence[dict[str, Any]]

    @classmethod
    def of(cls, tool: RelayTool, safety_class: str) -> "RelayToolEntry":
        names = tool.canonical, alias_of(tool.canonical)
        documents = [_document(tool, name, safety_class) for name in names]
        return cls((0, tool.canonical), [encoded(document) for document in documents], documents)

    @property
    def listed_bytes(self) -> int:
        return len(self.texts[0])

    def listed(self, *, dashed: bool = False) -> dict[str, Any]:
        return self.documents[dashed]

    def listed_text(self, *, dashed: bool = False) -> str:
        return self.texts[dashed]


ToolEntry = Tool | RelayToolEntry
Listed = Callable[[Position, int], Sequence[ToolEntry]]
"""Returns the tools behind a place, sorted by place, up to a number of them."""


@dataclass(frozen=True, slots=True)
class ToolEntries:
    """The entries of ``tools``, under their canonical names or their aliases: the ``tools`` of a result.

    Their JSON need not be encoded anew: the response gets the text as it is. The SDK encodes by itself, and
    gets documents. Only the one that is needed is made.
    """

    tools: Sequence[ToolEntry]
    dashed: bool

    def text(self) -> str:
        return "[" + ",".join([tool.listed_text(dashed=self.dashed) for tool in self.tools]) + "]"

    def document(self) -> list[dict[str, Any]]:
        return [tool.listed(dashed=self.dashed) for tool in self.tools]


def with_documents(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``result`` with documents for ``ToolEntries``."""
    return {
        name: value.document() if isinstance(value, ToolEntries) else value for name, value in result.items()
    }


def text_of(result: Mapping[str, Any]) -> str:
    """Return ``result``, whose ``tools`` may be ``ToolEntries``, as JSON in ASCII."""
    tools = result.get("tools")
    if not isinstance(tools, ToolEntries):
        return encoded(result)
    others = encoded({name: value for name, value in result.items() if name != "tools"})
    return f'{{"tools":{tools.text()}{"," if len(result) > 1 else ""}{others[1:]}'


def page_of(listed: Listed, cursor: object) -> tuple[Sequence[ToolEntry], str | None]:
    """Return the page of what ``listed`` returns that begins at ``cursor``, and the next cursor.

    Raises:
        CursorError: ``cursor`` is not one that this function returned.
    """
    after = BEFORE_ALL if cursor is None else _place_in(cursor)
    # One more than a page has: whether it is there decides on the next cursor.
    tools = listed(after, PAGE_SIZE + 1)
    page = _first_page(tools)
    if len(page) == len(tools):
        return page, None
    turn, name = page[-1].place
    return page, base64url(f"{turn} {name}".encode("ascii"))


def _first_page(tools: Sequence[ToolEntry]) -> Sequence[ToolEntry]:
    size = 0
    for count, tool in enumerate(tools[:PAGE_SIZE]):
        size += tool.listed_bytes
        if size > MAX_PAGE_BYTES and count:
            return tools[:count]
    return tools[:PAGE_SIZE]


def _place_in(cursor: object) -> Position:
    try:
        found = _PLACE.fullmatch(from_base64url(str(cursor)).decode("ascii"))
    except ValueError:
        found = None
    if found is None:
        raise CursorError("cursor is not one that this server gave")
    return int(found["turn"]), found["name"]


def _document(tool: RelayTool, name: str, safety_class: str) -> dict[str, Any]:
    return {
        "name": name,
        "title": tool.title,
        "description": tool.description,
        "inputSchema": tool.schemas.input_schema,
        "outputSchema": tool.schemas.output_schema,
        "annotations": {
            "title": tool.title,
            **hints(safety_class, idempotent=tool.idempotent, untrusted=bool(tool.untrusted)),
        },
        "_meta": {
            META_SAFETY_CLASS: safety_class,
            META_CANONICAL_NAME: tool.canonical,
            META_SCHEMA_REF: SCHEME + tool.schema_ref,
        },
    }


@define(eq=False, repr=False)
class ToolList:
    """The lists of one relay, all sorted by place. ``options`` reads what a URL selects of them."""

    _fleet: Fleet
    _relay_tools: RelayTools
    options: UrlOptionReader
    _entries: dict[tuple[str, str], RelayToolEntry] = field(init=False, factory=dict)

    def listed(
        self, rights: Rights, selection: Selection, after: Position, limit: int
    ) -> Sequence[ToolEntry]:
        """Return what ``rights`` reach of ``selection``: at most ``limit`` of those behind ``after``.

        Raises:
            UnknownNodeError: the selection names a node or a tag that there is not.
        """
        tools: Sequence[ToolEntry] = []
        if selection.view is View.TOOLS:
            tools = self._fleet.selected.listed(rights, selection, after, limit)
        offered = self._fleet.selected.offered(rights, selection) if selection.view is View.KINDS else {}
        of_relay = [
            self._entry(tool, tool.safety_class if tool.kind_verb is None else offered[tool.kind_verb])
            for tool in self._relay_tools
            if selection.view in tool.views
            and (tool.kind_verb is None or tool.kind_verb in offered)
            and tool.visible(rights)
            and (0, tool.canonical) > after
        ]
        return list(merge(of_relay, tools, key=lambda tool: tool.place))[:limit] if of_relay else tools

    def name_of(self, rights: Rights, options: UrlOptions, node_id: str, kind: str, verb: str) -> str | None:
        """Return under which name a client lists the node's tool of ``kind`` and ``verb``.

        None if callers with ``rights`` reach none. In the kinds view it is that of all nodes.
        """
        node = self._fleet.reach.node(rights, node_id)
        found = [
            tool
            for tool in (node.tools.values() if node is not None else ())
            if (tool.surface.kind.name, tool.surface.verb.name) == (kind, verb)
            and rights.allow(rights.tenant, tool.safety_class, tool.surface.kind)
        ]
        if not found:
            return None
        tool = min(found, key=lambda each: each.place)
        of_kinds = options.selection.view is View.KINDS
        name = ".".join(tool.kind_verb) if of_kinds else tool.canonical
        return alias_of(name) if options.dashed else name

    def _entry(self, tool: RelayTool, safety_class: str) -> RelayToolEntry:
        key = tool.canonical, safety_class
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = RelayToolEntry.of(tool, safety_class)
        return entry


def with_tools(result: Mapping[str, Any], paths: Paths, name_of: NameOf) -> dict[str, Any]:
    """Return ``result``, of one node or of several, with the tool that tells more at each of ``paths``.

    A result names a kind and a verb, both from an enumeration of its document, at the paths that the row of
    its kind has. What the caller does not reach on that node is left out.
    """
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
    return None if tool is None else {**ask, _TOOL: tool}
