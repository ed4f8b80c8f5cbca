import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from relay.settings.environment import now_ms
from schemas.frames import FrameReader
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.played_relay import PlayedRelay
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
def ca_of_today() -> SimulatedCa:
    """A CA whose leaves are valid by the system's clock."""
    return SimulatedCa("root of today", now_ms())


@pytest.fixture(scope="session")
def node_of_today(ca_of_today: SimulatedCa) -> SimulatedNode:
    return ca_of_today.issue(now_ms=now_ms())


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


@pytest.fixture
async def relay(reader: FrameReader) -> AsyncIterator[PlayedRelay]:
    async with PlayedRelay(reader).running() as relay:
        yield relay


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where local agents connect."""
    return tmp_path / "relay.sock"
