"""What is known of a node: one table, and the documents that show it.

``fleet://nodes``, ``find_nodes`` and ``relay fleet nodes`` read ``FACTS``; the status, the gauges and the
checks of ``relay doctor`` read ``WARNINGS``. A new fact is a member of ``NodeRecord``, a row here, and what
writes it. Commands import this: it must not import what judges or keeps nodes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, cast

from schemas.payloads import OpenFinding
from schemas.times import iso

if TYPE_CHECKING:
    from relay.auth.permissions import Rights
    from relay.fleet.node_names import NodeNames
    from relay.fleet.node_record import NodeRecord
    from relay.observability.metrics import Metrics


class NodesStatus(TypedDict):
    """The nodes in ``relay status --json``: how many, and those of each warning by id."""

    known: int
    connected: int
    wrong_clocks: Mapping[str, str]
    silent: Mapping[str, str]


class WorstFinding(TypedDict):
    """The worst that is wrong with a node, as it reported; ``open`` is how many findings there are."""

    code: str
    severity: str
    since_ms: int | None
    since: NotRequired[str]
    open: int


class ListedNode(TypedDict):
    """A node in ``fleet://nodes``; ``relay``, in a fleet of several, is the one that holds its session."""

    relay: NotRequired[str | None]
    node_id: str
    label: str | None
    tags: list[str]
    connected: bool
    manifest_etag: str | None
    expires_at_ms: int | None
    finding: WorstFinding | None
    tools: list[str]


class FindNodesEntry(TypedDict):
    """A node in the answer of ``find_nodes``."""

    node_id: str
    label: str | None
    tags: list[str]
    online: bool
    kinds: list[str]
    since_ms: NotRequired[int]
    since: NotRequired[str]
    finding: NotRequired[WorstFinding]
    measured: NotRequired[Mapping[str, Any]]


class KnownTo(Enum):
    """Which relays of a fleet know a fact, and what clears it."""

    HERE = "this relay alone; its restart clears it"
    BY_PRESENCE = "every relay, by presence; the end of the node's session clears it"
    BY_MANIFEST = "every relay that the manifest reaches; its end or a revocation clears it"
    BY_LEDGER = "every relay, by the operator's ledgers; the operator clears it"


NodeCheck = Literal["clock", "echo"]
"""The checks of ``relay doctor`` that report nodes by ``warned``."""


class FactForm(StrEnum):
    """How ``relay fleet nodes`` writes a fact."""

    TEXT = "text"
    LABEL = "label"
    YES_NO = "yes or no"
    TIME = "time"
    COUNT = "count"
    WORDS = "words"
    FINDING = "finding"


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact of a node.

    Attributes:
        read: returns it from the record and the operator's names.
        listed, found: its member in ``fleet://nodes`` and ``find_nodes``; empty: it is not shown there.
        column: its place, header and form in ``relay fleet nodes``; None: it has no column.
        may_lack: its member is left out while it is None.
        kind: the kind that it is of: it is None for those that do not reach the node's tools of that kind.
    """

    read: "Callable[[NodeRecord, NodeNames], Any]"
    known: KnownTo
    listed: str = ""
    found: str = ""
    column: tuple[int, str, FactForm] | None = None
    may_lack: bool = False
    kind: str = ""


_LEDGER, _MANIFEST, _PRESENCE = KnownTo.BY_LEDGER, KnownTo.BY_MANIFEST, KnownTo.BY_PRESENCE


def _label(node: "NodeRecord", names: "NodeNames") -> str | None:
    return names.label_of(node.node_id) or None


def _tags(node: "NodeRecord", names: "NodeNames") -> list[str]:
    return list(names.tags_of(node.node_id))


def _expires_at_ms(node: "NodeRecord", _: "NodeNames") -> int | None:
    return None if node.manifest is None else node.manifest.expires_at_ms


def _since(node: "NodeRecord", _: "NodeNames") -> str | None:
    return None if node.since_ms is None else iso(node.since_ms)


HEALTH = "linux.health"
SEVERITIES = ("error", "warning", "info")


def severity_rank(finding: OpenFinding) -> int:
    """Return the place of a finding: the worst have the lowest."""
    return SEVERITIES.index(finding["severity"])


def _finding(node: "NodeRecord", _: "NodeNames") -> WorstFinding | None:
    if not node.findings:
        return None
    worst, since_ms = node.findings[0], node.findings[0]["since_ms"]
    shown: WorstFinding = {
        "code": worst["code"],
        "severity": worst["severity"],
        "since_ms": since_ms,
        "open": sum(each["count"] for each in node.findings),
    }
    if since_ms is not None:
        shown["since"] = iso(since_ms)
    return shown


def shows(node: "NodeRecord", rights: "Rights", kind: str) -> bool:
    """Return whether a caller with ``rights`` reaches a tool of ``kind`` of a node of its tenant."""
    return kind in node.kinds and any(
        rights.allow(rights.tenant, tool.safety_class, tool.surface.kind)
        for tool in node.tools.values()
        if tool.surface.kind.name == kind
    )


FACTS = (
    Fact(lambda node, _: node.node_id, _MANIFEST, "node_id", "node_id", (1, "NODE", FactForm.TEXT)),
    Fact(_label, _LEDGER, "label", "label", (0, "LABEL", FactForm.LABEL)),
    Fact(_tags, _LEDGER, "tags", "tags", (6, "TAGS", FactForm.WORDS)),
    Fact(lambda node, _: node.connected, _PRESENCE, "connected", "online", (2, "ONLINE", FactForm.YES_NO)),
    Fact(lambda node, _: sorted(node.kinds), _MANIFEST, found="kinds"),
    Fact(lambda node, _: node.manifest and node.manifest.etag, _MANIFEST, "manifest_etag"),
    Fact(_expires_at_ms, _MANIFEST, "expires_at_ms", column=(4, "VALID UNTIL (UTC)", FactForm.TIME)),
    Fact(_finding, _PRESENCE, "finding", column=(3, "FINDING", FactForm.FINDING), kind=HEALTH),
    Fact(lambda node, _: sorted(node.tools), _MANIFEST, "tools", column=(5, "TOOLS", FactForm.COUNT)),
    Fact(lambda node, _: node.since_ms, _PRESENCE, found="since_ms", may_lack=True),
    Fact(_since, _PRESENCE, found="since", may_lack=True),
    Fact(_finding, _PRESENCE, found="finding", may_lack=True, kind=HEALTH),
)
"""In the order of the members."""

_LISTED = tuple(fact for fact in FACTS if fact.listed)
_FOUND = tuple(fact for fact in FACTS if fact.found)
COLUMNS = tuple(
    (header, member, form)
    for _, header, form, member in sorted((*fact.column, fact.listed) for fact in FACTS if fact.column)
)
"""Header, member of ``fleet://nodes`` and form of each column of ``relay fleet nodes``."""


