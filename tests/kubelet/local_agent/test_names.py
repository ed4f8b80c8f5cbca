import re

import pytest

from kubelet.local_agent.toolbox import public_name, unambiguous

ALLOWED = re.compile(r"[A-Za-z0-9_-]{1,64}")


def test_a_lent_tool_is_named_after_its_caller() -> None:
    assert public_name("ant", "send_response") == "ant_send_response"
    assert public_name("ant", "get_memory") == "ant_get_memory"


@pytest.mark.parametrize("caller_id", ["ant@home:1/a.b", "x" * 64, "ant"])
@pytest.mark.parametrize("tool", ["get_memory", "t" * 64])
def test_a_name_is_one_that_every_client_accepts(caller_id: str, tool: str) -> None:
    assert ALLOWED.fullmatch(public_name(caller_id, tool))


def test_long_names_that_differ_at_the_end_stay_different() -> None:
    assert public_name("c" * 60, "tool_a") != public_name("c" * 60, "tool_b")
    assert public_name("c" * 64, "t") != public_name("c" * 63, "ct")


def test_tools_are_found_by_their_public_names() -> None:
    assert unambiguous("ant", ["a", "b"], ()) == {"ant_a": "a", "ant_b": "b"}


def test_two_tools_with_one_name_have_none() -> None:
    assert unambiguous("ant", ["a.b", "a_b", "c"], ()) == {"ant_c": "c"}


def test_a_name_of_the_nodes_own_is_not_lent() -> None:
    assert unambiguous("caller", ["messages", "c"], {"caller_messages"}) == {"caller_c": "c"}
