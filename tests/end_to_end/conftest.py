"""The tests of this directory share one demo, started once, and may run commands in their own process."""

from collections.abc import Iterator

import pytest

from tests.fakes.command_lines import CommandLines
from tests.fakes.demo import Demo, running_demo


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with running_demo(tmp_path_factory.mktemp("demo")) as running:
        yield running


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> CommandLines:
    return CommandLines(monkeypatch, capfd, {})
