"""Logs the connections that are refused, each reason once a minute: the line may be all that tells of a node.

Must not decide which are refused, nor count them.
"""

import time
from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from relay.http.connections import Bounds, ConnectionRefusal
from schemas.faults import OncePerPlace


def refusal_log(
    log: FilteringBoundLogger,
    bounds: Bounds,
    descriptors: int,
    monotonic: Callable[[], float] = time.monotonic,
) -> Callable[[ConnectionRefusal], None]:
    """Return what logs a refused connection by its reason.

    ``descriptors`` is how many files the process may open, from which ``bounds`` are; ``monotonic`` is in
    seconds.
    """
    once = OncePerPlace()

    def report(reason: ConnectionRefusal) -> None:
        suppressed = once.suppressed_before(reason, monotonic())
        if suppressed is not None:
            log.warning(
                "connections refused",
                reason=reason,
                connections=bounds.total,
                open_files=descriptors,
                kept_back=suppressed,
            )

    return report
