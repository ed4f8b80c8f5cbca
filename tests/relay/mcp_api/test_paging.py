"""The pages of ``tools/list``. What clients make of them is in ``test_endpoint``."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from relay.auth.permissions import Rights
from relay.fleet.tools import Tool
from relay.mcp_api.tool_list import MAX_PAGE_BYTES, PAGE_SIZE, CursorError, Listed, page_of
from schemas.keys import base64url
from tests.fakes.hub import Hub
from tests.fakes.signer import TENANT


@pytest.fixture
def tool(hub: Hub) -> Tool:
    hub.connect(hub.ca.issue())
    return hub.fleet.selected.listed(Rights(TENANT, frozenset({"read_only"})))[0]


def many(tool: Tool, count: int, size: int) -> list[Tool]:
    rest = tool.listed_bytes - tool.surface.schema_bytes
    surface = replace(tool.surface, schema_bytes=size - rest)
    return [replace(tool, canonical=f"tool.{number:05}", surface=surface) for number in range(count)]


def listed(tools: Sequence[Tool]) -> Listed:
    """Return the list in which ``tools``, which are sorted, are."""
    return lambda after, limit: [tool for tool in tools if tool.place > after][:limit]


@pytest.mark.parametrize(
    ("count", "size", "pages"),
    [
        pytest.param(0, 100, [0], id="none"),
        pytest.param(PAGE_SIZE, 1, [PAGE_SIZE], id="just-one-page"),
        pytest.param(PAGE_SIZE + 1, 1, [PAGE_SIZE, 1], id="one-more"),
        pytest.param(5, MAX_PAGE_BYTES // 2, [2, 2, 1], id="large-ones"),
        pytest.param(2, MAX_PAGE_BYTES * 2, [1, 1], id="larger-than-a-page"),
    ],
)
def test_following_the_cursor_gives_every_tool_once(
    tool: Tool, count: int, size: int, pages: list[int]
) -> None:
    tools = many(tool, count, size)
    seen: list[object] = []
    sizes: list[int] = []
    cursor: str | None = None
    while True:
        page, cursor = page_of(listed(tools), cursor)
        seen += page
        sizes.append(len(page))
        if cursor is None:
            break
    assert seen == tools
    assert sizes == pages


def test_a_cursor_goes_on_behind_its_tool_even_when_that_is_gone(tool: Tool) -> None:
    tools = many(tool, 3, MAX_PAGE_BYTES)
    _, cursor = page_of(listed(tools), None)
    page, _ = page_of(listed(tools[1:]), cursor)
    assert [item.place for item in page] == [(0, "tool.00001")]


def test_pages_follow_the_turns_and_not_the_names_alone(tool: Tool) -> None:
    first, second = (
        [replace(tool, canonical=f"{name}.{number:04}", turn=turn) for name in "ab" for number in range(600)]
        for turn in range(2)
    )
    tools = [*first, *(replace(each, canonical=f"0{each.canonical}") for each in second)]
    assert tools == sorted(tools, key=lambda each: each.place)
    seen: list[object] = []
    cursor: str | None = None
    while cursor is not None or not seen:
        page, cursor = page_of(listed(tools), cursor)
        seen += page
    assert seen == tools


@pytest.mark.parametrize(
    "cursor",
    [
        "!",
        "w6k",
        7,
        ["x"],
        base64url(b"tool.1"),
        base64url(b"1 Tool"),
        base64url(b"1 a\n"),
        base64url(b"x a"),
    ],
    ids=["not base64url", "not ASCII", "number", "list", "name alone", "no name", "a line end", "no turn"],
)
def test_a_cursor_that_was_never_given_is_refused(tool: Tool, cursor: object) -> None:
    with pytest.raises(CursorError, match="not one that this server gave"):
        page_of(listed([tool]), cursor)
