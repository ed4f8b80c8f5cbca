"""Strings of foreign origin made harmless before a person, a terminal or a model sees them.

Must be used on everything that a node, an agent or a broker sent and that is about to be shown.
"""

from typing import Any


def printable(text: str, limit: int = 256) -> str:
    r"""Return ``text`` as printable ASCII of at most ``limit`` characters, the rest escaped or cut.

    >>> printable("a\x1b[31mb\n\u202e")
    'a\\x1b[31mb\\n\\u202e'
    """
    # Cut before the work, so that a hostile megabyte costs no more than a line.
    safe = text[:limit].encode("ascii", "backslashreplace").decode("ascii")
    if not safe.isprintable():
        safe = "".join(char if char.isprintable() else repr(char)[1:-1] for char in safe)
    return safe[:limit]


def printable_values(value: Any) -> Any:
    """Return the JSON ``value`` with every string in it, keys included, made printable ASCII."""
    if isinstance(value, str):
        return printable(value, limit=len(value) * 10)
    if isinstance(value, dict):
        return {printable_values(key): printable_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [printable_values(item) for item in value]
    return value
