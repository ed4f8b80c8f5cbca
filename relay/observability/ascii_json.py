"""JSON in ASCII for the relay's log lines and answers.

pydantic's encoder, which the MCP SDK depends on: each call is encoded five times, and the standard encoder
takes three to four times as long. Must not be used for what is signed: that is ``schemas.canonical``.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

_DEL = b"\x7f"
"""Can only occur inside a string, and must not reach a terminal."""


def encoded(value: object) -> str:
    """Return ``value``, which came from strict JSON or from us, as JSON without spaces, in ASCII.

    Raises:
        ValueError: it contains a lone surrogate, or a type that JSON does not have.
    """
    text = to_json(value)
    if not text.isascii():
        text = to_json(value, ensure_ascii=True)  # takes half as long again, and hardly any text needs it
    if _DEL in text:
        text = text.replace(_DEL, b"\\u007f")
    return text.decode("ascii")


def members_of(facts: Mapping[str, Any]) -> str:
    """Return ``facts`` as the members of a JSON object without its braces, in ASCII."""
    return encoded(facts)[1:-1]
