"""The requests of one session: those that are pending, and the answers to those that have ended.

A request ends once. Its answer is kept for a while, since a frame is lost with its connection and the node
asks again when it resumes. Must not send anything.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from schemas.payloads import CallerToolResult

_MAX_KEPT = 256
_MAX_KEPT_BYTES = 512 * 1024


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that waits for the caller's answer. Times are seconds of a monotonic clock.

    Attributes:
        delivered: whether a caller has read it in an answer.
        streams: the open streams on which it was sent, by their keys.
    """

    request_id: str
    tool: str
    correlation_id: str
    arrived: float
    delivered: bool = False
    streams: set[object] = field(default_factory=set)

    @property
    def has_reached_caller(self) -> bool:
        """Whether it was read or sent."""
        return self.delivered or bool(self.streams)


@dataclass(frozen=True, slots=True)
class _Kept:
    """How a request ended; ``payload`` is None when it is no longer kept."""

    payload: CallerToolResult | None
    size: int
    ended: float


class SessionRequests:
    """The requests of one session, by id."""

    def __init__(self) -> None:
        self._pending: dict[str, PendingRequest] = {}
        self._ended: OrderedDict[str, _Kept] = OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(tuple(self._pending.values()))

    def add(self, request: PendingRequest) -> None:
        """Note a new request."""
        self._pending[request.request_id] = request

    def find(self, request_id: str) -> PendingRequest | None:
        """Return the pending request of that id."""
        return self._pending.get(request_id)

    def is_known(self, request_id: str) -> bool:
        """Return whether a request of that id is pending, or has ended lately."""
        return request_id in self._pending or request_id in self._ended

    def end(self, request_id: str, payload: CallerToolResult, size: int, now: float) -> None:
        """End a pending request, and keep ``payload``, of ``size`` bytes, for when the node asks again."""
        del self._pending[request_id]
        self._ended[request_id] = _Kept(payload, size, now)
        self._kept_bytes += size
        for oldest in list(self._ended):
            if self._kept_bytes <= _MAX_KEPT_BYTES:
                break
            self._drop_payload(oldest)
        while len(self._ended) > _MAX_KEPT:
            self._forget(next(iter(self._ended)))

    def withdraw(self, request_id: str) -> PendingRequest | None:
        """Remove a pending request whose answer is not needed; it cannot be asked again."""
        request = self._pending.pop(request_id, None)
        if request is not None:
            self._ended[request_id] = _Kept(None, 0, request.arrived)
        return request

    def answer_to(self, request_id: str) -> CallerToolResult | None:
        """Return the answer to a request that has ended, if it is kept."""
        kept = self._ended.get(request_id)
        return kept.payload if kept is not None else None

    def kept_answers(self) -> Collection[CallerToolResult]:
        """Return the answers that are kept, in the order in which they were given."""
        return [kept.payload for kept in self._ended.values() if kept.payload is not None]

    def forget_before(self, moment: float) -> None:
        """Forget the requests that ended before ``moment``."""
        for request_id in [key for key, kept in self._ended.items() if kept.ended < moment]:
            self._forget(request_id)

    def _drop_payload(self, request_id: str) -> None:
        kept = self._ended[request_id]
        self._ended[request_id] = _Kept(None, 0, kept.ended)
        self._kept_bytes -= kept.size

    def _forget(self, request_id: str) -> None:
        self._drop_payload(request_id)
        del self._ended[request_id]
