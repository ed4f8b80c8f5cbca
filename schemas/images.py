"""Images in results: a member with base64 of a PNG or a JPEG, which an agent gets as an image, not as text.

Node and relay check type and size by the first bytes of the file. Must not decode an image.
"""

import binascii
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from schemas.error_roots import PeerError

MAX_SIDE = 8000
"""Pixels. A small file can state any size, and a decoder would need memory for that."""

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
_MAX_SEGMENTS = 64  # before the frame header of a JPEG; cameras write fewer than ten
_NO_FRAME_HEADER = frozenset({0xC4, 0xC8, 0xCC})  # C0 to CF are frame headers, but for these


Images = tuple[Mapping[str, Any], ...]
"""Content blocks of MCP."""


class ImageMember(NamedTuple):
    """A member at the top level of a result: base64 of an image of one media type."""

    name: str
    media_type: str


class NoImageError(PeerError):
    """A member is no image of its type, or a too large one. The text has the member and the rule."""


def apart(result: Mapping[str, Any], members: Sequence[ImageMember]) -> tuple[Mapping[str, Any], Images]:
    """Return ``result`` without its images, and these as content blocks of MCP.

    Raises:
        NoImageError: one is no image of its type, or has more than ``MAX_SIDE`` pixels a side.
    """
    found = [member for member in members if member.name in result]
    if not found:
        return result, ()
    for name, media_type in found:
        width, height = _SIZES[media_type](_bytes_of(result[name]))
        if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
            raise NoImageError(
                f"/{name} must be base64 of an {media_type} of at most {MAX_SIDE} x {MAX_SIDE} pixels"
            )
    names = {member.name for member in found}
    blocks = ({"type": "image", "data": result[name], "mimeType": media_type} for name, media_type in found)
    return {name: value for name, value in result.items() if name not in names}, tuple(blocks)


def _bytes_of(text: object) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True) if isinstance(text, str) else b""
    except ValueError:
        return b""


def _png_size(data: bytes) -> tuple[int, int]:
    """Return width and height; zeros if this is no PNG."""
    if not data.startswith(_PNG) or data[12:16] != b"IHDR" or len(data) < 24:  # noqa: PLR2004 - its header
        return 0, 0
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """Return width and height, as the frame header has them; zeros if this is no JPEG."""
    place = len(_JPEG) if data.startswith(_JPEG) else len(data)
    for _ in range(_MAX_SEGMENTS):
        if place + 9 > len(data) or data[place] != 0xFF:  # noqa: PLR2004 - a marker begins with it
            break
        marker, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if marker & 0xF0 == 0xC0 and marker not in _NO_FRAME_HEADER:  # noqa: PLR2004 - as above
            height, width = struct.unpack_from(">HH", data, place + 5)
            return width, height
        place += 2 + length
    return 0, 0


_SIZES = {"image/png": _png_size, "image/jpeg": _jpeg_size}
