"""What every part of one relay gets: configuration, contract, clocks, randomness, log and metrics.

Must not contain state of a part.
"""

from collections.abc import Callable
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from relay.observability.metrics import Metrics
from relay.settings.clock import RelayClock
from relay.settings.config import RelayConfig
from schemas.kinds import KindRegistry
from schemas.lines import LineWriter
from schemas.process.spans import SpanSink, no_spans
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource


@dataclass(frozen=True, slots=True)
class RelayEnvironment:
    """What the parts of one relay have in common.

    Attributes:
        lines: where the log goes, and the access log beside it.
        now_ms: the system's time in milliseconds since the epoch, for records.
        clock: the time for decisions, which follows the system's without its steps.
        ticks_ms: milliseconds since boot.
        monotonic: seconds of a clock that never goes back.
        random_bytes: returns the given number of random bytes.
        spans: takes the span of each call that is traced.
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
    spans: SpanSink = no_spans
