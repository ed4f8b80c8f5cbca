import re
from typing import Any

import pytest

from relay.remote_tools import Redaction

NAMES = (
    "passphrase",
    "db_pwd",
    "credentials",
    "AWS_ACCESS_KEY_ID",
    "accessKey",
    "session-id",
    "sessionId",
    "apiKey",
)
JWT = "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJhIn0.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"password": "x", "name": "y"}, {"password": "[redacted]", "name": "y"}),
        ({"User-Token": {"a": 1}}, {"User-Token": "[redacted]"}),
        ({"a": [{"API_KEY": 1}]}, {"a": [{"API_KEY": "[redacted]"}]}),
        (dict.fromkeys(NAMES, "x"), dict.fromkeys(NAMES, "[redacted]")),
        ("postgres://app:p@ss:w0rd@db.example/x", "postgres://[redacted]@db.example/x"),
        ("redis://:hunter2@10.0.0.1:6379", "redis://[redacted]@10.0.0.1:6379"),
        ("host=db password=hunter2 user=app", "host=db [redacted] user=app"),
        ("Server=db;Pwd='a b';Database=x", "Server=db;[redacted];Database=x"),
        ("see https://a.example:8443/b?c=d@e", "see https://a.example:8443/b?c=d@e"),
        (f"see {JWT} here", "see [redacted] here"),
        ("Authorization: Bearer abcdefgh12345678", "Authorization: [redacted]"),
        ("-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY----- x", "[redacted] x"),
        ("ghp_abcdefghijklmnop1234", "[redacted]"),
        ({"n": 1, "f": 1.5, "t": True, "z": None}, {"n": 1, "f": 1.5, "t": True, "z": None}),
        ("\x1b[2J", "\\x1b[2J"),
        ({"\x1b": 1}, {"\\x1b": 1}),
        (object, "[redacted]"),
    ],
    ids=str,
)
def test_a_value_is_redacted_by_names_and_patterns(value: Any, expected: Any) -> None:
    assert Redaction().value(value) == expected


def test_the_operator_replaces_the_rules() -> None:
    rules = Redaction(keys=("colour",), patterns=(re.compile(r"\d{4}"),))
    assert rules.value({"Colour": "red", "password": "1234 5"}) == {
        "Colour": "[redacted]",
        "password": "[redacted] 5",
    }


def test_a_secret_at_the_cut_is_not_left_by_half() -> None:
    text = Redaction().text("x" * 90 + " " + JWT * 3, 100)
    assert "eyJ" not in text
    assert len(text) == 100


def test_a_deep_value_ends() -> None:
    value: Any = "secret"
    for _ in range(100):
        value = [value]
    assert "secret" not in str(Redaction().value(value))
