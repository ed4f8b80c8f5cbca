"""The pages of ``tools/list``: bounded in tools and in bytes, and a cursor to go on from.

Must not choose who sees which tool.
"""

import re
from collections.abc import Sequence

from relay.fleet.tools import Tool
from schemas.keys import base64url, from_base64url

PAGE_SIZE = 1000
MAX_PAGE_BYTES = 768 * 1024
"""Clients refuse an event of more than a mebibyte: the official one closes the stream."""

_BEFORE_ALL = (-1, "")
_PLACE = re.compile(r"(?P<turn>[0-9]{1,4}) (?P<name>[a-z0-9_.]+)")


class CursorError(ValueError):
    """The cursor is not one that was given."""


def page_of(tools: Sequence[Tool], cursor: object) -> tuple[Sequence[Tool], str | None]:
    """Return the page of ``tools``, sorted by place, that ``cursor`` stands for, and the next cursor.

    Raises:
        CursorError: ``cursor`` is not one that this function gave.
    """
    after = _BEFORE_ALL if cursor is None else _place_in(cursor)
    rest = [tool for tool in tools if tool.place > after]
    page = _first_page(rest)
    if len(page) == len(rest):
        return page, None
    turn, name = page[-1].place
    return page, base64url(f"{turn} {name}".encode("ascii"))


def _first_page(tools: Sequence[Tool]) -> Sequence[Tool]:
    size = 0
    for count, tool in enumerate(tools[:PAGE_SIZE]):
        size += tool.listed_bytes
        if size > MAX_PAGE_BYTES and count:
            return tools[:count]
    return tools[:PAGE_SIZE]


def _place_in(cursor: object) -> tuple[int, str]:
    try:
        found = _PLACE.fullmatch(from_base64url(str(cursor)).decode("ascii"))
    except ValueError:
        found = None
    if found is None:
        raise CursorError("cursor is not one that this server gave")
    return int(found["turn"]), found["name"]
