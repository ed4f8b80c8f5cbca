"""The events of one session, for its caller: numbered, in order, and bounded.

An event is kept as JSON text until its place is needed. A request stays while it is pending, so that a caller
that only polls gets every request. Must not know who reads them.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from relay.ascii_json import encoded
from relay.streams.caller_tools.limits import MAX_EVENTS
from relay.streams.caller_tools.shared_budget import Holder, SharedBudget
from schemas.error_roots import EdgeError


class EventType(StrEnum):
    """What an event is."""

    REQUEST = "caller_tool_request"
    REQUEST_CANCELLED = "caller_tool_cancelled"
    REQUEST_ENDED = "caller_tool_ended"
    MESSAGE = "session_event"
    ENDED = "session_ended"


class EventsFullError(EdgeError):
    """There is no memory for another request."""


@dataclass(frozen=True, slots=True)
class CallerEvent:
    """One event. ``text`` is its JSON, in ASCII; ``request_id`` is that of a request."""

    cursor: int
    text: str
    request_id: str | None = None


class EventBuffer:
    """The events of the session ``session_id``, which takes its memory from ``budget`` for ``holder``.

    Attributes:
        newest: the cursor of the newest event; 0 before the first.
        size: the bytes that the events take of the budget.
    """

    def __init__(
        self, session_id: str, holder: Holder, budget: SharedBudget, max_events: int = MAX_EVENTS
    ) -> None:
        self._session_id = session_id
        self._holder = holder
        self._budget = budget
        self._max_events = max_events
        self._events: OrderedDict[int, CallerEvent] = OrderedDict()
        self._requests: dict[str, int] = {}
        self._evicted = 0
        self.newest = 0
        self.size = 0

    def append(
        self, type_: EventType, members: Mapping[str, Any], request_id: str | None = None
    ) -> CallerEvent | None:
        """Add an event; ``request_id`` keeps it until it is discarded. None: there was no memory for it.

        Raises:
            EventsFullError: there is no memory for the request.
        """
        cursor = self.newest + 1
        head = {"type": type_.value, "session_id": self._session_id, "cursor": cursor}
        event = CallerEvent(cursor, encoded({**head, **members}), request_id)
        self._evict(self._max_events - 1)
        while self._budget.take(self._holder, len(event.text)) is not None:
            if not self._evict(len(self._events) - len(self._requests) - 1):
                if request_id is not None:
                    raise EventsFullError
                # The caller learns from the gap that it missed one.
                self.newest = self._evicted = cursor
                return None
        self.newest = cursor
        self.size += len(event.text)
        self._events[cursor] = event
        if request_id is not None:
            self._requests[request_id] = cursor
        return event

    def discard(self, request_id: str) -> None:
        """Remove the event of a request that has ended."""
        cursor = self._requests.pop(request_id, None)
        if cursor is not None:
            self._remove(cursor)

    def after(self, cursor: int, max_bytes: int) -> list[CallerEvent]:
        """Return the events behind ``cursor``, as many as fit ``max_bytes``, and one at least."""
        found: list[CallerEvent] = []
        size = 0
        for event in self._behind(cursor):
            size += len(event.text)
            if found and size > max_bytes:
                break
            found.append(event)
        return found

    def has_missed(self, cursor: int) -> bool:
        """Return whether an event behind ``cursor`` was evicted."""
        return self._evicted > cursor

    def _behind(self, cursor: int) -> Iterator[CallerEvent]:
        return (event for event in self._events.values() if event.cursor > cursor)

    def _evict(self, at_most: int) -> bool:
        """Evict the oldest events that are no pending request until there are ``at_most`` of them."""
        spare = len(self._events) - len(self._requests) - max(at_most, 0)
        if spare <= 0:
            return False
        oldest = [event.cursor for event in self._events.values() if event.request_id is None][:spare]
        for cursor in oldest:
            self._remove(cursor)
        self._evicted = max(self._evicted, oldest[-1])
        return True

    def _remove(self, cursor: int) -> None:
        event = self._events.pop(cursor)
        self.size -= len(event.text)
        self._budget.give_back(self._holder, len(event.text))
