"""JSON in ASCII for the relay's log lines and answers.

pydantic's encoder, which the MCP SDK depends on: each call is encoded five times, and the standard encoder
takes three to four times as long. Must not be used for what is signed: that is ``schemas.canonical``.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json


def encoded(value: object) -> str:
    """Return ``value``, which came from strict JSON or from us, as JSON without spaces, in ASCII.

    Raises:
        ValueError: it contains a lone surrogate, or a type that JSON does not have.
    """
    # DEL can only occur inside a string; it must not reach a terminal.
    return to_json(value, ensure_ascii=True).decode("ascii").replace("\x7f", "\\u007f")


def members_of(facts: Mapping[str, Any]) -> str:
    """Return ``facts`` as the members of a JSON object without its braces, in ASCII."""
    return encoded(facts)[1:-1]
