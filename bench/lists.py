"""What a page of ``tools/list`` and a second without a change cost, and how long a tool's entry is.

The costs are those of a fleet of 1 000 nodes, beside one of 10. Both fleets have the same tools in number: a
cost that follows the number of nodes shows as a ratio above 1.
"""

import io
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nacl.signing import SigningKey

from bench.results import Figure
from kubelet.handlers.factory import make_handlers
from relay.audit.log import AuditLog
from relay.audit.refusal_counts import RefusalCounter
from relay.audit.writer import AuditWriter
from relay.auth.permissions import Rights
from relay.fleet.fleet import Fleet
from relay.fleet.leaves import FleetTrust
from relay.fleet.node_record import Where
from relay.fleet.replay_marks import MarkStore
from relay.fleet.selection import WHOLE_FLEET
from relay.fleet.tools import Projector
from relay.mcp_api.tool_list import ToolEntries, page_of
from relay.observability.metrics import Metrics
from relay.pki.issuing import issue_leaf, make_root
from schemas.kinds import KindRegistry
from schemas.manifest import fingerprint, sign_manifest
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.times import RelayMs, SystemMs
from schemas.trust import Outcome, TrustRules

_NOW_MS = 1_790_000_000_000
_TENANT = "bench"
_ROOT_KEY, _NODE_KEY = SigningKey(bytes(range(32))), SigningKey(bytes(range(1, 33)))
_NODE_ID = "01hzx9k3m4p7q8r9s0t1v2w3xy"
_READ = ("name", "title", "description", "inputSchema")
_TOOLS = 2000
_SIZES = (1000, 10)
_ROUNDS = 7
_PAGES = 20
_IDLE_SECONDS = 5000


def measure_lists() -> list[Figure]:
    """Return ``list_page_us``, ``idle_second_us``, and ``read_bytes`` of each tool of a real node."""
    pages, idle = [], []
    for nodes in _SIZES:
        with _fleet(nodes) as fleet:
            pages.append(_us_each(partial(_first_page, fleet), _PAGES))
            idle.append(_us_each(fleet.sweep, _IDLE_SECONDS))
    many, few = _SIZES
    return [
        Figure(name, value, "us", f"the same tools at {few} nodes, not {many}", reference, wanted)
        for name, (value, reference), wanted in (
            ("list_page_us", pages, "ratio <= 1.5"),
            ("idle_second_us", idle, "ratio <= 1.5"),
        )
    ] + _tool_sizes()


def _tool_sizes() -> list[Figure]:
    """Return for each tool what a model reads of its entry in the list, beside the whole entry."""
    tools = Projector(SchemaRegistry(), KindRegistry()).project(_NODE_ID, _capabilities())
    figures = []
    for tool in tools.values():
        entry = tool.listed()
        read = {name: entry[name] for name in _READ}
        name = f"read_bytes {'.'.join(tool.kind_verb)}"
        figures.append(Figure(name, _bytes(read), "B", "the whole entry", _bytes(entry), "<= 600 B"))
    return figures


def _capabilities() -> Sequence[Mapping[str, Any]]:
    """Return what a node announces: echo, metrics."""
    return [each.capability for each in make_handlers(_NODE_ID, make_logger("kubelet", io.StringIO()))]


def _bytes(document: dict[str, Any]) -> int:
    return len(json.dumps(document, separators=(",", ":")))


def _first_page(fleet: Fleet) -> None:
    listed = partial(fleet.selected.listed, Rights(_TENANT, frozenset({"read_only"})), WHOLE_FLEET)
    tools, cursor = page_of(listed, None)
    ToolEntries(tools, dashed=False).text()
    if cursor is None:
        raise RuntimeError("the page must be a full one")


@contextmanager
def _fleet(nodes: int) -> Iterator[Fleet]:
    """Hold a fleet of so many nodes, which are connected and have ``_TOOLS`` tools together."""
    root = make_root(_ROOT_KEY, "bench", _NOW_MS, 3650, serial=1)
    registry, kinds, log = SchemaRegistry(), KindRegistry(), make_logger("relay", io.StringIO())
    echo, _ = _capabilities()
    capabilities = [{**echo, "cap_id": f"echo{number}"} for number in range(_TOOLS // nodes)]
    with TemporaryDirectory(prefix="edge-kubelet-bench-") as name:

        def now_ms() -> SystemMs:
            return SystemMs(_NOW_MS)

        audit = AuditWriter(AuditLog(Path(name) / "audit.jsonl", now_ms), now_ms, log)
        fleet = Fleet(
            trust=FleetTrust(TrustRules(registry, kinds), [root], frozenset()),
            projector=Projector(registry, kinds),
            marks=MarkStore(Path(name) / "marks", log),
            metrics=Metrics(),
            refusals=RefusalCounter(audit, log, time.monotonic, str),
            now_ms=lambda: RelayMs(_NOW_MS),
            log=log,
        )
        for number in range(nodes):
            node_id = f"01hzx9k3m4p7q8r9s0t1v2{number:04}"
            _connect(fleet, node_id, root, capabilities)
        yield fleet
        audit.close()


def _connect(fleet: Fleet, node_id: str, root: str, capabilities: list[Any]) -> None:
    leaf = issue_leaf(
        root,
        _ROOT_KEY,
        node_id=node_id,
        tenant=_TENANT,
        public_key=bytes(_NODE_KEY.verify_key),
        now_ms=_NOW_MS,
        valid_days=90,
        serial=2,
    )
    identity = fleet.identify(node_id, leaf)
    wire = sign_manifest(
        node_id=node_id,
        kid=identity.kid,
        hw_fingerprint=fingerprint({"machine_id": node_id}),
        capabilities=capabilities,
        issued_at_ms=_NOW_MS,
        expires_at_ms=_NOW_MS + 900_000,
        sign=lambda message: _NODE_KEY.sign(message).signature,
    )
    if fleet.offer_manifest(node_id, wire, "broker").outcome is not Outcome.ACCEPTED:
        raise RuntimeError("what is measured must succeed")
    fleet.connection_changed(node_id, Where.HERE)


def _us_each(work: Callable[[], object], count: int) -> float:
    """Return the CPU time of one piece of work: the median of some rounds."""
    rounds = []
    for _ in range(_ROUNDS):
        started = time.process_time()
        for _ in range(count):
            work()
        rounds.append((time.process_time() - started) / count * 1_000_000)
    return statistics.median(rounds)
