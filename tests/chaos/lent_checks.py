"""What in a history breaks the promises to callers that lend tools, and to the local agents that use them.

Pure functions of records.
"""

from collections import Counter
from collections.abc import Iterator

from schemas.caller_tools import NODE_MARGIN_S
from tests.chaos.evidence import Check, Evidence, Violation
from tests.chaos.history import RELAY_WAITS_S, History

LONGEST_MS = int((RELAY_WAITS_S + NODE_MARGIN_S) * 1000)
"""The node ends a request that the relay has not."""


def _request_without_outcome(history: History, evidence: Evidence) -> Iterator[Violation]:
    for request in history.requests:
        if len(request.replies) > 1:
            yield Violation("two outcomes", request.token, f"{len(request.replies)} replies to a local agent")
        if request.replies or evidence.is_disturbed(request.began_ms, request.ended_ms, request.part):
            continue
        if not request.is_given_up:
            yield Violation("no outcome", request.token, "the socket closed without a cause")
        elif evidence.is_overdue(request.began_ms, request.ended_ms, LONGEST_MS):
            yield Violation("no outcome", request.token, "its local agent gave up")


def _late_reply(history: History, evidence: Evidence) -> Iterator[Violation]:
    for request in history.requests:
        is_late = evidence.is_overdue(request.began_ms, request.ended_ms, LONGEST_MS)
        if request.replies and is_late:
            seen = f"{request.ended_ms - request.began_ms} ms at its local agent"
            yield Violation("late outcome", request.token, seen)


def _served_twice(history: History, _: Evidence) -> Iterator[Violation]:
    for token, count in Counter(served.token for served in history.served).items():
        if count > 1:
            yield Violation("served twice", token, f"{count} requests at callers")
    for served in history.served:
        if served.accepted > 1:
            yield Violation("answered twice", served.token, f"{served.accepted} answers accepted")


def _wrong_caller(history: History, _: Evidence) -> Iterator[Violation]:
    requests = {request.token: request for request in history.requests}
    for served in history.served:
        request = requests.get(served.token)
        if request is None or (request.caller, request.node_id) != (served.caller, served.node_id):
            yield Violation("wrong caller", served.token, f"{served.caller} got it from {served.node_id}")


def _wrong_reply(history: History, _: Evidence) -> Iterator[Violation]:
    tokens = {served.request_id: served.token for served in history.served}
    for request in history.requests:
        for reply in request.replies:
            is_own = (reply.token, reply.caller) == (request.token, request.caller)
            if reply.code == "ok" and not (is_own and tokens.get(str(reply.request_id)) == request.token):
                yield Violation("wrong reply", request.token, repr(reply))


LENT_CHECKS: tuple[Check, ...] = (
    _request_without_outcome,
    _late_reply,
    _served_twice,
    _wrong_caller,
    _wrong_reply,
)
