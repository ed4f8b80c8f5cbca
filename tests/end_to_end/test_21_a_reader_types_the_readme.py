"""21. A reader of the README types its stories: one machine, and a hub, a board and an agent.

Steps: the hub installs the wheel, and runs the relay · it makes the tokens · the board enrols and runs · on
one machine an agent calls a tool of it, and gets the answer that the README shows · Claude Code is connected.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.story import Block, Machines, NamespacesError, blocks_of, machines, missing_programs

pytestmark = pytest.mark.long

BOUND_S = 60
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def blocks_below(heading: str) -> list[Block]:
    return blocks_of(README.split(f"\n### {heading}\n")[1].split("\n#")[0])


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the wheel: `.ci/wheel` has it here, and a checkout builds it."""
    if not (ROOT / "packaging").is_dir():
        return ROOT / "dist"
    directory = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-P", "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run([*build, "--directory", str(directory)], cwd=ROOT, check=True, timeout=BOUND_S)
    return directory


@contextmanager
def typing_on(directory: Path, wheels: Path, names: str = "127.0.0.1 hub.example") -> Iterator[Machines]:
    if missing := missing_programs():
        pytest.skip(f"not installed: {', '.join(missing)}")
    try:
        with machines(directory, wheels, names) as typing:
            yield typing
    except NamespacesError as error:
        pytest.skip(f"no namespaces: {error}")


@pytest.mark.timeout(300)  # each environment begins with an installation of pip
def test_the_lines_for_one_machine_end_in_the_answer_that_is_shown(tmp_path: Path, wheels: Path) -> None:
    relay, node, agent = blocks_below("One machine")
    with typing_on(tmp_path, wheels) as typing:
        for block in (relay, node):
            typing.type(block)
        printed = typing.type(agent)
    shown = json.loads(README.split("The answer is `")[1].split("`")[0])
    [answer] = [json.loads(line) for line in printed.splitlines() if line.startswith('{"one"')]
    assert [*answer] == [*shown]
    assert all(isinstance(value, float) for value in answer.values())
    entry = json.loads((tmp_path / "here" / ".claude.json").read_text("utf-8"))["mcpServers"]["edge"]
    assert entry["url"] == "http://127.0.0.1:8700/mcp/kinds"


@pytest.mark.timeout(300)
def test_the_lines_for_three_machines_connect_the_agent(tmp_path: Path, wheels: Path) -> None:
    *services, connect = blocks_below("Three machines: hub, board, agent")
    with typing_on(tmp_path, wheels) as typing:
        for block in services:
            typing.type(block)
        connected = typing.type(connect)
    # Those of every node, and of this board the kinds that it enabled when it enrolled.
    assert int(re.findall(r"(\d+) tools are listed\.", connected)[0]) > 4
    entry = json.loads((tmp_path / "agent" / ".claude.json").read_text("utf-8"))["mcpServers"]["edge"]
    assert "https://hub.example:8700/mcp/kinds" in entry["args"]


def pip(wheel: str, *before: str) -> "subprocess.CompletedProcess[str]":
    """Have pip resolve what a line of ``EDGE`` names, without an index."""
    command = [sys.executable, "-P", "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        [*before, *command, f"{wheel}[client]"],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )


def test_pip_finds_the_wheel_of_a_clone_below_a_directory_with_a_space(tmp_path: Path, wheels: Path) -> None:
    clone = tmp_path / "my clone"
    shutil.copytree(wheels, clone / "dist")
    [line] = [line for line in README.splitlines() if line.startswith("export EDGE=")]
    shell = ["bash", "-ec", f'cd "{clone}" && {line} && printf %s "$EDGE"']
    wheel = subprocess.run(shell, check=True, capture_output=True, text=True, timeout=BOUND_S).stdout
    assert "Processing " in pip(wheel).stdout


def test_pip_says_in_one_line_why_not_on_a_machine_of_32_bits(wheels: Path) -> None:
    reason = "edge.kubelet.needs.a.64.bit.machine"
    [wheel] = wheels.glob("edge_kubelet-*.whl")
    refused = pip(str(wheel), "setarch", "linux32")
    assert refused.returncode == 1
    assert reason in refused.stderr.splitlines()[-1]
    assert reason not in pip(str(wheel)).stderr


def test_a_block_without_a_machine_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="which machine"):
        blocks_of("<!-- on hub -->\n```sh\ntrue\n```\n")
