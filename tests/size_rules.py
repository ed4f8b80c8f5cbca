"""The rules that tie the markers of a test to what it does: of a single part, integration, long.

A test of a single part starts no process and listens on no TCP port. One that does is marked ``integration``,
itself or by a fixture, and ``make check`` leaves it out. An integration test that starts more than
``MOST_STARTS`` programs in Python by itself is marked ``long``, and ``make test`` leaves it out: such starts
take most of the time of all tests. What a fixture of the module or of the session starts is shared, and
counts for no test.

A test that breaks a rule fails with a text that says so. Must not keep a test from what it does: the program
under test could handle an exception raised in its place, and the test would pass. Must not measure time:
which tests fail would depend on the machine.
"""

import socket
import sys
from collections.abc import Generator
from typing import Any

import pytest

MOST_STARTS = 4
STARTS_OF_A_DEMO = 6
"""``relay demo``, two commands that make the node's identity, a relay, the node, and the mock nodes."""

_PROCESS_STARTS = frozenset({
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "subprocess.Popen",
})  # fmt: skip
_HOW_TO_MARK = (
    "mark it with pytest.mark.integration, or name the fixture that does this "
    "among INTEGRATION_FIXTURES in tests/conftest.py"
)
_HOW_TO_SHORTEN = (
    "mark it with pytest.mark.long, or share what runs in a fixture of the module, "
    "or run commands in its own process (tests/fakes/command_lines.py)"
)


class SizeRules:
    """Fails a test that breaks a rule, after its setup or its call."""

    def __init__(self) -> None:
        self._seen: list[str] = []
        self._starts = 0
        self._shared_setups = 0

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note what a rule is about. Short, as it is called for each audit event of the interpreter."""
        if event in _PROCESS_STARTS:
            self._seen.append("starts a process")
            if event == "subprocess.Popen" and not self._shared_setups:
                self._starts += _starts_of_python(arguments[1])
        elif event == "socket.bind" and _is_tcp(arguments[0]):
            self._seen.append(f"takes the TCP port {arguments[1]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Judge what the setup did."""
        self._starts = 0
        return (yield from self._judged(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Judge what the test did."""
        return (yield from self._judged(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Count no program that a shared fixture starts for the test that is the first to need it."""
        if fixturedef.scope == "function":
            return (yield)
        self._shared_setups += 1
        try:
            return (yield)
        finally:
            self._shared_setups -= 1

    def _judged(self, item: pytest.Item) -> Generator[None, object, object]:
        self._seen.clear()
        result = yield
        if self._seen and item.get_closest_marker("integration") is None:
            pytest.fail(f"a test of a single part {self._seen[0]}: {_HOW_TO_MARK}", pytrace=False)
        if self._starts > MOST_STARTS and item.get_closest_marker("long") is None:
            count = f"{self._starts} programs in Python, more than {MOST_STARTS}"
            pytest.fail(f"a test that is not long starts {count}: {_HOW_TO_SHORTEN}", pytrace=False)
        return result


def _starts_of_python(command: object) -> int:
    if not isinstance(command, list | tuple) or sys.executable not in command:
        return 0
    return STARTS_OF_A_DEMO if "demo" in command else 1


def _is_tcp(bound: object) -> bool:
    return (
        isinstance(bound, socket.SocketType)
        and bound.family in {socket.AF_INET, socket.AF_INET6}
        and bound.type == socket.SOCK_STREAM
    )


def pytest_configure(config: pytest.Config) -> None:
    """Apply the rules to the tests of this process; an audit hook stays until the process ends."""
    rules = SizeRules()
    sys.addaudithook(rules.audit)
    config.pluginmanager.register(rules)
