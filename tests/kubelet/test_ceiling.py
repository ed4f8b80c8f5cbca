"""What the tables of a ceiling allow, and which of them cannot be used."""

import json
from typing import Any

import pytest

from kubelet.ceiling import MAX_TABLE, Ceiling, OutsideCeilingError, table_of
from schemas.error_roots import OperatorError


def below(kind: str, **members: Any) -> Ceiling:
    return Ceiling({kind: table_of(kind, json.dumps(members))})


@pytest.mark.parametrize(
    ("patterns", "name", "rule"),
    [
        (None, "ssh.service", None),
        ([], "ssh.service", "units"),
        (["nginx*"], "nginx.service", None),
        (["nginx*"], "Nginx.service", "units"),
        (["nginx*"], "ssh.service", "units"),
        (["nginx*"], "", "units"),
        (["*"], "", None),
        (["!ssh*"], "nginx.service", None),
        (["!ssh*"], "ssh.service", "units !ssh*"),
        (["ssh*", "!ssh@*"], "ssh@1.service", "units !ssh@*"),
        (["!ssh@*", "ssh*"], "ssh@1.service", "units !ssh@*"),
    ],
)
def test_a_name_must_match_a_pattern_and_none_that_denies(
    patterns: list[str] | None, name: str, rule: str | None
) -> None:
    ceiling = Ceiling() if patterns is None else below("linux.units", units=patterns)
    assert ceiling.of("linux.units").rule_against("units", name) == rule
    assert ceiling.allows("linux.units", "units", name) is (rule is None)
    assert ceiling.allows("linux.journal", "units", name), "a table is of its kind alone"
    if rule is not None:
        with pytest.raises(OutsideCeilingError) as refused:
            ceiling.check("linux.units", "units", name)
        assert (refused.value.kind, refused.value.rule) == ("linux.units", rule)


@pytest.mark.parametrize(
    ("patterns", "allowed"), [(None, ()), (["!/srv/keys*"], ()), (["/srv", "!/srv/keys*"], ("/srv",))]
)
def test_no_directory_is_allowed_unless_it_is_named(
    patterns: list[str] | None, allowed: tuple[str, ...]
) -> None:
    ceiling = Ceiling() if patterns is None else below("linux.files", directories=patterns)
    assert ceiling.of("linux.files").allowed("directories") == allowed


def test_arguments_of_processes_are_shown_only_where_their_owner_says_so() -> None:
    assert not below("linux.processes", arguments=False).of("linux.processes").flags
    assert below("linux.processes", arguments=True).of("linux.processes").flags == {"arguments"}


@pytest.mark.parametrize(
    ("kind", "members", "said"),
    [
        ("linux.units", {"unit": ["a"]}, "'unit' is none of units"),
        ("linux.units", {"units": "nginx*"}, "units is an array of patterns"),
        ("linux.units", {"units": [1]}, "units is an array of patterns"),
        ("linux.units", {"units": {}}, "units is an array of patterns"),
        ("linux.units", {"units": [""]}, "which is no pattern"),
        ("linux.units", {"units": ["!"]}, "which is no pattern"),
        ("linux.units", {"units": ["!!a"]}, "which is no pattern"),
        ("linux.units", {"units": ["a\x1b[31m"]}, "which is no pattern"),
        ("linux.units", {"arguments": True}, "'arguments' is none of units"),
        ("linux.units", {"units": ["a" * MAX_TABLE]}, "is longer than"),
        ("linux.processes", {"arguments": "yes"}, "arguments is true or false"),
        ("linux.processes", {"arguments": 1}, "arguments is true or false"),
        ("linux.health", {"hot_c": "70"}, "hot_c is a number from 20 to 150; without it 80"),
        ("linux.health", {"hot_c": True}, "hot_c is a number from 20 to 150"),
        ("linux.health", {"hot_c": 1000}, "hot_c is a number from 20 to 150"),
        ("linux.health", {"hot": 70}, "'hot' is none of"),
        ("linux.units", {"hot_c": 70}, "'hot_c' is none of units"),
        ("linux.files", {"directories": ["var/log"]}, "name a directory"),
        ("linux.files", {"directories": ["/var/*"]}, "name a directory"),
    ],
)
def test_a_table_that_cannot_be_used_says_what_to_do(kind: str, members: Any, said: str) -> None:
    with pytest.raises(OperatorError, match=said):
        table_of(kind, json.dumps(members))
