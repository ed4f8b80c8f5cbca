"""One system for the whole directory, and the npm programs that are run against it."""

import os
from collections.abc import Iterator

import pytest

from tests.fakes.demo import Demo, running_demo
from tests.fakes.npm import NpmPrograms, missing


@pytest.fixture(scope="session")
def npm(tmp_path_factory: pytest.TempPathFactory) -> NpmPrograms:
    """The programs; without them a test is skipped, but in CI that is a failure."""
    if reason := missing():
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return NpmPrograms(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="package")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """A whole system: broker, relay, this machine's kubelet and one mock node."""
    with running_demo(tmp_path_factory.mktemp("demo"), "--nodes", "1", "--kinds", "none") as running:
        yield running
