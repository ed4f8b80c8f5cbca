"""The official MCP conformance suite, unchanged, against a whole system that runs.

The suite cannot send a token, and calls tools by names of its own: a proxy puts the token on, and translates
the names of those tools that a node can have. What the suite finds is read from the files that it writes, and
compared with ``official_suite.toml``, which has a reason for everything that does not pass.
"""

import asyncio
import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.npm import DIRECTORY, TIMEOUT_S, NpmPrograms
from tests.fakes.suite_kinds import ERROR_TEXT, SIMPLE_TEXT
from tests.fakes.suite_system import suite_system
from tests.fakes.token_proxy import token_proxy

EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((DIRECTORY / "official_suite.toml").read_text("utf-8"))
REVISIONS = list(EXPECTED)
RESULT_DIRECTORY = re.compile(r"server-(.+)-\d{4}-\d{2}-\d{2}T[0-9Z-]+")

Checks = list[dict[str, Any]]
Results = Mapping[str, Checks]

# The suite alone may take its full time, and the system that it runs against has to start first.
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the suite.

    Attributes:
        found: what it found of each of its scenarios.
        names: the canonical name of each of its tools that the node has.
        runs: how often the node ran each of them.
        audit: what the relay wrote down meanwhile.
    """

    revision: str
    found: Results
    names: Mapping[str, str]
    runs: Mapping[str, int]
    audit: list[dict[str, Any]]

    @property
    def expected(self) -> dict[str, Any]:
        return EXPECTED[self.revision]


@pytest.fixture(scope="session", params=REVISIONS)
def run(request: pytest.FixtureRequest, npm: NpmPrograms, tmp_path_factory: pytest.TempPathFactory) -> Run:
    revision: str = request.param
    return asyncio.run(run_suite(npm, revision, tmp_path_factory.mktemp(revision)))


async def run_suite(npm: NpmPrograms, revision: str, directory: Path) -> Run:
    results = directory / "results"
    async with (
        suite_system(directory) as system,
        token_proxy(system.port, system.token, names=system.names) as port,
    ):
        process = await asyncio.create_subprocess_exec(
            *npm.command("conformance", "server", "--url", f"http://127.0.0.1:{port}/mcp"),
            *("--requirements", revision, "--output-dir", str(results)),
            env=npm.environment(),
            cwd=npm.home,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            # Its status is ignored: it is that of the whole set, and ours are the single scenarios.
            async with asyncio.timeout(TIMEOUT_S):
                output, _ = await process.communicate()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
        runs = {tool.name: tool.runs for tool in system.tools}
        audit = system.audit()
    found = {
        match[1]: json.loads((path / "checks.json").read_text("utf-8"))
        for path in results.iterdir()
        if (match := RESULT_DIRECTORY.fullmatch(path.name))
    }
    assert found, output.decode("utf-8", "replace")
    return Run(revision, found, system.names, runs, audit)


def failed(checks: Checks) -> dict[str, str]:
    return {check["id"]: str(check.get("errorMessage")) for check in checks if check["status"] == "FAILURE"}


def unmet(checks: Checks) -> dict[str, str]:
    """Return every check that did not plainly pass: those that failed, warned or were left out."""
    return {
        check["id"]: f"{check['status']}: {check.get('errorMessage')}"
        for check in checks
        if check["status"] not in {"SUCCESS", "INFO"}
    }


def result_in(run: Run, scenario: str) -> dict[str, Any]:
    """Return the result of the one call that ``scenario`` makes, as the suite saw it."""
    [check] = [check for check in run.found[scenario] if check["id"] == scenario]
    result: dict[str, Any] = check["details"]["result"]
    return result


def test_every_scenario_of_the_suite_is_accounted_for_and_no_other(run: Run) -> None:
    listed = [*run.expected["held"], *run.expected["beside"], *run.expected["apart"]]
    assert sorted(listed) == sorted(run.found)


def test_what_the_relay_holds_passes_in_full_but_for_what_is_listed(run: Run) -> None:
    assert set(run.expected["unmet"]) <= set(run.expected["held"])
    for scenario in run.expected["held"]:
        assert any(check["status"] == "SUCCESS" for check in run.found[scenario]), scenario
        excused = run.expected["unmet"].get(scenario, {})
        seen = unmet(run.found[scenario])
        assert seen.keys() == excused.keys(), f"{scenario}: {seen}"


def test_what_passes_beside_the_point_still_passes(run: Run) -> None:
    failures = {scenario: failed(run.found[scenario]) for scenario in run.expected["beside"]}
    # The first request of a connection is answered by a stream, and its client may take a new one here.
    by_a_stream = {"server-sse-polling": {"incoming-sse-event": "Tool call failed"}}
    failures = {scenario: checks for scenario, checks in failures.items() if checks}
    assert failures in ({}, by_a_stream)


def test_what_needs_what_the_relay_does_not_have_still_fails(run: Run) -> None:
    passing = [scenario for scenario in run.expected["apart"] if not failed(run.found[scenario])]
    assert passing == []


def test_a_call_of_a_tool_that_the_node_has_went_through_the_gateway_to_the_node_and_back(run: Run) -> None:
    assert {name for name, count in run.runs.items() if count} == set(run.expected["answered"])
    for name, code in run.expected["answered"].items():
        lines = [line for line in run.audit if line.get("tool") == run.names[name]]
        decisions = [line["decision"] for line in lines if "decision" in line]
        outcomes = [line["code"] for line in lines if "outcome" in line]
        assert decisions == ["allow"] * run.runs[name], name
        assert outcomes == [code] * run.runs[name], name


def test_the_text_that_the_suite_takes_for_a_result_is_the_node_s_own(run: Run) -> None:
    result = result_in(run, "tools-call-simple-text")
    node_id = run.names["test_simple_text"].split(".")[1]
    assert result["isError"] is False
    assert result["structuredContent"] == {"node_id": node_id, "text": SIMPLE_TEXT}
    assert [json.loads(content["text"]) for content in result["content"]] == [result["structuredContent"]]


def test_the_error_that_the_suite_sees_is_what_became_of_the_node_s_own(run: Run) -> None:
    result = result_in(run, "tools-call-error")
    envelope = result["_meta"]["edge-kubelet/error"]
    assert [json.loads(content["text"]) for content in result["content"]] == [envelope]
    # Answered with a text of ours: what a handler raises can hold anything.
    assert ERROR_TEXT not in json.dumps(result)
    [outcome] = [line for line in run.audit if line.get("correlation_id") == envelope["correlation_id"]][1:]
    assert (outcome["tool"], outcome["code"]) == (run.names["test_error_handling"], envelope["code"])


@pytest.mark.parametrize("revision", REVISIONS)
def test_every_exception_has_a_reason(revision: str) -> None:
    expected = EXPECTED[revision]
    reasons = [*expected["beside"].values(), *expected["apart"].values()]
    for checks in expected["unmet"].values():
        reasons += checks.values()
    assert all(len(reason.split()) > 3 and reason.endswith(".") for reason in reasons)
