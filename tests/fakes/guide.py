"""Does what a page of ``docs/`` says, block by block, to a copy of the sources.

As the page explains it: ``<!-- file: PATH -->`` over a block makes a file of it, and ``, after: LINE`` or
``, instead of: LINE`` puts it into a file that exists. Must not guess: a line that is not there, or is there
twice, ends it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?ms)^<!-- file: (?P<path>[^\n,]+)(?:, (?P<how>after|instead of): (?P<line>[^\n]+))? -->\n"
    r"```\w+\n(?P<text>.*?)^```$"
)
_COMMENT = re.compile(r"(?m)^<!-- ")


@dataclass(frozen=True, slots=True)
class Block:
    """One block: what goes where. ``how`` and ``line`` are None when it is a file of its own."""

    path: str
    how: str | None
    line: str | None
    text: str

    def apply(self, root: Path) -> None:
        """Do to the sources below ``root`` what the page says.

        Raises:
            ValueError: the file is there already, or the line is not there just once.
        """
        file = root / self.path
        if self.how is None:
            if file.exists():
                raise ValueError(f"{self.path} is to be new, and there is one")
            file.write_text(self.text, "utf-8")
            return
        lines = file.read_text("utf-8").splitlines(keepends=True)
        places = [number for number, line in enumerate(lines) if line.strip() == self.line]
        if len(places) != 1:
            raise ValueError(f"{self.path} has {len(places)} lines that read {self.line}")
        start = places[0] + (self.how == "after")
        lines[start : places[0] + 1] = [self.text]
        file.write_text("".join(lines), "utf-8")


def blocks_of(page: str) -> Iterator[Block]:
    """Yield the blocks of ``page``, in its order.

    Raises:
        ValueError: a comment names no block; a misspelt one would otherwise be passed over.
    """
    found = [Block(**match.groupdict()) for match in _BLOCK.finditer(page)]
    if len(found) != len(_COMMENT.findall(page)):
        raise ValueError("a comment of the page is not above a block, or is misspelt")
    yield from found
