"""The official MCP conformance suite, unchanged, against a whole system that runs.

The suite cannot send a token: a proxy puts it on. What it finds is read from the files that it writes, and
compared with ``official_suite.toml``, which has a reason for everything that does not pass.
"""

import asyncio
import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.demo import Demo
from tests.fakes.npm import DIRECTORY, TIMEOUT_S, NpmPrograms
from tests.fakes.token_proxy import token_proxy

EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((DIRECTORY / "official_suite.toml").read_text("utf-8"))
REVISIONS = list(EXPECTED)
RESULT_DIRECTORY = re.compile(r"server-(.+)-\d{4}-\d{2}-\d{2}T[0-9Z-]+")

Checks = list[dict[str, Any]]
Results = Mapping[str, Checks]

# The suite alone may take its full time, and the system that it runs against has to start first.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session", params=REVISIONS)
def results(
    request: pytest.FixtureRequest, npm: NpmPrograms, demo: Demo, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Results]:
    """The revision, and what the suite found of each of its scenarios."""
    revision: str = request.param
    directory = tmp_path_factory.mktemp(revision)
    output = asyncio.run(run_suite(npm, demo, revision, directory))
    found = {
        match[1]: json.loads((path / "checks.json").read_text("utf-8"))
        for path in directory.iterdir()
        if (match := RESULT_DIRECTORY.fullmatch(path.name))
    }
    assert found, output
    return revision, found


async def run_suite(npm: NpmPrograms, demo: Demo, revision: str, directory: Path) -> str:
    async with token_proxy(int(demo.base_url.rpartition(":")[2]), demo.facts["token"]) as port:
        process = await asyncio.create_subprocess_exec(
            *npm.command("conformance", "server", "--url", f"http://127.0.0.1:{port}/mcp"),
            *("--requirements", revision, "--output-dir", str(directory)),
            env=npm.environment(),
            cwd=npm.home,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            # Its status is not looked at: it is that of the whole set, and ours are the single scenarios.
            async with asyncio.timeout(TIMEOUT_S):
                output, _ = await process.communicate()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
    return output.decode("utf-8", "replace")


def failed(checks: Checks) -> dict[str, str]:
    return {check["id"]: str(check.get("errorMessage")) for check in checks if check["status"] == "FAILURE"}


def unmet(checks: Checks) -> dict[str, str]:
    """Return every check that did not plainly pass: those that failed, warned or were left out."""
    return {
        check["id"]: f"{check['status']}: {check.get('errorMessage')}"
        for check in checks
        if check["status"] not in {"SUCCESS", "INFO"}
    }


def test_every_scenario_of_the_suite_is_accounted_for_and_no_other(results: tuple[str, Results]) -> None:
    revision, found = results
    expected = EXPECTED[revision]
    listed = [*expected["held"], *expected["beside"], *expected["apart"]]
    assert sorted(listed) == sorted(found)


def test_what_the_relay_holds_passes_in_full_but_for_what_is_listed(results: tuple[str, Results]) -> None:
    revision, found = results
    expected = EXPECTED[revision]
    assert set(expected["unmet"]) <= set(expected["held"])
    for scenario in expected["held"]:
        assert any(check["status"] == "SUCCESS" for check in found[scenario]), scenario
        excused = expected["unmet"].get(scenario, {})
        seen = unmet(found[scenario])
        assert seen.keys() == excused.keys(), f"{scenario}: {seen}"


def test_what_passes_beside_the_point_still_passes(results: tuple[str, Results]) -> None:
    revision, found = results
    failures = {scenario: failed(found[scenario]) for scenario in EXPECTED[revision]["beside"]}
    assert {scenario: checks for scenario, checks in failures.items() if checks} == {}


def test_what_needs_what_the_relay_does_not_have_still_fails(results: tuple[str, Results]) -> None:
    revision, found = results
    passing = [scenario for scenario in EXPECTED[revision]["apart"] if not failed(found[scenario])]
    assert passing == []


@pytest.mark.parametrize("revision", REVISIONS)
def test_every_exception_has_a_reason(revision: str) -> None:
    expected = EXPECTED[revision]
    reasons = [*expected["beside"].values(), *expected["apart"].values()]
    for checks in expected["unmet"].values():
        reasons += checks.values()
    assert all(len(reason.split()) > 3 and reason.endswith(".") for reason in reasons)
