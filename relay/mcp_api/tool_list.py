"""What ``tools/list`` lists to one caller: the nodes' tools, and those that the relay answers itself.

A page is bounded in tools and in bytes, and has a cursor to continue from. Must not decide which nodes' tools
a caller reaches: the fleet does.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import Any, Protocol

from relay.ascii_json import encoded
from relay.auth.permissions import Rights
from relay.calls.relay_tools import RelayTool, RelayTools
from relay.fleet.fleet import Fleet
from relay.fleet.selection import Selection
from relay.fleet.tool_entry import hints
from relay.fleet.tools import BEFORE_ALL, Offer, Position
from relay.mcp_api.url_options import UrlOptionReader
from relay.settings.config import View
from schemas.document_store import SCHEME
from schemas.error_roots import PeerError
from schemas.keys import base64url, from_base64url
from schemas.meta_names import META_CANONICAL_NAME, META_SAFETY_CLASS, META_SCHEMA_REF
from schemas.projection import alias_of


class Fragment:
    """The value of one member of a result. Both methods return the same value, in two forms.

    Without the metaclass of abstract classes: every member of every result is asked whether it is a fragment,
    and with it the answer takes ten times as long. That both methods are there is checked by the types.
    """

    @abstractmethod
    def text(self) -> str:
        """Return the value as JSON in ASCII."""

    @abstractmethod
    def document(self) -> Any:
        """Return the value as Python has it."""


def with_documents(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``result`` with documents for fragments."""
    return {
        name: value.document() if isinstance(value, Fragment) else value for name, value in result.items()
    }


def text_of(result: Mapping[str, Any]) -> str:
    """Return ``result``, some of whose members may be fragments, as JSON in ASCII."""
    if not any(isinstance(value, Fragment) for value in result.values()):
        return encoded(result)
    members = (
        f"{encoded(name)}:{value.text() if isinstance(value, Fragment) else encoded(value)}"
        for name, value in result.items()
    )
    return "{" + ",".join(members) + "}"


PAGE_SIZE = 1000
MAX_PAGE_BYTES = 768 * 1024
"""Clients reject an event of more than a mebibyte: the official one closes the stream."""

_PLACE = re.compile(r"(?P<turn>[0-9]{1,4}) (?P<name>[a-z0-9_.]+)")


class ToolEntry(Protocol):
    """What a page needs of a tool: a node's, or one that the relay answers itself."""

    @property
    def place(self) -> Position:
        """What lists are sorted by."""
        ...

    @property
    def listed_bytes(self) -> int:
        """About how many bytes the entry has."""
        ...

    def listed(self, *, dashed: bool = False) -> dict[str, Any]:
        """Return the entry as a document."""
        ...

    def listed_text(self, *, dashed: bool = False) -> str:
        """Return the entry as JSON text."""
        ...


Listed = Callable[[Position, int], Sequence[ToolEntry]]
"""Returns the tools behind a place, sorted by place, up to a number of them."""


class CursorError(PeerError):
    """The cursor is not one that was issued."""


@dataclass(frozen=True, slots=True)
class ToolEntries(Fragment):
    """The entries of ``tools``, under their canonical names or their aliases."""

    tools: Sequence[ToolEntry]
    dashed: bool

    def text(self) -> str:
        """Return the entries as a JSON array."""
        return "[" + ",".join([tool.listed_text(dashed=self.dashed) for tool in self.tools]) + "]"

    def document(self) -> list[dict[str, Any]]:
        """Return the entries as documents."""
        return [tool.listed(dashed=self.dashed) for tool in self.tools]


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


@dataclass(frozen=True, slots=True)
class RelayToolEntry:
    """The entry of one tool, under both forms of its name."""

    place: Position
    dotted: str
    dashed: str
    documents: tuple[dict[str, Any], dict[str, Any]]

    @classmethod
    def of(cls, tool: RelayTool, safety_class: str) -> "RelayToolEntry":
        """Return the entry of ``tool``, whose calls are of ``safety_class`` at most."""
        names = tool.canonical, alias_of(tool.canonical)
        dotted, dashed = (_document(tool, name, safety_class) for name in names)
        return cls((0, tool.canonical), encoded(dotted), encoded(dashed), (dotted, dashed))

    @property
    def listed_bytes(self) -> int:
        """How many bytes the entry has."""
        return len(self.dotted)

    def listed(self, *, dashed: bool = False) -> dict[str, Any]:
        """Return the entry as a document."""
        return self.documents[dashed]

    def listed_text(self, *, dashed: bool = False) -> str:
        """Return the same entry as JSON text."""
        return self.dashed if dashed else self.dotted


class RelayToolEntries:
    """The entries of the tools that one relay answers."""

    def __init__(self, tools: RelayTools) -> None:
        self._tools = tools
        self._entries: dict[tuple[str, str], RelayToolEntry] = {}

    def listed(
        self, rights: Rights, view: View, offered: Mapping[Offer, str], after: Position
    ) -> list[RelayToolEntry]:
        """Return the entries behind ``after`` of what ``rights`` may call in ``view``, by place.

        ``offered`` are the kinds and verbs of the nodes' tools that they reach, with their safety class.
        """
        return [
            self._entry(tool, tool.safety_class if tool.offer is None else offered[tool.offer])
            for tool in self._tools
            if view in tool.views
            and (tool.offer is None or tool.offer in offered)
            and tool.visible(rights)
            and (0, tool.canonical) > after
        ]

    def _entry(self, tool: RelayTool, safety_class: str) -> RelayToolEntry:
        key = tool.canonical, safety_class
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = RelayToolEntry.of(tool, safety_class)
        return entry


def _document(tool: RelayTool, name: str, safety_class: str) -> dict[str, Any]:
    return {
        "name": name,
        "title": tool.title,
        "description": tool.description,
        "inputSchema": tool.schemas.input_schema,
        "outputSchema": tool.schemas.output_schema,
        "annotations": {"title": tool.title, **hints(safety_class, idempotent=tool.idempotent)},
        "_meta": {
            META_SAFETY_CLASS: safety_class,
            META_CANONICAL_NAME: tool.canonical,
            META_SCHEMA_REF: SCHEME + tool.schema_ref,
        },
    }


class ToolList:
    """The lists of one relay, all sorted by place. ``options`` reads what a URL selects of them."""

    def __init__(self, fleet: Fleet, relay_tools: RelayTools, options: UrlOptionReader) -> None:
        self.options = options
        self._fleet = fleet
        self._of_relay = RelayToolEntries(relay_tools)

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
        of_relay: Sequence[ToolEntry] = self._of_relay.listed(rights, selection.view, offered, after)
        if not of_relay:
            return tools
        return list(merge(of_relay, tools, key=_place_of))[:limit]


def _place_of(tool: ToolEntry) -> Position:
    return tool.place
