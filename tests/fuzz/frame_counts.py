"""How many frames live targets have had read: in a file, since libFuzzer ends its process without a word."""

import mmap
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any, Final

from schemas.frames import Frame, FrameReader
from schemas.registry import SchemaRegistry

FILE_VARIABLE: Final = "EDGE_FUZZ_FRAME_COUNT"
"""The variable of the environment that names the file; without it nothing is kept."""
_COUNT: Final = struct.Struct("<Q")


class CountingReader(FrameReader):
    """A reader of frames that counts them: what was read is counted, and not what was sent."""

    def __init__(self, registry: SchemaRegistry) -> None:
        super().__init__(registry)
        self._file = _file()

    def read(self, *arguments: Any) -> Frame:
        """Count a frame, and read it."""
        if self._file is not None:
            _COUNT.pack_into(self._file, 0, 1 + _COUNT.unpack_from(self._file)[0])
        return super().read(*arguments)


@cache
def _file() -> mmap.mmap | None:
    name = os.environ.get(FILE_VARIABLE)
    if name is None:
        return None
    with Path(name).open("w+b") as file:
        file.write(bytes(_COUNT.size))
        file.flush()
        return mmap.mmap(file.fileno(), _COUNT.size)


def count_in(path: Path) -> int:
    """Return the count that a process has left; 0 if it has read no frame."""
    try:
        count: int = _COUNT.unpack(path.read_bytes())[0]
    except FileNotFoundError:
        return 0
    return count
