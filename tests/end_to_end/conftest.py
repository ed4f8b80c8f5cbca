"""The tests of this directory share one demo, started once."""

from collections.abc import Iterator

import pytest

from tests.fakes.demo import Demo, running_demo


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with running_demo(tmp_path_factory.mktemp("demo")) as running:
        yield running
