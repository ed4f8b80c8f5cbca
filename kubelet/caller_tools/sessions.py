"""The live sessions of callers with this node, and what each of them lends.

A tool is lent by its session alone. What collides is refused, never redirected: a caller_id of another owner,
a name that a declaration contains twice. Must not do I/O: who reads the tools is called back.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from structlog.typing import FilteringBoundLogger

from schemas.caller_tools import MAX_SESSIONS, size_of
from schemas.error_roots import PeerError, StateError
from schemas.files import PRIVATE, read_state, write_atomic
from schemas.payloads import CallerTool, SessionOpen
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

MAX_NAMES = 1024
MAX_NAMES_OF_ONE_OWNER = 16
_MAX_FILE_BYTES = 1 << 20
MAX_UNREAD = 16
"""The messages of one session that are kept until a local client reads them."""
_MAX_UNREAD_BYTES = 1 << 20
"""Their size as they are written, all at once: far below what disconnects a client (``server``)."""
MAX_UNREAD_BYTES_OF_ALL = 4 << 20
"""The same of all sessions together: a board has less memory than 64 times as much."""
DEFAULT_TIMEOUT_S = 60.0
MAX_LENT_BYTES = 4 << 20
"""What all sessions of a node lend together, as JSON; in memory it is several times as much."""
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class CallerNamesError(StateError):
    """The file cannot be used; the text states what to do."""


class CallerNames:
    """The owners of caller_ids, kept in ``file``; in memory alone without one.

    A caller_id is what the local agent sees of a caller, and belongs to the principal that first used it. It
    must not pass to another, not even after a restart: the local agent would take that one for the caller
    that it knows. So it is kept until an operator removes the file.

    Raises:
        CallerNamesError: the file is damaged.
        OSError: it cannot be read, or is not to be believed.
    """

    def __init__(self, file: Path | None, log: FilteringBoundLogger) -> None:
        self._file = file
        self._log = log
        self._owners = {} if file is None else _read(file)

    def claim(self, caller_id: str, owner: str) -> bool:
        """Return whether ``caller_id`` is, or now becomes, the ``owner``'s."""
        known = self._owners.get(caller_id)
        if known is not None:
            return known == owner
        if len(self._owners) >= MAX_NAMES or Counter(self._owners.values())[owner] >= MAX_NAMES_OF_ONE_OWNER:
            self._log.warning("caller_id refused: no more are kept", caller_id=printable(caller_id, 64))
            return False
        owners = {**self._owners, caller_id: owner}
        if self._file is not None:
            try:
                write_atomic(self._file, json.dumps(owners, indent=1) + "\n", PRIVATE)
            except OSError as error:
                # Fail closed: a name that is not kept could be taken by another after a restart.
                self._log.error("caller_id refused: it cannot be kept", exc_info=error)
                return False
        self._owners = owners
        return True


def _read(file: Path) -> dict[str, str]:
    try:
        owners = loads(read_state(file, _MAX_FILE_BYTES), max_bytes=_MAX_FILE_BYTES)
    except FileNotFoundError:
        return {}
    except StrictJsonError:
        owners = None
    if not isinstance(owners, dict) or not all(isinstance(owner, str) for owner in owners.values()):
        raise CallerNamesError(f"{file} is damaged: remove it; caller_ids then belong to their next users")
    return owners


class SessionRefusedError(PeerError):
    """A session is refused; the text is a constant of ours, for the log and for its caller."""


@dataclass(slots=True, eq=False)
class Session:
    """One session of a caller with this node.

    Attributes:
        tools: what the caller lends, by name, each with an ``inputSchema``.
        timeout_s: how long the relay waits for the caller's answer to a request.
        unread: messages for the local agent that no client has received, each with its size as it is written.
        confirmed: whether the relay has named it since the connection to it was made.
    """

    session_id: str
    caller_id: str
    owner: str
    tools: Mapping[str, CallerTool]
    timeout_s: float = DEFAULT_TIMEOUT_S
    unread: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=MAX_UNREAD))
    confirmed: bool = True

    @property
    def unread_bytes(self) -> int:
        return sum(size for _, size in self.unread)

    def keep_unread(self, message: str) -> bool:
        """Keep ``message`` until a client reads it; return whether all before it are still kept."""
        count = len(self.unread)
        self.unread.append((message, size_of(message)))
        while self.unread_bytes > _MAX_UNREAD_BYTES:
            self.unread.popleft()
        return len(self.unread) == count + 1


