import signal
from collections.abc import Iterator

import pytest

from relay.settings.environment import now_ms
from schemas.frames import FrameReader
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.signer import NOW_MS, SimulatedCa, SimulatedNode


@pytest.fixture(scope="session")
def registry() -> SchemaRegistry:
    return SchemaRegistry()


@pytest.fixture(scope="session")
def kinds() -> KindRegistry:
    return KindRegistry()


@pytest.fixture(scope="session")
def reader(registry: SchemaRegistry) -> FrameReader:
    return FrameReader(registry)


@pytest.fixture(scope="session")
def ca() -> SimulatedCa:
    return SimulatedCa()


@pytest.fixture(scope="session")
def node(ca: SimulatedCa) -> SimulatedNode:
    return ca.issue()


@pytest.fixture(scope="session")
def node_of_today() -> SimulatedNode:
    """A node whose leaf is valid by the system's clock."""
    now = now_ms()
    return SimulatedCa("root of today", now).issue(now_ms=now)


@pytest.fixture
def signals_restored() -> Iterator[None]:
    """Restore what a program leaves ignored in a process that is to end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW_MS)


@pytest.fixture
def log() -> LogLines:
    return LogLines()
