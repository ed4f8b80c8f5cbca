"""The rule for tests of single parts: such a test starts no process and listens on no TCP port.

A test that does is marked ``integration``, itself or by a fixture, and ``make check`` leaves it out. One
that does without the marker fails with a text that says so. Must not keep the test from what it does: the
program under test could handle an exception raised in its place, and the test would pass.
"""

import socket
import sys
from collections.abc import Generator

import pytest

MARKER = "integration"
_PROCESS_STARTS = frozenset({
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "subprocess.Popen",
})  # fmt: skip
_ADVICE = (
    "mark it with pytest.mark.integration, or name the fixture that does this "
    "among INTEGRATION_FIXTURES in tests/conftest.py"
)


class SinglePartRule:
    """Fails a test that breaks the rule, after its setup or its call."""

    def __init__(self) -> None:
        self._seen: list[str] = []

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """Note what breaks the rule. Short, as it is called for each audit event of the interpreter."""
        if event in _PROCESS_STARTS:
            self._seen.append("starts a process")
        elif event == "socket.bind" and _is_tcp(arguments[0]):
            self._seen.append(f"takes the TCP port {arguments[1]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Judge what the setup did."""
        return (yield from self._judged(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Judge what the test did."""
        return (yield from self._judged(item))

    def _judged(self, item: pytest.Item) -> Generator[None, object, object]:
        self._seen.clear()
        result = yield
        if self._seen and item.get_closest_marker(MARKER) is None:
            pytest.fail(f"a test of a single part {self._seen[0]}: {_ADVICE}", pytrace=False)
        return result


def _is_tcp(bound: object) -> bool:
    return (
        isinstance(bound, socket.SocketType)
        and bound.family in {socket.AF_INET, socket.AF_INET6}
        and bound.type == socket.SOCK_STREAM
    )


def pytest_configure(config: pytest.Config) -> None:
    """Apply the rule to the tests of this process; an audit hook stays until the process ends."""
    rule = SinglePartRule()
    sys.addaudithook(rule.audit)
    config.pluginmanager.register(rule)
