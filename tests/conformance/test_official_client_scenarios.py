"""The official suite's scenarios for clients, with the guarded client (``guarded_client.py``).

What each finds is compared with ``official_client_scenarios.toml``, which has a reason for each that fails.
"""

import json
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.npm import DIRECTORY, NpmPrograms

EXPECTED: dict[str, Any] = tomllib.loads((DIRECTORY / "official_client_scenarios.toml").read_text("utf-8"))
PASSED = {"SUCCESS", "INFO"}

pytestmark = pytest.mark.long


def unmet(npm: NpmPrograms, scenario: str, directory: Path) -> tuple[int, dict[str, str]]:
    """Run ``scenario``; return how many of its checks passed, and those that did not."""
    client = shlex.join([sys.executable, "-P", str(DIRECTORY / "guarded_client.py")])
    options = ("--scenario", scenario, "--output-dir", str(directory), "--command", client)
    # Its status is ignored: the single checks count.
    done = npm.run("conformance", "client", *options)
    (found,) = directory.rglob("checks.json")
    checks = json.loads(found.read_text("utf-8"))
    passed = [check for check in checks if check["status"] == "SUCCESS"]
    output = done.stdout + found.with_name("stderr.txt").read_text("utf-8")
    return len(passed), {
        check["id"]: f"{check['status']}: {check.get('errorMessage')} {output}"
        for check in checks
        if check["status"] not in PASSED
    }


def test_every_scenario_for_clients_is_accounted_for_and_no_other(npm: NpmPrograms) -> None:
    listed = re.findall(r"^ +- (\S+)", npm.run("conformance", "list", "--client").stdout, re.MULTILINE)
    assert listed
    assert sorted([*EXPECTED["held"], *EXPECTED["apart"]]) == sorted(listed)


@pytest.mark.parametrize("scenario", EXPECTED["held"])
def test_what_the_guarded_client_holds_passes(npm: NpmPrograms, scenario: str, tmp_path: Path) -> None:
    passed, seen = unmet(npm, scenario, tmp_path)
    assert passed
    assert seen.keys() == EXPECTED["unmet"].get(scenario, {}).keys(), seen


@pytest.mark.parametrize("scenario", EXPECTED["apart"])
def test_what_needs_what_it_does_not_have_still_does_not(
    npm: NpmPrograms, scenario: str, tmp_path: Path
) -> None:
    _, seen = unmet(npm, scenario, tmp_path)
    assert seen


def test_every_exception_has_a_reason() -> None:
    reasons = [*EXPECTED["apart"].values()]
    for checks in EXPECTED["unmet"].values():
        reasons += checks.values()
    assert all(len(reason.split()) > 3 and reason.endswith(".") for reason in reasons)
