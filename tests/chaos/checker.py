"""What in a history breaks the promise of delivery. Pure functions of records.

``evidence.py`` says what is no violation.
"""

from collections import Counter
from collections.abc import Iterator

from tests.chaos.evidence import TOLERANCE_MS, Check, Evidence, Violation
from tests.chaos.history import DEADLINE_MS, Call, History
from tests.chaos.lent_checks import LENT_CHECKS
from tests.chaos.stream_checks import STREAM_CHECKS

HEARTBEAT_MS = 60_000

_ANY_MS = 1 << 42
# Every other code says that the command was not run.
_MAY_HAVE_RUN = frozenset({"ok", "E_DEADLINE_EXCEEDED", "E_INTERNAL"})


def violations(history: History) -> list[Violation]:
    """Return every violation in ``history``."""
    evidence = Evidence(history)
    return [found for check in (*_CHECKS, *STREAM_CHECKS, *LENT_CHECKS) for found in check(history, evidence)]


def _two_outcomes(history: History, _: Evidence) -> Iterator[Violation]:
    for call in history.calls:
        if len(call.answers) > 1:
            yield Violation("two outcomes", call.trace_id, f"{len(call.answers)} answers")
    for correlation_id, count in Counter(outcome.correlation_id for outcome in history.outcomes).items():
        if count > 1:
            yield Violation("two outcomes", correlation_id, f"{count} in the audit")
    for key, calls in _by_key(history).items():
        runs = {answer.run for call in calls for answer in call.answers if answer.code == "ok"}
        if len(runs) > 1:
            relays = ", ".join(sorted({call.relay for call in calls}))
            yield Violation("two outcomes", key, f"{len(runs)} by way of {relays}")


def _no_outcome(history: History, evidence: Evidence) -> Iterator[Violation]:
    for call in history.calls:
        began_ms, ended_ms = call.began_ms, call.ended_ms
        if call.answers or evidence.is_disturbed(began_ms, ended_ms, call.link, call.relay):
            continue
        if not call.is_given_up:
            yield Violation("no outcome", call.trace_id, "the connection broke without a cause")
        elif evidence.is_overdue(began_ms, ended_ms, DEADLINE_MS):
            yield Violation("no outcome", call.trace_id, "its caller gave up")
    ended = {outcome.correlation_id for outcome in history.outcomes}
    for decision in history.decisions:
        latest_ms = decision.at_ms + (DEADLINE_MS + TOLERANCE_MS if decision.is_prompt else _ANY_MS)
        over = decision.correlation_id in ended or not decision.allowed
        if not over and not evidence.is_disturbed(decision.at_ms, latest_ms, decision.relay):
            yield Violation("no outcome", decision.correlation_id, "none in the audit")


def _late_outcome(history: History, evidence: Evidence) -> Iterator[Violation]:
    for call in history.calls:
        # The deadline of a runtime is its own, and counts also while its link is disturbed.
        if call.is_given_up and not call.is_remote:
            continue
        is_late = evidence.is_overdue(call.began_ms, call.ended_ms, call.deadline_ms)
        if is_late and (call.is_remote or not evidence.is_disturbed(call.began_ms, call.ended_ms, call.link)):
            yield Violation(
                "late outcome", call.trace_id, f"{call.ended_ms - call.began_ms} ms at its caller"
            )
    for outcome in history.outcomes:
        took_ms = round(outcome.duration_ms)
        if outcome.is_prompt and evidence.is_overdue(outcome.at_ms - took_ms, outcome.at_ms, DEADLINE_MS):
            yield Violation("late outcome", outcome.correlation_id, f"{took_ms} ms in the audit")


def _ran_twice(history: History, _: Evidence) -> Iterator[Violation]:
    keys = {call.trace_id: call.key for call in history.calls if call.key is not None}
    for one, count in Counter(keys.get(run.trace_id, run.trace_id) for run in history.runs).items():
        if count > 1:
            yield Violation("ran twice", one, f"{count} runs")


def _wrong_answer(history: History, _: Evidence) -> Iterator[Violation]:
    for call in history.calls:
        for answer in call.answers:
            is_own = answer.request_id == call.trace_id
            is_echo = (answer.message, answer.node_id) == (call.key or call.trace_id, call.node_id)
            if not is_own or (answer.code == "ok" and not is_echo):
                yield Violation("wrong answer", call.trace_id, repr(answer))
    nodes = {call.trace_id: call.node_id for call in history.calls}
    for run in history.runs:
        if nodes.get(run.trace_id) != run.node_id:
            yield Violation("wrong answer", run.trace_id, f"run by {run.node_id}, which was not called")


def _ran_after_refused(history: History, _: Evidence) -> Iterator[Violation]:
    ran = {run.trace_id: run.correlation_id for run in history.runs}
    denied = {decision.correlation_id for decision in history.decisions if not decision.allowed}
    for call in history.calls:
        refused = [answer.code for answer in call.answers if answer.code not in _MAY_HAVE_RUN]
        if refused and call.trace_id in ran:
            yield Violation("ran after refused", call.trace_id, refused[0])
    for trace_id, correlation_id in ran.items():
        if correlation_id in denied:
            yield Violation("ran after refused", trace_id, "denied in the audit")


def _record_without_end(history: History, _: Evidence) -> Iterator[Violation]:
    """Of a call that is not idempotent, one attempt is recorded as started, and as ended."""
    events: dict[str, Counter[str]] = {}
    for record in history.recorded:
        events.setdefault(record.trace_id, Counter())[record.event] += 1
    for call in history.calls:
        if not call.is_remote:
            continue
        found = events.get(call.trace_id, Counter())
        if dict(found) not in ({"started": 1, "ended": 1}, {"refused": 1}):
            yield Violation("record without end", call.trace_id, f"{dict(found)} in the audit of its runtime")


def _by_key(history: History) -> dict[str, list[Call]]:
    """Return the calls of each idempotency key."""
    found: dict[str, list[Call]] = {}
    for call in history.calls:
        if call.key is not None:
            found.setdefault(call.key, []).append(call)
    return found


def _not_healed(history: History, evidence: Evidence) -> Iterator[Violation]:
    for healing in history.healings:
        healed_ms = healing.healed_ms
        if healed_ms is None:
            yield Violation("not healed", healing.part, "not right again when the run gave up")
        elif evidence.is_overdue(healing.began_ms, healed_ms, HEARTBEAT_MS):
            yield Violation("not healed", healing.part, f"{healed_ms - healing.began_ms} ms")


def _not_expected(history: History, _: Evidence) -> Iterator[Violation]:
    for fault in history.faults:
        yield Violation("unexpected exception", fault.part, fault.text)


_CHECKS: tuple[Check, ...] = (
    _two_outcomes,
    _no_outcome,
    _late_outcome,
    _ran_twice,
    _wrong_answer,
    _ran_after_refused,
    _record_without_end,
    _not_healed,
    _not_expected,
)
