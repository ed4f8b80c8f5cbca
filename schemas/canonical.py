"""The one byte form of a JSON value (RFC 8785, JCS) and the hashes taken over it.

Must be given only values that ``strict_json`` parsed or that this system built: JCS is unambiguous
only for those.
"""

import json
from typing import Any

import blake3
import rfc8785

_PLAIN = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def jcs(value: Any) -> bytes:
    """Return the canonical UTF-8 bytes of ``value``.

    Raises:
        ValueError: the value has no canonical form (NaN, an integer beyond 2^53-1, a lone surrogate).
    """
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise ValueError("no canonical form") from error


def is_canonical(data: bytes, value: Any) -> bool:
    """Return whether ``data`` is the canonical form of ``value``, which was parsed from it.

    JCS and the standard encoder give the same bytes for values without fractions (whose spelling differs) and
    in ASCII (where code points and UTF-16 sort alike); there the standard encoder is five times faster.
    """
    if data.isascii() and not _has_fraction(value):
        return _PLAIN.encode(value).encode("utf-8") == data
    return jcs(value) == data


def _has_fraction(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_fraction, value.values()))
    if isinstance(value, list):
        return any(map(_has_fraction, value))
    return isinstance(value, float)


def blake3_hex(data: bytes) -> str:
    """Return the BLAKE3-256 digest of ``data``: 64 lower-case hex digits."""
    return blake3.blake3(data).hexdigest()
