"""6. A developer writes a kind, as the page describes.

Steps: an environment of its own · run the commands of docs/write-your-own-kind.md in their order · compare
the files that the page shows · start the system with the kind · call it in both views.

The sensor is not here: its bus is a file with the register and what follows it, in every interpreter of the
developer's environment. The package is as it was written.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from tests.fakes.demo import Demo, error_of, running_demo
from tests.fakes.guide import shown_files

pytestmark = pytest.mark.long

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "write-your-own-kind.md"
PROGRAMS = {
    "kubelet": "from kubelet.cli.entry import main",
    "relay": "from relay.cli.entry import main",
    "pip": "from pip._internal.cli.main import main",
}
ERAS = pytest.mark.parametrize("era", ["2026-07-28", "legacy"])
BOUND_S = 100
CELSIUS = 25.5
FAKE_BUS = """\
import fcntl, os
real_open, real_ioctl = os.open, fcntl.ioctl
def fake_open(path, *how, **named):
    return real_open({bus!r} if path == "/dev/i2c-1" else path, *how, **named)
def fake_ioctl(descriptor, request, *more):
    return 0 if (request, more) == (0x0703, (0x48,)) else real_ioctl(descriptor, request, *more)
os.open, fcntl.ioctl = fake_open, fake_ioctl
"""
"""What lets a file pass for a bus, on which the one device is asked for its register 0."""


@dataclass(frozen=True)
class Followed:
    """What the page's commands have left: where they ran, what each printed, where packages are installed.

    Attributes:
        bus: the file that is the sensor.
    """

    directory: Path
    printed: dict[str, str]
    site: Path
    bus: Path


@pytest.fixture(scope="module")
def page() -> str:
    if not DOCS.is_dir():
        pytest.skip("the pages are not here: this runs beside an installed wheel")
    return PAGE.read_text("utf-8")


def environment_below(directory: Path) -> tuple[dict[str, str], Path, Path]:
    """Return the variables of an environment that has what this one has, where it installs, and its bus."""
    venv.create(directory, with_pip=False)
    [site] = directory.glob("lib/python*/site-packages")
    outer = [sysconfig.get_path("purelib"), *(path for path in sys.path if path and Path(path).is_dir())]
    lines = [f"import site; site.addsitedir({path!r})" for path in dict.fromkeys(outer)]
    (site / "outer.pth").write_text("\n".join(lines) + "\n", "utf-8")
    for name, importing in PROGRAMS.items():
        program = directory / "bin" / name
        program.write_text(f"#!{directory}/bin/python3 -P\n{importing}\nraise SystemExit(main())\n", "utf-8")
        program.chmod(0o755)
    bus = directory / "bus"
    bus.write_bytes(bytes.fromhex("001980"))
    (site / "sitecustomize.py").write_text(FAKE_BUS.format(bus=str(bus)), "utf-8")
    variables = {
        **os.environ,
        "PYTHONPATH": str(site),
        "PATH": f"{directory / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        # The build's needs are here, and the network may not be.
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_NO_INDEX": "1",
        "PYTHONWARNINGS": "ignore",
    }
    return variables, site, bus


@pytest.fixture(scope="module")
def followed(page: str, tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """Every command of the page, run in its order."""
    directory = tmp_path_factory.mktemp("stranger")
    variables, site, bus = environment_below(tmp_path_factory.mktemp("environment"))
    printed = {}
    for command in re.findall(r"(?ms)^```sh\n(.*?)^```$", page):
        done = subprocess.run(
            ["/bin/sh", "-euc", command],
            cwd=directory,
            env=variables,
            check=False,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
        )
        assert done.returncode == 0, command + done.stdout + done.stderr
        printed[command.strip()] = done.stdout
    return Followed(directory, printed, site, bus)


@pytest.fixture(scope="module")
def extended(followed: Followed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """The system with the kind, and one mock node, which does not have it."""
    options = ("--nodes", "1", "--kinds", "acme.soil")
    with running_demo(tmp_path_factory.mktemp("demo"), *options, sources=followed.site) as running:
        yield running


def tool_of(demo: Demo) -> str:
    return f"acmesoil.{demo.real_node}.soil.get"


def test_the_page_has_the_commands_that_a_stranger_needs(followed: Followed) -> None:
    assert list(followed.printed) == [
        "kubelet kind new acme.soil --from i2c",
        "python3 -P -m unittest discover acme-soil",
        "pip install --no-deps ./acme-soil",
        "relay demo --once --kinds acme.soil",
    ]


def test_the_files_on_the_page_are_those_that_the_command_writes(page: str, followed: Followed) -> None:
    shown = shown_files(page)
    assert len(shown) == 3
    for path, text in shown.items():
        assert (followed.directory / path).read_text("utf-8") == text


def test_the_package_passes_its_own_test_as_it_is_written(followed: Followed) -> None:
    assert "python3 -P -m unittest discover acme-soil" in followed.printed


def test_the_package_is_in_the_house_style(followed: Followed) -> None:
    for command in (["ruff", "check", "--isolated"], ["ruff", "format", "--isolated", "--check"]):
        subprocess.run(
            [sys.executable, "-P", "-m", *command, "--no-cache", "--line-length=110", "."],
            cwd=followed.directory / "acme-soil",
            check=True,
            capture_output=True,
            timeout=BOUND_S,
        )


def test_the_demo_shows_what_the_new_tool_says(followed: Followed) -> None:
    shown = followed.printed["relay demo --once --kinds acme.soil"]
    [part] = [part for part in shown.split("\n\n") if "  acmesoil-get {" in part]
    assert re.search(rf"(?m)^    celsius +{CELSIUS}$", part)
    assert "FAILED" not in shown


@ERAS
async def test_an_agent_calls_the_new_tool_and_gets_what_the_sensor_measures(
    extended: Demo, era: str
) -> None:
    async with extended.client(era) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        result = await client.call_tool(tool_of(extended), {})
    description = tools[tool_of(extended)].description
    assert description == "Read one temperature of a node, in °C, from a sensor on its I2C bus."
    assert result.is_error is False
    content = dict(result.structured_content or {})
    assert content.keys() == {"node_id", "read_at", "celsius"}
    assert (content["node_id"], content["celsius"]) == (extended.real_node, CELSIUS)


async def test_a_board_without_the_bus_is_the_fault_of_the_row(extended: Demo, followed: Followed) -> None:
    away = followed.bus.rename(followed.bus.with_name("away"))
    try:
        async with extended.client() as client:
            result = await client.call_tool(tool_of(extended), {})
    finally:
        away.rename(followed.bus)
    assert "The node has no such sensor, or it cannot be read." in json.dumps(error_of(result))


@ERAS
async def test_in_the_kinds_view_the_new_tool_is_one_for_all_nodes(extended: Demo, era: str) -> None:
    async with extended.client(era, "?view=kinds") as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        result = await client.call_tool("acmesoil.get", {"node": extended.real_node})
    assert "acmesoil.get" in names
    assert dict(result.structured_content or {})["node_id"] == extended.real_node


def test_the_new_documents_are_served_to_everybody(extended: Demo) -> None:
    for ref in ("acme.soil.get.input@1.0.0", "acme.soil.get.output@1.0.0"):
        answer = httpx2.get(f"{extended.base_url}/schemas/{ref}", trust_env=False)
        assert answer.json()["$id"] == f"mcp://schemas/{ref}"
