"""What in a history breaks the promise of delivery. Pure functions of records.

A caller whose link was disturbed, or whose relay ended, sees a broken connection: the outcome is unknown
then, and that is no violation. A loop that lagged moves a deadline by as much as it lagged meanwhile.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from tests.chaos.history import AGENT_LINK, RELAY, History

DEADLINE_MS = 2000
"""What echo announces."""
TOLERANCE_MS = 250
HEARTBEAT_MS = 60_000

# Every other code says that the command was not run.
_MAY_HAVE_RUN = frozenset({"ok", "E_DEADLINE_EXCEEDED", "E_INTERNAL"})


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: of which sort, in which call or node, and what was seen."""

    sort: str
    subject: str
    seen: str

    def __str__(self) -> str:
        return f"{self.sort}: {self.subject}: {self.seen}"


def violations(history: History) -> list[Violation]:
    """Return every violation in ``history``."""
    lags = _Lags(history)
    return [found for check in _CHECKS for found in check(history, lags)]


class _Lags:
    """How much the loops lagged between two times, in total."""

    def __init__(self, history: History) -> None:
        ordered = sorted(history.lags, key=lambda lag: lag.at_ms)
        self._times = [lag.at_ms for lag in ordered]
        self._sums = [0.0, *accumulate(lag.lag_ms for lag in ordered)]

    def between(self, began_ms: float, ended_ms: float) -> float:
        # A lag is noted when it is over: one that has begun before the end may be noted after it.
        first = bisect_left(self._times, began_ms)
        last = min(bisect_right(self._times, ended_ms) + 1, len(self._times))
        return self._sums[last] - self._sums[first] if last > first else 0.0


def _is_disturbed(history: History, began_ms: int, ended_ms: int, *what: str) -> bool:
    """Return whether one of ``what`` was disturbed, or a moment before: connections end after it."""
    return any(
        disturbance.what in what
        and disturbance.began_ms <= ended_ms
        and began_ms <= disturbance.ended_ms + TOLERANCE_MS
        for disturbance in history.disturbances
    )


def _two_outcomes(history: History, _: _Lags) -> Iterator[Violation]:
    for call in history.calls:
        if len(call.answers) > 1:
            yield Violation("two outcomes", call.trace_id, f"{len(call.answers)} answers")
    for correlation_id, count in Counter(outcome.correlation_id for outcome in history.outcomes).items():
        if count > 1:
            yield Violation("two outcomes", correlation_id, f"{count} in the audit")


def _no_outcome(history: History, _: _Lags) -> Iterator[Violation]:
    for call in history.calls:
        ended_ms = call.ended_ms or call.began_ms + DEADLINE_MS
        if not call.answers and not _is_disturbed(history, call.began_ms, ended_ms, AGENT_LINK, RELAY):
            seen = "its caller gave up" if call.ended_ms is None else "the connection broke without a cause"
            yield Violation("no outcome", call.trace_id, seen)
    ended = {outcome.correlation_id for outcome in history.outcomes}
    for decision in history.decisions:
        latest_ms = decision.at_ms + DEADLINE_MS + TOLERANCE_MS
        over = decision.correlation_id in ended or not decision.allowed
        if not over and not _is_disturbed(history, decision.at_ms, latest_ms, RELAY):
            yield Violation("no outcome", decision.correlation_id, "none in the audit")


def _late_outcome(history: History, lags: _Lags) -> Iterator[Violation]:
    for call in history.calls:
        if call.ended_ms is None:
            continue
        took_ms = call.ended_ms - call.began_ms
        is_late = took_ms > DEADLINE_MS + TOLERANCE_MS + lags.between(call.began_ms, call.ended_ms)
        if is_late and not _is_disturbed(history, call.began_ms, call.ended_ms, AGENT_LINK):
            yield Violation("late outcome", call.trace_id, f"{took_ms} ms at its caller")
    for outcome in history.outcomes:
        lag_ms = lags.between(outcome.at_ms - outcome.duration_ms, outcome.at_ms)
        if outcome.duration_ms > DEADLINE_MS + TOLERANCE_MS + lag_ms:
            seen = f"{outcome.duration_ms:.0f} ms in the audit"
            yield Violation("late outcome", outcome.correlation_id, seen)


def _ran_twice(history: History, _: _Lags) -> Iterator[Violation]:
    for trace_id, count in Counter(run.trace_id for run in history.runs).items():
        if count > 1:
            yield Violation("ran twice", trace_id, f"{count} runs")


def _wrong_answer(history: History, _: _Lags) -> Iterator[Violation]:
    for call in history.calls:
        for answer in call.answers:
            is_own = answer.request_id == call.trace_id
            is_echo = (answer.message, answer.node_id) == (call.trace_id, call.node_id)
            if not is_own or (answer.code == "ok" and not is_echo):
                yield Violation("wrong answer", call.trace_id, repr(answer))
    nodes = {call.trace_id: call.node_id for call in history.calls}
    for run in history.runs:
        if nodes.get(run.trace_id) != run.node_id:
            yield Violation("wrong answer", run.trace_id, f"run by {run.node_id}, which was not called")


def _ran_after_refused(history: History, _: _Lags) -> Iterator[Violation]:
    ran = {run.trace_id: run.correlation_id for run in history.runs}
    denied = {decision.correlation_id for decision in history.decisions if not decision.allowed}
    for call in history.calls:
        refused = [answer.code for answer in call.answers if answer.code not in _MAY_HAVE_RUN]
        if refused and call.trace_id in ran:
            yield Violation("ran after refused", call.trace_id, refused[0])
    for trace_id, correlation_id in ran.items():
        if correlation_id in denied:
            yield Violation("ran after refused", trace_id, "denied in the audit")


def _not_healed(history: History, lags: _Lags) -> Iterator[Violation]:
    for healing in history.healings:
        healed_ms = healing.healed_ms
        if healed_ms is None:
            yield Violation("not healed", healing.part, "not right again when the run gave up")
        elif healed_ms - healing.began_ms > HEARTBEAT_MS + lags.between(healing.began_ms, healed_ms):
            yield Violation("not healed", healing.part, f"{healed_ms - healing.began_ms} ms")


_CHECKS: tuple[Callable[[History, _Lags], Iterator[Violation]], ...] = (
    _two_outcomes,
    _no_outcome,
    _late_outcome,
    _ran_twice,
    _wrong_answer,
    _ran_after_refused,
    _not_healed,
)
