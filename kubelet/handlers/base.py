"""What every handler is: one capability, announced and run.

Must not know how a command arrived: arguments have been validated before a handler sees them, and what it
returns is validated by the relay.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from structlog.typing import FilteringBoundLogger


class ToolFault(Exception):  # noqa: N818 - it is what the row of a kind calls a fault
    """Raised by a handler: it failed for the reason ``code``, one of the ``faults`` of its kind's row.

    The agent reads the code, and the text that the row has for it. ``detail`` is for the node's log alone: it
    may hold what a device said.
    """

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail


class Handler(ABC):
    """One capability of this node."""

    @property
    @abstractmethod
    def capability(self) -> Mapping[str, Any]:
        """The capability as the manifest contains it (RFC-0001 section 2)."""

    @abstractmethod
    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run ``verb`` and return its result, which fits the output document of the kind.

        May be cancelled at any await: the caller has disconnected, or the deadline has passed.

        Raises:
            ToolFault: it failed for a reason that the row of the kind states.
        """

    async def run(self) -> None:  # noqa: B027 - most handlers have nothing to do between calls
        """Work in the background for as long as the daemon runs."""


class BuiltInHandler(Handler):
    """The handler of a kind that ships, whose row has the ``capability``. ``now_ms`` is since the epoch."""

    def __init__(
        self,
        capability: Mapping[str, Any],
        node_id: str,
        now_ms: Callable[[], int],
        log: FilteringBoundLogger,
    ) -> None:
        self._capability = capability
        self.node_id = node_id
        self.now_ms = now_ms
        self.log = log

    @property
    def capability(self) -> Mapping[str, Any]:
        """The capability as the manifest contains it."""
        return self._capability


HandlerFactory = Callable[[Mapping[str, Any], str, Callable[[], int], FilteringBoundLogger], Handler]
"""What the module of a kind that ships has as ``HANDLER``: takes what a ``BuiltInHandler`` does."""


def commands_per_s(handlers: Iterable[Handler]) -> float:
    """Return how many commands a second ``handlers`` announce together: at least one of each capability."""
    rates: Iterable[float] = (handler.capability["constraints"]["rate_limit_rps"] for handler in handlers)
    return sum(max(1.0, rate) for rate in rates)
