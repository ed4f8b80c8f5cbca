"""The pages of ``tools/list``: bounded in tools and in bytes, and a cursor to continue from.

Must not choose which caller sees which tool.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from relay.fleet.tools import BEFORE_ALL, Position
from relay.mcp_api.fragments import Fragment
from schemas.error_roots import PeerError
from schemas.keys import base64url, from_base64url

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
