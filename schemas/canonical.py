"""The one byte form of a JSON value (RFC 8785, JCS) and the hashes taken over it.

Must not be given values that did not come through ``strict_json`` or were not built by us: JCS is only
unambiguous for those.
"""

from typing import Any

import blake3
import rfc8785


def jcs(value: Any) -> bytes:
    """Return the canonical UTF-8 bytes of ``value``.

    Raises:
        ValueError: the value has no canonical form (NaN, an integer beyond 2^53-1, a lone surrogate).
    """
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise ValueError("no canonical form") from error


def blake3_hex(data: bytes) -> str:
    """Return the BLAKE3-256 digest of ``data``: 64 lower-case hex digits."""
    return blake3.blake3(data).hexdigest()
