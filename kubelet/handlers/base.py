"""What every handler is: one capability, announced and run. Handlers of packages are made of this too.

Must not know how a command arrived: arguments have been validated before a handler sees them, and what it
returns is validated by the relay.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from structlog.typing import FilteringBoundLogger

from kubelet.ceiling import Ceiling
from schemas.pacing import Backoff
from schemas.payloads import OpenFinding

_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 300.0
"""Between two attempts at work in the background that fails."""


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
            OutsideCeilingError: the board's owner does not allow what was named.
        """

    async def run(self) -> None:  # noqa: B027 - most handlers have nothing to do between calls
        """Work in the background for as long as the daemon runs."""


async def work_in_background(
    handler: Handler,
    log: FilteringBoundLogger,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Run ``handler`` between its calls. Where it fails, it begins again after a wait, which grows."""
    backoff = Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S)
    while True:
        try:
            return await handler.run()
        except Exception:  # of a package, of a driver: it must not end the daemon
            cap_id, wait_s = handler.capability["cap_id"], backoff.next_s()
            log.exception("background work failed", cap_id=cap_id, again_in_s=wait_s)
        await sleep(wait_s)


class FindingSource:
    """A handler that samples by itself what is wrong: it calls ``on_findings`` with all that is open."""

    on_findings: Callable[[Sequence[OpenFinding]], None] = staticmethod(lambda _: None)


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """The files of the daemon that a handler is part of.

    Attributes:
        state_dir: of its identity; None where the node has none.
        paths: all of them, which no handler shows: directories with what is in them.
    """

    state_dir: Path | None = None
    paths: tuple[Path, ...] = ()


NO_FILES = OwnFiles()


class BuiltInHandler(Handler):
    """The handler of a kind that ships, whose row has the ``capability``. ``now_ms`` is since the epoch.

    Attributes:
        own: the files of the daemon, once it has made the handler.
        announced: the kinds that the node has, once all handlers are made.
        ceiling: what the board's owner allows; that of the daemon, once it has made the handler.
    """

    def __init__(
        self,
        capability: Mapping[str, Any],
        node_id: str,
        now_ms: Callable[[], int],
        log: FilteringBoundLogger,
    ) -> None:
        self._capability = capability
        self.own = NO_FILES
        self.announced: frozenset[str] = frozenset()
        self.node_id = node_id
        self.now_ms = now_ms
        self.log = log
        self.ceiling = Ceiling()

    @property
    def capability(self) -> Mapping[str, Any]:
        return self._capability

    @property
    def missing(self) -> str | None:
        """What this machine lacks, so that the kind is not announced; None if nothing."""
        return None

    @property
    def lacks(self) -> str | None:
        """What the kind does not see although it is announced, and why; None if it sees all."""
        return None


HandlerFactory = Callable[[Mapping[str, Any], str, Callable[[], int], FilteringBoundLogger], BuiltInHandler]
"""What the module of a kind that ships has as ``HANDLER``: takes what a ``BuiltInHandler`` does."""
