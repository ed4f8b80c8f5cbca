"""JSON as this system accepts it: one reading per document, or none.

The standard parser takes duplicate keys, NaN, integers that other languages round, lone surrogates and
nesting deep enough to end the process. Each of those lets two readers of the same bytes disagree about
what was signed. Every byte that comes in from outside passes here first. Must not repair anything.
"""

import json
import re
from math import isfinite
from typing import Any

from schemas.error_roots import PeerError

MAX_DEPTH = 32
MAX_SAFE_INTEGER = 2**53 - 1

# Possessive, and the end of the text ends a string too: no attempt fails and is made again one quote later,
# which for a string of escaped quotes that never ends would take quadratic time.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_INTEGER_DIGITS = len(str(MAX_SAFE_INTEGER)) + 1


class StrictJsonError(PeerError):
    """The bytes are not JSON that this system accepts; ``reason`` is a fixed text, safe to log."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def loads(data: bytes | str, *, max_bytes: int) -> Any:
    """Parse ``data``, at most ``max_bytes`` of UTF-8, into plain Python values.

    Raises:
        StrictJsonError: too large, not UTF-8, not JSON, or one of the ambiguities named above.
    """
    if len(data) > max_bytes or _size(data) > max_bytes:
        raise StrictJsonError("larger than the limit")
    text = _decoded(data) if isinstance(data, bytes) else data
    _check_depth(text)
    try:
        value = _DECODER.decode(text)
    except StrictJsonError:
        raise
    except ValueError:
        raise StrictJsonError("not JSON") from None
    # Only an escape can smuggle a surrogate past the UTF-8 decoder; text that came decoded may hold it bare.
    if "\\u" in text or not (isinstance(data, bytes) or text.isascii()):
        _check_surrogates(value)
    return value


def _size(data: bytes | str) -> int:
    if isinstance(data, bytes) or data.isascii():
        return len(data)
    return len(data.encode("utf-8", "surrogatepass"))


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise StrictJsonError("not UTF-8") from None


def _check_depth(text: str) -> None:
    # A document with few brackets cannot be deep, which spares nearly every document the scan.
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for char in _STRING.sub("", text):
        if char in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise StrictJsonError("nested too deeply")
        elif char in "]}":
            depth -= 1


def _check_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise StrictJsonError("a lone surrogate") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise StrictJsonError("a key stands twice in one object")
    return result


def _integer(literal: str) -> int:
    # The length first: int() of a million digits is slow enough to be an attack.
    if len(literal) <= _INTEGER_DIGITS and abs(value := int(literal)) <= MAX_SAFE_INTEGER:
        return value
    raise StrictJsonError("an integer beyond 2^53-1")


def _float(literal: str) -> float:
    value = float(literal)
    if not isfinite(value):
        raise StrictJsonError("a number that is not finite")
    return value


def _constant(_literal: str) -> float:
    raise StrictJsonError("a number that is not finite")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_integer, parse_float=_float, parse_constant=_constant
)
