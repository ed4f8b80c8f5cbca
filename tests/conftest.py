from collections.abc import Iterator

import pytest

from schemas.addresses import HostPort
from tests.fakes.broker import Broker


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostPort]:
    """The address of a broker of this test's own, empty at first."""
    own = Broker(tmp_path_factory.mktemp("broker"))
    own.start()
    try:
        yield own.address
    finally:
        own.stop()


@pytest.fixture
def stoppable_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker that the test stops and starts; it runs at first."""
    own = Broker(tmp_path_factory.mktemp("broker"))
    own.start()
    try:
        yield own
    finally:
        own.stop()
