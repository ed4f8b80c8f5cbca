"""The man pages that are made from the commands: complete, and without a fault of roff."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_manual import COMMANDS, TREE

MAKER = Path(__file__).parents[1] / "packaging" / "man_pages.py"
GUIDE = Path(__file__).parents[1] / "docs" / "operations.md"
BOUND_S = 60

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("man")
    (directory / "edge-removed.1").write_text("of a program that was removed\n")
    subprocess.run([sys.executable, "-P", str(MAKER), str(directory)], check=True, timeout=BOUND_S)
    return sorted(directory.iterdir())


def test_each_program_has_a_page_with_all_of_its_commands_and_settings(pages: list[Path]) -> None:
    assert [page.name for page in pages] == ["edge-kubelet.1", "edge-relay.1", "kubelet.1", "relay.1"]
    for page in pages[:2]:
        text, program = page.read_text("utf-8"), page.stem.removeprefix("edge-")
        expected = [name for name in COMMANDS if name.startswith(program) and not TREE[name][0].hidden]
        assert [name for name in expected if f'.SS "edge-{name}"'.replace("-", "\\-") not in text] == []
        assert f"{program.upper()}_STATE_DIR" in text
    assert [page.read_text("utf-8") for page in pages[2:]] == [
        f".so man1/{page.name}\n" for page in pages[:2]
    ]


def test_the_exit_codes_are_those_of_the_guide(pages: list[Path]) -> None:
    table = GUIDE.read_text("utf-8").partition("| exit code |")[2].partition("\n\n")[0]
    documented = ", ".join(re.findall(r"^\| ([0-9][^|]*) \|", table, re.MULTILINE)).split(", ")
    of_kubelet, of_relay = (
        re.findall(r"^\\fB([0-9 to]+)\\fR$", page.read_text("utf-8"), re.MULTILINE) for page in pages[:2]
    )
    assert of_relay == documented
    assert of_kubelet == [code for code in documented if code not in {"4", "10 to 14"}]


@pytest.mark.parametrize(
    "checker", [["mandoc", "-T", "lint", "-W", "warning"], ["groff", "-man", "-ww", "-z"]]
)
def test_roff_has_nothing_to_complain_about(pages: list[Path], checker: list[str]) -> None:
    if shutil.which(checker[0]) is None:
        pytest.skip(f"{checker[0]} is not installed")
    done = subprocess.run(
        [*checker, *pages[:2]], capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert (done.stdout, done.stderr) == ("", "")
