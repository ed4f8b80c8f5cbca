import pytest

from relay.caller_tools.declarations import caller_id_of, checked_size, lent, owner_of
from schemas.errors import ToolError


def test_an_owner_is_the_same_for_a_principal_and_another_for_any_other() -> None:
    principal = ("https://relay.example", "acme", "agent-1")
    assert owner_of(principal) == owner_of(principal)
    others = {
        owner_of((principal[0], "acme", "agent-2")),
        owner_of((principal[0], "acmea", "gent-1")),
        owner_of(("https://relay.exampl", "eacme", "agent-1")),
    }
    assert len(others | {owner_of(principal)}) == 4
    assert all(len(owner) == 64 for owner in others)


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
