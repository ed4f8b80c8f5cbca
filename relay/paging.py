"""The pages of ``tools/list``: bounded in tools and in bytes, and a cursor to go on from.

Must not choose who sees which tool.
"""

from collections.abc import Sequence

from relay.catalog import Tool
from schemas.keys import base64url, from_base64url

PAGE_SIZE = 1000
MAX_PAGE_BYTES = 768 * 1024
"""Clients refuse an event of more than a mebibyte: the official one closes the stream."""


class CursorError(ValueError):
    """The cursor is not one that was given."""


def page_of(tools: Sequence[Tool], cursor: object) -> tuple[Sequence[Tool], str | None]:
    """Return the page of ``tools``, sorted by name, that ``cursor`` stands for, and the next cursor.

    Raises:
        CursorError: ``cursor`` is not one that this function gave.
    """
    after = "" if cursor is None else _name_in(cursor)
    rest = [tool for tool in tools if tool.canonical > after]
    page = _first_page(rest)
    if len(page) == len(rest):
        return page, None
    return page, base64url(page[-1].canonical.encode("ascii"))


def _first_page(tools: Sequence[Tool]) -> Sequence[Tool]:
    size = 0
    for count, tool in enumerate(tools[:PAGE_SIZE]):
        size += tool.listed_bytes
        if size > MAX_PAGE_BYTES and count:
            return tools[:count]
    return tools[:PAGE_SIZE]


def _name_in(cursor: object) -> str:
    try:
        return from_base64url(str(cursor)).decode("ascii")
    except ValueError:
        raise CursorError("cursor is not one that this server gave") from None
