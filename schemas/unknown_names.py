"""How a name that is not known is answered: with the known one that is nearest.

For what an operator or a client types. What an agent sends is never repeated to a model: other modules answer
that. Must not know what the names are of.
"""

from collections.abc import Iterable
from itertools import islice

from schemas.text import printable

_MAX_NAME = 64
_MOST = 512  # that are compared, each in some 20 µs: a server may list thousands of tools


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return that there is no ``what`` called ``name``, and the nearest of ``known`` if there is any.

    >>> unknown("command", "calll", ["run", "call"])
    'there is no command calll; the nearest is call'
    """
    return f"there is no {what} {printable(name, _MAX_NAME)}{nearest(name, known)}"


def none_of(name: str, known: Iterable[str]) -> str:
    """Return that ``name`` is none of ``known``, which are few enough to be listed.

    >>> none_of("wirte", ["read", "write"])
    "'wirte' is none of read, write; the nearest is write"
    """
    listed = tuple(known)
    return f"{printable(name, _MAX_NAME)!r} is none of {', '.join(listed)}{nearest(name, listed)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that names the nearest of ``known``; nothing if none is known."""
    from difflib import get_close_matches  # noqa: PLC0415 - for a mistake alone

    found = get_close_matches(name[:_MAX_NAME], islice(known, _MOST), n=1, cutoff=0)
    return f"; the nearest is {printable(found[0], _MAX_NAME)}" if found else ""
