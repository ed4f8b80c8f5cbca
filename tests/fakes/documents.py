"""Documents in files, and good JSON objects made hostile: what two readers read differently, or choke on."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from schemas.registry import SchemaRegistry

Spoil = Callable[[bytes], bytes]

TWICE = "a duplicate key in an object"
NOT_FINITE = "a number that is not finite"
TOO_GREAT = "an integer beyond 2^53-1"
TOO_DEEP = "nested too deeply"
TOO_LARGE = "larger than the limit"
SURROGATE = "a lone surrogate"
NOT_UTF_8 = "not UTF-8"
NOT_JSON = "not JSON"

_DEPTH = 10_000


def _with(member: bytes) -> Spoil:
    """Put a member before the others."""
    return lambda good: b'{"x":' + member + b"," + good[1:]


def _repeated(good: bytes) -> bytes:
    """Say the first key twice, at first with another value."""
    key = good[1 : good.index(b":")]
    return b"{" + key + b":null," + good[1:]


def _repeated_escaped(good: bytes) -> bytes:
    """Say the first key twice, at first with its letters escaped."""
    key = good[2 : good.index(b":") - 1].decode("ascii")
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in key)
    return b'{"' + escaped.encode("ascii") + b'":null,' + good[1:]


HOSTILE: Final[Mapping[str, tuple[Spoil, str]]] = MappingProxyType(
    {
        "a key twice": (_repeated, TWICE),
        "a key twice, once escaped": (_repeated_escaped, TWICE),
        "NaN": (_with(b"NaN"), NOT_FINITE),
        "Infinity": (_with(b"Infinity"), NOT_FINITE),
        "minus Infinity": (_with(b"-Infinity"), NOT_FINITE),
        "a number that overflows": (_with(b"1e400"), NOT_FINITE),
        "a number of 5000 digits that overflows": (_with(b"9" * 5000 + b".0"), NOT_FINITE),
        "an exponent of 1000 digits": (_with(b"1e" + b"9" * 1000), NOT_FINITE),
        "2^53": (_with(b"9007199254740992"), TOO_GREAT),
        "2^53+1": (_with(b"9007199254740993"), TOO_GREAT),
        "minus 2^53+1": (_with(b"-9007199254740993"), TOO_GREAT),
        "an integer of 5000 digits": (_with(b"9" * 5000), TOO_GREAT),
        "a lone high surrogate": (_with(b'"\\ud800"'), SURROGATE),
        "a lone low surrogate": (_with(b'"\\udc00"'), SURROGATE),
        "surrogates the wrong way round": (_with(b'"\\udc00\\ud800"'), SURROGATE),
        "33 deep": (_with(b"[" * 33 + b"]" * 33), TOO_DEEP),
        "10000 arrays deep": (_with(b"[" * _DEPTH + b"]" * _DEPTH), TOO_DEEP),
        "10000 objects deep": (_with(b'{"":' * _DEPTH + b"0" + b"}" * _DEPTH), TOO_DEEP),
        "10000 deep and never closed": (lambda good: b"[" * _DEPTH + good, TOO_DEEP),
        "a string of 1 MiB": (_with(b'"' + b"a" * (1 << 20) + b'"'), TOO_LARGE),
        "1 MiB of white space": (lambda good: good + b" " * (1 << 20), TOO_LARGE),
        "a stray byte": (_with(b'"\xff"'), NOT_UTF_8),
        "an overlong slash": (_with(b'"\xc0\xaf"'), NOT_UTF_8),
        "a surrogate in UTF-8": (_with(b'"\xed\xa0\x80"'), NOT_UTF_8),
        "UTF-16": (lambda good: good.decode("ascii").encode("utf-16"), NOT_UTF_8),
        "a byte order mark": (lambda good: b"\xef\xbb\xbf" + good, NOT_JSON),
        "a NUL after the end": (lambda good: good + b"\0", NOT_JSON),
        "another document after the end": (lambda good: good + good, NOT_JSON),
        "a comment": (lambda good: good + b"//", NOT_JSON),
        "cut short": (lambda good: good[:-1], NOT_JSON),
        "nothing": (lambda _good: b"", NOT_JSON),
        "a leading zero": (_with(b"01"), NOT_JSON),
        "single quotes": (_with(b"'a'"), NOT_JSON),
        "a bare control character": (_with(b'"\x1b[31m"'), NOT_JSON),
    }
)
"""By what is wrong with it: how a good object in ASCII is spoilt, and the reason of ``strict_json``."""

NO_OBJECTS: Final = (b"[]", b"null", b"true", b"0", b'"{}"', b"[[{}]]")
"""Good JSON, but none of it an object."""


def document_file(directory: Path, name: str, document: object) -> None:
    """Write ``document`` to the file ``name``: a text as it is, anything else as JSON."""
    (directory / name).write_text(document if isinstance(document, str) else json.dumps(document))


def write_contract(directory: Path) -> None:
    """Write the documents that every process has into ``directory``, which this makes."""
    directory.mkdir()
    for ref, text in SchemaRegistry().documents.items():
        (directory / f"{ref}.json").write_bytes(text)
