"""21. A reader of the README types its story: a hub, a board and an agent, from the installation on.

Steps: the hub installs the wheel, and runs the relay · it makes the tokens · the board enrols and runs · the
agent calls a tool of it, and gets the answer that the README shows · Claude Code is connected.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.story import NamespacesError, blocks_of, machines, missing_programs

pytestmark = pytest.mark.long

BOUND_S = 60
ROOT = Path(__file__).parents[2]
SECTION = (
    (ROOT / "README.md").read_text("utf-8").split("\n## One hub, one board, one agent\n")[1].split("\n## ")[0]
)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the wheel: `.ci/wheel` has it here, and a checkout builds it."""
    if not (ROOT / "packaging").is_dir():
        return ROOT / "dist"
    directory = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-P", "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run([*build, "--directory", str(directory)], cwd=ROOT, check=True, timeout=BOUND_S)
    return directory


# Three environments are made, and each begins with an installation of pip.
@pytest.mark.timeout(300)
def test_the_lines_of_the_readme_end_in_the_answer_that_it_shows(tmp_path: Path, wheels: Path) -> None:
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)}")
    on_hub, tokens, on_board, call, connect = blocks_of(SECTION)
    try:
        with machines(tmp_path, wheels) as typing:
            for block in (on_hub, tokens, on_board):
                typing.type(block)
            answer = typing.type(call).splitlines()[-1]
            connected = typing.type(connect)
    except NamespacesError as error:
        pytest.skip(f"no namespaces: {error}")
    shown = json.loads(SECTION.split("```json\n")[1].split("```")[0])
    assert [*json.loads(answer)] == [*shown]
    assert all(isinstance(value, float) for value in json.loads(answer).values())
    assert "4 tools are listed." in connected
    entry = json.loads((tmp_path / "agent" / ".claude.json").read_text("utf-8"))["mcpServers"]["edge"]
    assert "https://hub.example:8700" in entry["args"]


def test_a_block_without_a_machine_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="which machine"):
        blocks_of("<!-- on hub -->\n```sh\ntrue\n```\n")
