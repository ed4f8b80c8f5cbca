"""JSON in ASCII for what the relay writes down and hands out: the lines of its logs, and the text of answers.

pydantic's encoder, which came with the MCP SDK: each call is written five times over, and the standard one
takes three to four times as long. Must not be used for what is signed: that is ``schemas.canonical``.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json


def encoded(value: object) -> str:
    """Return ``value``, which is what strict JSON or we ourselves made, as JSON without spaces, in ASCII.

    Raises:
        ValueError: it holds a lone surrogate, or something that JSON has no form for at all.
    """
    # Only in a string can this stand, and a terminal must not be sent it.
    return to_json(value, ensure_ascii=True).decode("ascii").replace("\x7f", "\\u007f")


def members_of(facts: Mapping[str, Any]) -> str:
    """Return ``facts`` as what stands between the braces of a JSON object, in ASCII."""
    return encoded(facts)[1:-1]
