"""What every part of one relay is given: configuration, contract, clocks, randomness, log and metrics.

Must not hold state of a part.
"""

from collections.abc import Callable
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from relay.clock import RelayClock
from relay.config import RelayConfig
from relay.observability.metrics import Metrics
from schemas.kinds import KindRegistry
from schemas.lines import LineWriter
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource


@dataclass(frozen=True, slots=True)
class RelayEnvironment:
    """The surroundings of one relay's parts.

    Attributes:
        lines: where the log goes, and the access log beside it.
        now_ms: the system's time in milliseconds since the epoch, for what is written down.
        clock: the time that is judged by, which follows the system's without its steps.
        ticks_ms: milliseconds since boot.
        monotonic: seconds of a clock that never goes back.
        random_bytes: so many unpredictable bytes.
    """

    config: RelayConfig
    registry: SchemaRegistry
    kinds: KindRegistry
    ulids: UlidSource
    metrics: Metrics
    log: FilteringBoundLogger
    lines: LineWriter
    now_ms: Callable[[], int]
    clock: RelayClock
    ticks_ms: Callable[[], int]
    monotonic: Callable[[], float]
    random_bytes: Callable[[int], bytes]
