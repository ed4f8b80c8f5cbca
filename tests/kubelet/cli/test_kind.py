"""`kubelet kind new`: the package that it writes."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kubelet.cli.kind import KindSource, write_package
from schemas.error_roots import CommandLineError
from schemas.kind_packages import read_kind

FILES = {
    "pyproject.toml",
    "acme_uptime/__init__.py",
    "acme_uptime/handler.py",
    "acme_uptime/kind.json",
    "acme_uptime/documents/acme.uptime.get.input@1.0.0.json",
    "acme_uptime/documents/acme.uptime.get.output@1.0.0.json",
    "tests/__init__.py",
    "tests/test_handler.py",
}
BOUND_S = 60


@pytest.mark.parametrize("source", KindSource)
def test_the_package_has_all_that_a_kind_is_made_of(tmp_path: Path, source: KindSource) -> None:
    root = write_package("acme.uptime", tmp_path, source)
    assert root == tmp_path / "acme-uptime"
    assert {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()} == FILES
    assert not any("%%" in file.read_text("utf-8") for file in root.rglob("*") if file.is_file())


@pytest.mark.integration
@pytest.mark.parametrize("source", KindSource)
def test_its_test_passes_by_the_line_that_the_command_prints_with_what_a_node_has(
    tmp_path: Path, source: KindSource
) -> None:
    kubelet = [sys.executable, "-P", "-m", "kubelet", "kind", "new", "acme.big_oven", "--from", source]
    made = subprocess.run(
        [*kubelet, "--json"], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=BOUND_S
    )
    # As where no test runner is installed.
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['pytest'] = None\n")
    tested = subprocess.run(
        shlex.split(json.loads(made.stdout)["test"]),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(hidden)},
        check=False,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert tested.returncode == 0, tested.stderr
    assert re.search(r"Ran [3-9] tests", tested.stderr)


@pytest.mark.parametrize("source", KindSource)
def test_nothing_in_it_is_of_another_kind(tmp_path: Path, source: KindSource) -> None:
    root = write_package("acme.big_oven", tmp_path, source)
    row = json.loads((root / "acme_big_oven" / "kind.json").read_text("utf-8"))
    assert row["verbs"]["get"]["title"] == "Big oven"
    assert not any("uptime" in file.read_text("utf-8").lower() for file in root.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("name", "short", "handler"),
    [
        ("acme.uptime", "acmeupti", "acme_uptime.handler:UptimeHandler"),
        ("a.b", "ab", "a_b.handler:BHandler"),
        ("acme.plant.relay_board", "acmeplan", "acme_plant_relay_board.handler:RelayBoardHandler"),
        ("acme.a_", "acmea", "acme_a_.handler:AHandler"),
        ("x.a_very_long_name_of_a_kind", "xaverylo", None),
    ],
)
def test_row_and_documents_keep_to_the_rules_of_a_package(
    tmp_path: Path, name: str, short: str, handler: str | None
) -> None:
    root = write_package(name, tmp_path)
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    [(entry, value)] = project["entry-points"]["edge_kubelet.kinds"].items()
    assert entry == name
    assert handler in {value, None}
    assert root.name == project["name"]
    named = read_kind(root / value.partition(".")[0], name, lambda: None)
    assert (named.kind.name, named.kind.short) == (name, short)


@pytest.mark.parametrize(
    "name", ["system.uptime", "sys.echo", "s.ys", "uptime", "A.b", "../x.y", "a.b/c", ""]
)
def test_a_name_that_no_kind_of_ones_own_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CommandLineError):
        write_package(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write_package("acme.uptime", tmp_path)
    with pytest.raises(FileExistsError):
        write_package("acme.uptime", tmp_path)
