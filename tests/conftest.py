import os
from collections.abc import Iterator

import pytest

from schemas.addresses import BrokerAddress
from tests.fakes.broker import KINDS, Broker, missing


@pytest.fixture(params=KINDS)
def broker_kind(request: pytest.FixtureRequest) -> str:
    """Each kind of broker in turn; without it a test is skipped, but in CI that is a failure."""
    kind = str(request.param)
    if reason := missing(kind):
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return kind


@pytest.fixture
def stoppable_broker(broker_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A broker of this test's own that it stops and starts; it runs at first, and is empty."""
    own = Broker(broker_kind, tmp_path_factory.mktemp("broker"))
    own.start()
    try:
        yield own
    finally:
        own.stop()


@pytest.fixture
def broker(stoppable_broker: Broker) -> BrokerAddress:
    """The address of a broker of this test's own, empty at first."""
    return stoppable_broker.address
