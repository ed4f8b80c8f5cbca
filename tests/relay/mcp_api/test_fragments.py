"""Members of a result that bring their own JSON."""

import json
from typing import Any

import pytest

from relay.ascii_json import encoded
from relay.mcp_api.tool_list import Fragment, text_of, with_documents


class Counted(Fragment):
    """A fragment that counts how often each of its forms is made."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.made: list[str] = []

    def text(self) -> str:
        self.made.append("text")
        return encoded(self.value)

    def document(self) -> Any:
        self.made.append("document")
        return self.value


VALUES = [[], [1, "ä\u2028\x7f"], {"a": None}, "text", None]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_both_ways_give_the_same_result_and_make_one_form_of_it(value: Any) -> None:
    direct, sdk = Counted(value), Counted(value)
    text = text_of({"ttlMs": 1, "tools": direct, "ä": [1]})
    document = with_documents({"ttlMs": 1, "tools": sdk, "ä": [1]})
    assert json.loads(text) == document == {"ttlMs": 1, "tools": value, "ä": [1]}
    assert text == encoded(document)
    assert (direct.made, sdk.made) == (["text"], ["document"])


@pytest.mark.parametrize("result", [{}, {"a": 1}, {"ä": {"b": [None, True]}}], ids=repr)
def test_a_result_without_fragments_is_encoded_as_it_is(result: dict[str, Any]) -> None:
    assert text_of(result) == encoded(result)
    assert with_documents(result) == result