class Sessions:
    """The live sessions of one node."""

    def __init__(self, names: CallerNames, log: FilteringBoundLogger) -> None:
        self._names = names
        self._log = log
        self._live: dict[str, Session] = {}
        self._sizes: dict[str, int] = {}
        self._listeners: list[Callable[[Session | None], None]] = []

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def on_change(self, listener: Callable[[Session | None], None]) -> None:
        """Call ``listener`` after each change, with the session that has ended, if one has."""
        self._listeners.append(listener)

    def get(self, session_id: str) -> Session | None:
        return self._live.get(session_id)

    def only(self) -> Session | None:
        """Return the one live session; None if there is none, or more than one."""
        return next(iter(self._live.values())) if len(self._live) == 1 else None

    def open(self, opened: SessionOpen) -> Session:
        """Add a session, or replace what it lends, and return it.

        Raises:
            SessionRefusedError: it is refused, and lends nothing.
        """
        session_id, caller_id, owner = opened["session_id"], opened["caller_id"], opened["owner"]
        tools = self._lent(opened)
        known = self._live.get(session_id)
        if known is not None and (known.caller_id, known.owner) != (caller_id, owner):
            # One session has one caller: what comes under its id from another is not its declaration.
            raise SessionRefusedError("it belongs to another caller")
        size = size_of(opened["tools"])
        if sum(self._sizes.values()) - self._sizes.get(session_id, 0) + size > MAX_LENT_BYTES:
            self.end(session_id)
            raise SessionRefusedError("what all callers lend is too large together")
        if known is not None:
            self._sizes[session_id] = size
            known.confirmed = True
            self._set_timeout(known, opened)
            if known.tools != tools:
                known.tools = tools
                self._changed(None)
            return known
        if len(self._live) >= MAX_SESSIONS:
            raise SessionRefusedError("too many are live")
        if not self._names.claim(caller_id, owner):
            raise SessionRefusedError("its caller_id belongs to another")
        self._sizes[session_id] = size
        session = self._live[session_id] = Session(session_id, caller_id, owner, tools)
        self._set_timeout(session, opened)
        self._changed(None)
        return session

    def keep_unread(self, session: Session, message: str) -> bool:
        """Keep ``message`` until a client of ``session`` reads it; return whether all others are kept."""
        is_kept = session.keep_unread(message)
        while sum(each.unread_bytes for each in self) > MAX_UNREAD_BYTES_OF_ALL:
            max(self, key=lambda each: each.unread_bytes).unread.popleft()
            is_kept = False
        return is_kept

    def end(self, session_id: str) -> None:
        self._sizes.pop(session_id, None)
        if (session := self._live.pop(session_id, None)) is not None:
            self._changed(session)

    def _changed(self, ended: Session | None) -> None:
        for listener in self._listeners:
            listener(ended)

    def _set_timeout(self, session: Session, opened: SessionOpen) -> None:
        timeout_ms = opened.get("timeout_ms")
        session.timeout_s = DEFAULT_TIMEOUT_S if timeout_ms is None else timeout_ms / 1000

    def _lent(self, opened: SessionOpen) -> dict[str, CallerTool]:
        names = [tool["name"] for tool in opened["tools"]]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            self._log.warning("lent tools refused: a name is declared twice", count=len(twice))
        return {
            tool["name"]: {**tool, "inputSchema": tool.get("inputSchema", _ANY_OBJECT)}
            for tool in opened["tools"]
            if tool["name"] not in twice
        }
