"""The live sessions of all callers, with their limits, and the nodes that they are with.

Must not know requests or events, nor decide what a caller may do: a token without the scope does not reach
this package.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from attrs import define, field

from relay.auth.agent_tokens import AgentName
from relay.auth.permissions import Rights
from relay.fleet.fleet import Fleet
from relay.fleet.node_names import UnknownNodeError
from relay.fleet.selection import Selection
from relay.streams.caller_tools.session import MAX_SESSIONS as MAX_IN_ALL
from relay.streams.caller_tools.session import CallerSession, Holder, SharedBudget
from schemas.caller_tools import MAX_SESSIONS
from schemas.errors import Failure, ToolError
from schemas.times import SystemClock

_NOT_SELECTED = "The URL of this connection leaves the node out."


@dataclass(frozen=True, slots=True)
class SessionNode:
    """A node with which a session can be opened; ``key`` is its public key."""

    node_id: str
    key: bytes


@define(eq=False, repr=False)
class Nodes:
    """The nodes of one relay, as sessions need them."""

    _fleet: Fleet

    def find(self, rights: Rights, reference: str, selection: Selection) -> SessionNode:
        """Return the connected node that ``reference`` names: an id, a label or a prefix.

        One that ``selection`` leaves out does not exist.

        Raises:
            ToolError: SAFETY_DENIED for one that ``rights`` do not reach, as for none; NODE_OFFLINE.
        """
        try:
            node_id = self._fleet.reach.resolve(rights, reference)
        except UnknownNodeError as error:
            text = "There is no such node."
            raise ToolError(Failure.SAFETY_DENIED, text, told=error.headline, fix=f"{error}.") from None
        if not selection.admits_node(self._fleet.reach, rights, node_id):
            raise ToolError(Failure.SAFETY_DENIED, _NOT_SELECTED)
        record = self._fleet.session_node(rights, node_id)
        newest = max(record.identities.values(), key=lambda leaf: leaf.not_before_ms)
        return SessionNode(node_id, newest.public_key)

    def reached(self, rights: Rights, node_id: str) -> bool:
        """Return whether a caller with ``rights`` may be in a session with that node of its tenant."""
        return rights.may_message and self._fleet.reach.admits(rights, node_id)

    def is_trusted(self, tenant: str, node_id: str, key: bytes) -> bool:
        """Return whether the node is still of ``tenant``, with a trusted leaf of the same key."""
        record = self._fleet.node_of(tenant, node_id)
        if record is None or self._fleet.is_hidden(node_id):
            return False
        return any(leaf.public_key == key for leaf in record.identities.values())


_RETRY_MS = 60_000
_RANDOM_BYTES = 4


@define(eq=False, repr=False)
class SessionRegistry:
    """The live sessions, by id and by node. The last digits of each id begin with ``tag``, fewer than 8.

    Attributes:
        shares: how many there are, of whom.
    """

    _now_ms: SystemClock
    _random_bytes: Callable[[int], bytes]
    _tag: str = ""
    shares: SharedBudget = field(init=False, factory=lambda: SharedBudget(MAX_SESSIONS, MAX_IN_ALL))
    _sessions: dict[str, CallerSession] = field(init=False, factory=dict)
    _of_node: defaultdict[str, dict[str, CallerSession]] = field(
        init=False, factory=lambda: defaultdict(dict)
    )

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def __iter__(self) -> Iterator[CallerSession]:
        return iter(tuple(self._sessions.values()))

    def new_id(self) -> str:
        """Return an id that no live session has."""
        began = datetime.fromtimestamp(self._now_ms() / 1000, UTC)
        while True:
            digits = (self._tag + self._random_bytes(_RANDOM_BYTES).hex())[: 2 * _RANDOM_BYTES]
            session_id = f"gogol_{began:%Y%m%d_%H%M%S}_{digits}"
            if session_id not in self._sessions:
                return session_id

    def check_space(self, holder: Holder) -> None:
        """Return if ``holder`` may have another session.

        Raises:
            ToolError: RATE_LIMITED.
        """
        if (full := self.shares.full(holder, 1)) is not None:
            text = f"{full} are as many as they may be: end one."
            raise ToolError(Failure.RATE_LIMITED, text, retry_after_ms=_RETRY_MS)

    def add(self, session: CallerSession) -> None:
        """Add a session, for which there is space."""
        self.shares.take(session.holder, 1)
        self._sessions[session.session_id] = session
        self._of_node[session.node_id][session.session_id] = session

    def remove(self, session: CallerSession) -> None:
        self.shares.give_back(session.holder, 1)
        of_node = self._of_node[session.node_id]
        del self._sessions[session.session_id], of_node[session.session_id]
        if not of_node:
            del self._of_node[session.node_id]

    def of_caller(self, principal: AgentName, session_id: str) -> CallerSession:
        """Return the session of that id that ``principal`` has opened.

        Raises:
            ToolError: SESSION_UNKNOWN; a session of another principal is as one that does not exist.
        """
        session = self._sessions.get(session_id)
        if session is None or session.principal != principal:
            raise ToolError(Failure.SESSION_UNKNOWN)
        return session

    def of_node(self, node_id: str) -> list[CallerSession]:
        return list(self._of_node.get(node_id, {}).values())

    def with_node(self, tenant: str, node_id: str, session_id: str) -> CallerSession | None:
        """Return the session of that id, if it is with this node of this tenant."""
        session = self._sessions.get(session_id)
        if session is None or (session.tenant, session.node_id) != (tenant, node_id):
            return None
        return session
