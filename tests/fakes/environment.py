"""The environment of an assembled package, in tests: clocks that the test moves, a log that it reads."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from relay.observability.metrics import Metrics
from relay.settings.config import RelayConfig, StateFiles
from relay.settings.environment import RelayClock, RelayEnvironment
from schemas.addresses import BrokerAddress, HostPort
from schemas.kinds import KindRegistry
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NOW_MS

if TYPE_CHECKING:
    from schemas.lines import LineWriter

PUBLIC_URL = "https://relay.example"
LISTEN = HostPort("127.0.0.1", 8700)
BROKER = BrokerAddress("127.0.0.1", 1883)


@dataclass(frozen=True, slots=True)
class FakeEnvironment:
    """An environment, and the parts of it that a test moves or reads."""

    environment: RelayEnvironment
    clock: FakeClock
    seconds: Seconds
    lines: LogLines


def config(state: Path) -> RelayConfig:
    """Return the configuration of a relay on loopback whose state is in ``state``."""
    return RelayConfig(BROKER, PUBLIC_URL, LISTEN, StateFiles(state))


def fake_environment(
    wanted: RelayConfig, registry: SchemaRegistry, kinds: KindRegistry | None = None
) -> FakeEnvironment:
    """Return the environment of a relay with the configuration ``wanted``."""
    clock, seconds, lines = FakeClock(NOW_MS), Seconds(), LogLines()
    log = make_logger("relay", lines)
    environment = RelayEnvironment(
        config=wanted,
        registry=registry,
        kinds=kinds or KindRegistry(),
        ulids=UlidSource(clock, os.urandom),
        metrics=Metrics(),
        log=log,
        lines=cast("LineWriter", lines),  # without its thread, of which each environment would keep one
        now_ms=clock,
        clock=RelayClock(clock, clock.ticks_ms, log),
        ticks_ms=clock.ticks_ms,
        monotonic=seconds,
        random_bytes=os.urandom,
    )
    return FakeEnvironment(environment, clock, seconds, lines)
