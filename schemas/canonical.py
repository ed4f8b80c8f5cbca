"""The one byte form of a JSON value (RFC 8785, JCS) and the hashes taken over it.

Must be given only values that ``strict_json`` parsed or that this system built: JCS is unambiguous
only for those.
"""

import json
import math
from typing import Any

import blake3
import rfc8785

from schemas.strict_json import MAX_SAFE_INTEGER

_PLAIN = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"))
_WITHOUT_NUMBERS = frozenset({str, bool, type(None)})
_LEAST_PLAIN = 1e-4
"""The least fraction that Python writes without an exponent."""


def jcs(value: Any) -> bytes:
    """Return the canonical UTF-8 bytes of ``value``.

    In ASCII, where code points and UTF-16 sort alike, the standard encoder gives the same bytes for all but
    some numbers; it is four times faster.

    Raises:
        ValueError: the value has no canonical form (NaN, an integer beyond 2^53-1, a lone surrogate).
    """
    try:
        text = _PLAIN.encode(value)
        if text.isascii() and _has_plain_numbers(value):
            return text.encode("ascii")
        return rfc8785.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError("no canonical form") from error


def is_canonical(data: bytes, value: Any) -> bool:
    """Return whether ``data`` is the canonical form of ``value``, which was parsed from it."""
    return jcs(value) == data


def _has_plain_numbers(value: Any) -> bool:
    """Return whether Python spells all numbers in ``value`` as ECMAScript does, and all keys are texts."""
    waiting = [value]
    for each in waiting:
        kind = type(each)
        if kind is dict:
            waiting += each.values()
            if not {str}.issuperset(map(type, each)):
                return False
        elif kind is list:
            waiting += each
        elif not (kind in _WITHOUT_NUMBERS or _is_plain_number(each)):
            return False
    return True


def _is_plain_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) <= MAX_SAFE_INTEGER
    # Of other fractions, one of the two languages writes an exponent, and Python a fraction of zero.
    return type(value) is float and _LEAST_PLAIN <= abs(value) < math.inf and not value.is_integer()


def blake3_hex(data: bytes) -> str:
    """Return the BLAKE3-256 digest of ``data``: 64 lower-case hex digits."""
    return blake3.blake3(data).hexdigest()
