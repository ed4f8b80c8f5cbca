"""The tests of this directory share one demo, started once, and may run commands in their own process."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from relay.cli.demo.local_system import LocalSystem
from tests.fakes.command_lines import CommandLines
from tests.fakes.demo import Demo, local_system, running_demo


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with running_demo(tmp_path_factory.mktemp("demo")) as running:
        yield running


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> CommandLines:
    return CommandLines(monkeypatch, capfd, {})


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[LocalSystem]:
    """A system of its test's own, with one mock node."""
    async with local_system(tmp_path, 1) as started:
        yield started