def _read(fact: Fact, node: "NodeRecord", names: "NodeNames", rights: "Rights") -> Any:
    return None if fact.kind and not shows(node, rights, fact.kind) else fact.read(node, names)


def listed_node(node: "NodeRecord", names: "NodeNames", rights: "Rights") -> ListedNode:
    """Return a node as ``fleet://nodes`` shows it; in a fleet of several its relay comes first."""
    shown: Any = {fact.listed: _read(fact, node, names, rights) for fact in _LISTED}
    entry: ListedNode = shown
    return entry


def found_node(node: "NodeRecord", names: "NodeNames", rights: "Rights") -> FindNodesEntry:
    """Return a node as ``find_nodes`` shows it, without what it last measured."""
    values = ((fact, _read(fact, node, names, rights)) for fact in _FOUND)
    shown: Any = {fact.found: value for fact, value in values if value is not None or not fact.may_lack}
    entry: FindNodesEntry = shown
    return entry


@dataclass(frozen=True, slots=True)
class NodeWarning:
    """A fact of some nodes that their operator should do something about.

    Attributes:
        known: which relays know it, and what clears it.
        check: the check of ``relay doctor`` that reports it.
        text: what is wrong; ``{count}`` nodes, of which ``{some}`` are named, with the fact if
            ``names_fact``.
        gauge: name and text of the gauge that counts the nodes; None if there is none.
    """

    known: KnownTo
    check: NodeCheck
    text: str
    fix: str
    names_fact: bool = True
    gauge: tuple[str, str] | None = None


WARNINGS: Mapping[str, NodeWarning] = {
    "wrong_clocks": NodeWarning(
        KnownTo.HERE,
        "clock",
        "{count} nodes sign by clocks that differ from this one by more than 5 min: {some}",
        "run `edge-kubelet doctor` there, and compare this clock too: timedatectl set-ntp true",
    ),
    "silent": NodeWarning(
        KnownTo.HERE,
        "echo",
        "silent: {some}",
        "run `edge-kubelet doctor` there",
        names_fact=False,
        gauge=("nodes_silent", "Connected nodes that did not answer the relay's last echo to them"),
    ),
}
"""By the member of ``NodesStatus`` that has the nodes by id."""
_NAMED = 3


class NodeWarnings:
    """What finds the nodes of each of ``WARNINGS`` in this relay, for the status and the gauges."""

    def __init__(self, metrics: "Metrics") -> None:
        self._metrics = metrics
        self._find: dict[str, Callable[[], Mapping[str, str]]] = {}

    def watch(self, member: str, find: Callable[[], Mapping[str, str]]) -> None:
        """Take ``find`` as what returns the nodes of a warning, each with the fact as text."""
        self._find[member] = find
        if (gauge := WARNINGS[member].gauge) is not None:
            self._metrics.watch(*gauge, lambda: len(find()))

    def status(self, known: int, connected: int) -> NodesStatus:
        return {
            "known": known,
            "connected": connected,
            "wrong_clocks": self._nodes("wrong_clocks"),
            "silent": self._nodes("silent"),
        }

    def _nodes(self, member: str) -> Mapping[str, str]:
        return self._find[member]() if member in self._find else {}

    def unwatched(self) -> set[str]:
        return WARNINGS.keys() - self._find.keys()


def warned(check: NodeCheck, nodes: NodesStatus) -> tuple[str, str] | None:
    """Return what a check of ``relay doctor`` has to report of ``nodes``, and the fix; None if nothing."""
    by_member = cast("Mapping[str, Mapping[str, str]]", nodes)
    texts, fixes = [], []
    for member, warning in WARNINGS.items():
        found = by_member.get(member)  # a relay of a version before lacks some
        if warning.check == check and found:
            named = sorted(found.items())[:_NAMED]
            some = ", ".join(
                f"{node_id} ({how})" if warning.names_fact else node_id for node_id, how in named
            )
            texts.append(warning.text.format(count=len(found), some=some))
            fixes.append(warning.fix)
    return ("; ".join(texts), "; ".join(fixes)) if texts else None
