"""6. A developer writes a kind of his own, as the page describes.

Steps: copy the sources · do what docs/write-your-own-kind.md says, block by block · run the checks that it
ends with · start the system from the copy · call the new tool on this machine.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

import kubelet
import relay
import schemas
from tests.fakes.demo import Demo, environment_of, running_demo
from tests.fakes.guide import Block, blocks_of

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGE = DOCS / "write-your-own-kind.md"
PACKAGES = (schemas, kubelet, relay)
NOT_COPIED = shutil.ignore_patterns("__pycache__", "node_modules")
ERAS = pytest.mark.parametrize("era", ["2026-07-28", "legacy"])


@pytest.fixture(scope="module")
def page() -> str:
    if not DOCS.is_dir():
        pytest.skip("the pages are not here: this runs beside an installed wheel")
    return PAGE.read_text("utf-8")


@pytest.fixture(scope="module")
def blocks(page: str) -> list[Block]:
    return list(blocks_of(page))


@pytest.fixture(scope="module")
def sources(blocks: list[Block], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources to which everything was done that the page says."""
    copy = tmp_path_factory.mktemp("sources")
    for package in PACKAGES:
        [directory] = package.__path__
        shutil.copytree(directory, copy / package.__name__, ignore=NOT_COPIED)
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=NOT_COPIED)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for block in blocks:
        block.apply(copy)
    return copy


@pytest.fixture(scope="module")
def extended(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """The system of the copy, with one mock node."""
    with running_demo(tmp_path_factory.mktemp("demo"), "--nodes", "1", sources=sources) as running:
        yield running


def run_in(sources: Path, *arguments: str) -> str:
    """Run Python with the packages of the copy, expect that it ends well, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=sources,
        env=environment_of(sources),
        check=False,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool_of(demo: Demo) -> str:
    return f"sysup.{demo.real_node}.uptime.get"


def uptime_s() -> float:
    return float(Path("/proc/uptime").read_text("ascii").split()[0])


def test_every_block_of_code_on_the_page_is_done(page: str, blocks: list[Block]) -> None:
    assert len(re.findall(r"(?m)^```(?:json|python)$", page)) == len(blocks)


def test_a_kind_is_its_documents_a_row_a_handler_and_a_line(blocks: list[Block]) -> None:
    own = [block for block in blocks if not block.path.startswith(("schemas/documents/", "tests/"))]
    assert [(block.path, block.how) for block in own] == [
        ("schemas/kinds.py", "instead of"),
        ("kubelet/handlers/uptime.py", None),
        ("kubelet/daemon/agent.py", "after"),  # the line's import
        ("kubelet/daemon/agent.py", "instead of"),
    ]


def test_the_copy_comes_before_what_is_installed(sources: Path) -> None:
    listing = "import schemas, kubelet, relay; print(*schemas.__path__, *kubelet.__path__, *relay.__path__)"
    assert run_in(sources, "-c", listing).split() == [str(sources / package.__name__) for package in PACKAGES]


def test_what_the_page_adds_passes_its_own_tests_and_those_of_the_contract(sources: Path) -> None:
    tests = ["tests/kubelet/test_uptime.py", "tests/schemas/test_registry.py", "tests/schemas/test_kinds.py"]
    tests.append("tests/kubelet/daemon/test_agent.py::test_a_node_can_do_what_the_registry_knows")
    assert "passed" in run_in(sources, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)


def test_what_the_page_adds_is_in_the_house_style(sources: Path, blocks: list[Block]) -> None:
    written = sorted({block.path for block in blocks if block.path.endswith(".py")})
    run_in(sources, "-m", "ruff", "check", "--no-cache", *written)
    run_in(sources, "-m", "ruff", "format", "--no-cache", "--check", *written)
    run_in(sources, "-m", "mypy", "--cache-dir", "/dev/null", *written)


@ERAS
async def test_the_new_tool_is_listed_for_this_machine_as_the_row_says(extended: Demo, era: str) -> None:
    async with extended.client(era) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    # The mock nodes have no handler of the kind: they have three tools, and this machine has four.
    assert len(tools) == 7
    tool = tools[tool_of(extended)]
    assert tool.description == "Read how long one Linux node has been up, in whole seconds."
    assert tool.annotations is not None
    assert (tool.annotations.read_only_hint, tool.annotations.idempotent_hint) == (True, True)
    assert tool.output_schema is not None
    assert set(tool.output_schema["required"]) == {"node_id", "uptime_s"}


@ERAS
async def test_an_agent_calls_the_new_tool_and_gets_this_machine_s_uptime(extended: Demo, era: str) -> None:
    async with extended.client(era) as client:
        result = await client.call_tool(tool_of(extended), {})
    assert result.is_error is False
    content = dict(result.structured_content or {})
    assert 0 <= uptime_s() - content.pop("uptime_s") < 60
    assert content == {"node_id": extended.real_node}


async def test_arguments_that_the_new_document_does_not_admit_are_refused(extended: Demo) -> None:
    async with extended.client() as client:
        result = await client.call_tool(tool_of(extended), {"since": "boot"})
    assert result.is_error is True
    assert (result.meta or {})["edge-kubelet/error"]["code"] == "E_MANIFEST_INVALID"


def test_the_new_documents_are_served_to_everybody(extended: Demo) -> None:
    for ref in ("system.uptime.get.input@1.0.0", "system.uptime.get.output@1.0.0"):
        answer = httpx2.get(f"{extended.base_url}/schemas/{ref}", trust_env=False)
        assert answer.json()["$id"] == f"mcp://schemas/{ref}"


def test_the_demo_shows_what_the_new_tool_says(sources: Path) -> None:
    shown = run_in(sources, "-m", "relay", "demo", "--once", "--nodes", "0")
    [part] = [part for part in shown.split("\n\n") if ".uptime.get\n" in part]
    assert re.search(r"(?m)^    uptime +\S", part)
    assert "FAILED" not in shown
