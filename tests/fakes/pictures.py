"""The smallest files that say what size an image has."""

import struct
import zlib


def png(width: int, height: int) -> bytes:
    """Return a PNG of that size: its header, and the end."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IEND", b"")


def jpeg(width: int, height: int) -> bytes:
    """Return the start of a JPEG of that size: an application segment and the frame header."""
    application = b"\xff\xe0" + struct.pack(">H", 16) + b"JFIF\0" + bytes(9)
    frame = b"\xff\xc0" + struct.pack(">HBHHB", 11, 8, height, width, 1) + b"\x01\x11\x00"
    return b"\xff\xd8" + application + frame + b"\xff\xd9"


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
