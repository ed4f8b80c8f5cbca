"""What npm installs for these tests is pinned by hash, and names no place to get it from."""

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LOCK_TEXT = (HERE / "package-lock.json").read_text("utf-8")
PACKAGES: dict[str, dict[str, Any]] = json.loads(LOCK_TEXT)["packages"]
MANIFEST: dict[str, Any] = json.loads((HERE / "package.json").read_text("utf-8"))


def test_the_lock_names_no_address() -> None:
    assert "://" not in LOCK_TEXT
    assert '"resolved"' not in LOCK_TEXT


def test_every_package_of_the_lock_has_its_hash() -> None:
    without = [path for path, entry in PACKAGES.items() if path and "integrity" not in entry]
    assert without == []
    assert len(PACKAGES) > 100


def test_every_dependency_has_one_exact_version_and_the_lock_agrees() -> None:
    wanted = MANIFEST["dependencies"] | MANIFEST["optionalDependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+(-[a-z]+\.\d+)?", version) for version in wanted.values())
    assert {name: PACKAGES[f"node_modules/{name}"]["version"] for name in wanted} == wanted


def test_the_node_js_that_runs_the_suite_is_the_same_on_both_processors() -> None:
    assert len(set(MANIFEST["optionalDependencies"].values())) == 1
