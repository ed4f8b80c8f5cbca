"""Escaping of untrusted strings before a person, a terminal or a model sees them, and mistyped names.

Must be applied to everything that a node, an agent or a broker sent before it is shown. The nearest known
name is for what an operator or a client types: what an agent sends is never repeated to a model.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

# With the backslash, so that what a node has escaped is not escaped again by a relay.
_PLAIN = re.compile(r"[A-Za-z0-9._/:@+\\-]")
_FREE = re.compile(r"(?:[\x21-\x7E]| (?! ))*")
_NOT_FREE = re.compile(r"[^\x20-\x7E]|(?<= ) ")
_ESCAPES = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|.)|.")
_CUT = "[cut]"


def printable(text: str, limit: int = 256) -> str:
    r"""Return ``text`` as printable ASCII of at most ``limit`` characters, the rest escaped or cut.

    >>> printable("a\x1b[31mb\n\u202e")
    'a\\x1b[31mb\\n\\u202e'
    """
    # Cut first, so that a hostile megabyte costs no more than a line.
    safe = text[:limit].encode("ascii", "backslashreplace").decode("ascii")
    if not safe.isprintable():
        safe = "".join(char if char.isprintable() else repr(char)[1:-1] for char in safe)
    return safe[:limit]


def quoted(text: str, limit: int = 256) -> str:
    r"""Return ``text`` in quotes, as ``printable`` has it: what that has escaped is not escaped again.

    >>> print(quoted("B\u00fcro\n"), quoted("it's"))
    'B\xfcro\n' "it's"
    """
    return repr(printable(text, limit)).replace("\\\\", "\\")


def counted(count: int, noun: str) -> str:
    """Return ``count`` with its noun, which is given in the singular.

    >>> counted(1, "relay"), counted(2, "relay")
    ('1 relay', '2 relays')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def printable_values(value: Any, members: Mapping[str, Callable[[str], str]] = MappingProxyType({})) -> Any:
    """Return the JSON ``value`` with every string in it, keys included, made printable ASCII.

    The text of a member that is in ``members`` is made safe by the function there.
    """
    if isinstance(value, str):
        return printable(value, limit=len(value) * 10)
    if isinstance(value, dict):
        return {
            printable_values(key): members[key](item)
            if key in members and isinstance(item, str)
            else printable_values(item, members)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [printable_values(item, members) for item in value]
    return value


def inert(text: str, limit: int) -> str:
    r"""Return ``text`` with all but letters, digits and ``._-/:@+\`` escaped, spaces too, cut to ``limit``.

    Unlike ``printable`` it leaves no text that a model could read as a sentence. An escape is never split.

    >>> inert("/media/Ignore all of it\n", 26)
    '/media/Ignore\x20all\x20of'
    """
    return _joined((char if _PLAIN.fullmatch(char) else _escape(char) for char in text[:limit]), limit)


def free_text(text: str, limit: int) -> str:
    r"""Return ``text`` as printable ASCII with single blanks, the rest escaped, cut to ``limit`` characters.

    What is cut ends with ``[cut]``. An escape is never split, and what has been made so stays as it is.

    >>> free_text("B\u00fcro  1\n", 20), free_text("New connection", 10)
    ('B\\xfcro \\x201\\n', 'New c[cut]')
    """
    if len(text) <= limit and _FREE.fullmatch(text):
        return text
    # Cut first, so that a hostile megabyte costs no more than a text of the limit.
    escaped = _NOT_FREE.sub(lambda found: _escape(found[0]), text[: limit + 1])
    if len(escaped) <= limit:
        return escaped
    return _joined(_ESCAPES.findall(escaped), limit - len(_CUT)) + _CUT[:limit]


def _joined(pieces: Iterable[str], limit: int) -> str:
    """Return the first of ``pieces`` that have ``limit`` characters together."""
    shown, left = [], limit
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            break
        shown.append(piece)
    return "".join(shown)


def _escape(char: str) -> str:
    escaped = char.encode("unicode_escape").decode("ascii")
    return escaped if len(escaped) > 1 else f"\\x{ord(char):02x}"  # printable, but not allowed here


def changed_at(value: Any, path: Sequence[str], change: Callable[[str], str]) -> Any:
    """Return the JSON ``value`` with every string at ``path`` changed, in each element of a list."""
    if isinstance(value, list):
        return [changed_at(item, path, change) for item in value]
    if not path:
        return change(value) if isinstance(value, str) else value
    if not isinstance(value, dict) or path[0] not in value:
        return value
    return {**value, path[0]: changed_at(value[path[0]], path[1:], change)}


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
    return f"{quoted(name, _MAX_NAME)} is none of {', '.join(listed)}{nearest(name, listed)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that names the nearest of ``known``; nothing if none is known."""
    from difflib import get_close_matches  # noqa: PLC0415 - for a mistake alone

    found = get_close_matches(name[:_MAX_NAME], islice(known, _MOST), n=1, cutoff=0)
    return f"; the nearest is {printable(found[0], _MAX_NAME)}" if found else ""


# More than RFC 6750 section 2.1 allows, as issuers differ; but nothing that could end the header's line.
_BEARER_TOKEN = re.compile(r"[!-~]{1,8192}")


def is_bearer_token(text: str) -> bool:
    """Return whether ``text`` can be sent as a bearer token."""
    return _BEARER_TOKEN.fullmatch(text) is not None
