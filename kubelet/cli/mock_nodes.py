"""The mock nodes of one process, for demos, tests and benches.

Their keys, signatures and sessions are real; their metrics are made up. Must not be used where they
could be mistaken for boards.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from structlog.typing import FilteringBoundLogger

from kubelet.daemon.node import Node, NodeEnvironment
from kubelet.handlers.base import BuiltInHandler, HandlerFactory
from kubelet.handlers.system_echo import EchoHandler
from kubelet.session.link_state import LinkState
from schemas.identity_files import IdentityFiles, IdentityFilesError, NodeIdentity
from schemas.manifest import fingerprint

_GIB = 1024**3
_START_SPREAD_S = 0.005
"""Between two nodes that start: a relay sends those away that exceed its rate."""


class Counts(NamedTuple):
    """How many nodes are connected, how many of them announced, and how many the relay rejects."""

    connected: int
    announced: int
    rejected: int


class MadeUpMetrics(BuiltInHandler):
    """``system.metrics`` of a machine that does not exist, and which was made when its handler was."""

    def __init__(
        self,
        capability: Mapping[str, Any],
        node_id: str,
        now_ms: Callable[[], int],
        log: FilteringBoundLogger,
    ) -> None:
        super().__init__(capability, node_id, now_ms, log)
        self._started_ms = now_ms()

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - both verbs
        """Return a plausible sample."""
        now = self.now_ms()
        parts: dict[str, Any] = {
            "cpu": {"cores": 4, "usage_pct": 12.5},
            "mem": {"total_bytes": 4 * _GIB, "available_bytes": 3 * _GIB, "used_bytes": _GIB},
            "load": {"one": 0.5, "five": 0.4, "fifteen": 0.3},
            "disk": [
                {
                    "mount": "/",
                    "fs_type": "ext4",
                    "total_bytes": 32 * _GIB,
                    "available_bytes": 20 * _GIB,
                }
            ],
        }
        wanted = arguments.get("include", parts)
        return {
            "ts_ms": now,
            "node_id": self.node_id,
            "uptime_s": max(0, (now - self._started_ms) // 1000),
            **{name: part for name, part in parts.items() if name in wanted},
        }


_HANDLERS: Mapping[str, HandlerFactory] = MappingProxyType(
    {"system.echo": EchoHandler, "system.metrics": MadeUpMetrics}
)


def read_identities(directory: Path) -> list[NodeIdentity]:
    """Return the identities in the directories below ``directory``, in the order of their names.

    Raises:
        IdentityFilesError: there is none, or one is damaged.
    """
    if not directory.is_dir():
        raise IdentityFilesError(f"{directory} is not a directory: run `relay ca issue --mock N --out DIR`")
    identities = [IdentityFiles(path).read() for path in sorted(directory.iterdir()) if path.is_dir()]
    if not identities:
        raise IdentityFilesError(f"{directory} holds no identity: run `relay ca issue --mock N --out DIR`")
    return identities


class MockFleet:
    """One mock node for each identity."""

    def __init__(self, identities: Sequence[NodeIdentity], environment: NodeEnvironment) -> None:
        self._environment = environment
        self._nodes = [
            Node(
                identity,
                [
                    handler(kind.capability, identity.node_id, environment.now_ms, environment.log)
                    for name, handler in _HANDLERS.items()
                    if (kind := environment.kinds.get(name)) is not None and kind.capability is not None
                ],
                fingerprint({"machine_id": identity.node_id}),
                environment,
                last_issued=None,
            )
            for identity in identities
        ]

    def counts(self) -> Counts:
        """Return how many nodes are in which state."""
        states = Counter(node.link.state for node in self._nodes)
        announced = states[LinkState.ANNOUNCED]
        connected = announced + states[LinkState.OPEN]
        return Counts(connected, announced, len(self._nodes) - connected - states[LinkState.CONNECTING])

    async def run(self) -> None:
        """Run them until cancelled."""
        self._environment.publisher.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                for node in self._nodes:
                    tasks.create_task(node.run())
                    # Thousands that start in one moment would all sign in one moment, at every heartbeat.
                    await asyncio.sleep(_START_SPREAD_S)
        finally:
            await self._environment.publisher.stop()
