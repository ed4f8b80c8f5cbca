"""32. The hub was taken, and an owner of three boards types docs/security.md.

Steps: three boards are enrolled at a hub by the README · the hub is given up with all that it has · a new
one has a CA of its own · each board is enrolled again, and keeps its kinds · a new token lists all three.
"""

import re
from pathlib import Path

import pytest

from tests.end_to_end.test_21_a_reader_types_the_readme import blocks_below, typing_on, wheels
from tests.fakes.story import Block, blocks_of

__all__ = ["wheels"]

pytestmark = pytest.mark.long

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text("utf-8")
BOARDS = ("board1", "board2", "board3")


def at(board: str, block: Block) -> Block:
    """Return ``block``, typed at ``board``; all of them are on one loopback."""
    lines = block.lines.replace("edge-kubelet run", "edge-kubelet run --loopback-port 0")
    return Block(board, block.until, lines)


@pytest.mark.timeout(600)  # five environments, each begins with an installation of pip
def test_three_boards_are_enrolled_again_at_a_new_ca_and_answer(tmp_path: Path, wheels: Path) -> None:
    first_hub, first_token, first_board, agent = blocks_below("Three machines: hub, board, agent")
    *hub, board, listing = blocks_of(PAGE.split("\n## When the hub was taken\n")[1])
    install = [line for line in agent.lines.splitlines() if "venv" in line or "pip" in line]
    with typing_on(tmp_path, wheels) as typing:
        typing.type(first_hub)
        typing.type(
            Block(first_token.machine, None, first_token.lines.replace("--label greenhouse", "--uses 3"))
        )
        for name in BOARDS:
            typing.type(at(name, first_board))
        typing.stop()
        (tmp_path / "hub").rename(tmp_path / "taken")
        for block in hub:
            typing.type(block)
        for name in BOARDS:
            enrolled = typing.type(at(name, board))
            assert "linux.health" in enrolled
        install = [line.partition(" && scp")[0] for line in install]
        typing.type(Block("agent", None, "\n".join(install)))
        printed = typing.type(listing)
    assert len(re.findall(r"\b[0-9a-hjkmnp-tv-z]{26}\b", printed)) == len(BOARDS)
