import pytest

from relay.streams.caller_tools.caller_sessions import caller_id_of, checked_size, lent
from schemas.errors import ToolError


def test_what_is_lent_is_found_by_name_and_has_the_size_of_its_frame() -> None:
    found = lent([{"name": "a"}, {"name": "b", "description": "\u20ac"}])
    assert list(found.tools) == ["a", "b"]
    assert found.size == len('[{"name":"a"},{"name":"b","description":"\\u20ac"}]')
    assert lent([]).tools == {}


def test_a_schema_of_the_largest_size_is_lent() -> None:
    schema = {"type": "object", "title": ""}
    schema["title"] = "x" * (32 * 1024 - checked_size("schema", schema))
    assert lent([{"name": "a", "inputSchema": schema}]).tools
    with pytest.raises(ToolError, match="An inputSchema"):
        lent([{"name": "a", "inputSchema": {**schema, "title": f"{schema['title']}x"}}])


def test_a_session_keeps_the_caller_that_it_was_opened_by() -> None:
    assert caller_id_of({"caller_id": "ant"}, None) == "ant"
    assert caller_id_of({}, "ant") == "ant"
    assert caller_id_of({"caller_id": "ant"}, "ant") == "ant"
    for context, present in (({}, None), ({"caller_id": "bee"}, "ant")):
        with pytest.raises(ToolError):
            caller_id_of(context, present)
