"""What became of each call, checked as it happens: the properties that hold for the two ends together.

Written from what the model itself sees: what is put on a wire, what a process begins to run, what a caller is
given. Must not ask either end, for an end that errs would confirm its own error.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from schemas.payloads import Cmd

_NOT_RUN = "E_RATE_LIMITED"
"""With this code a node promises that it does not run the command."""


class ViolationError(AssertionError):
    """A property does not hold."""


class Outcome(StrEnum):
    """How a call ends for its caller."""

    ANSWERED = "answered by the node"
    REFUSED = "refused by the node"
    DEADLINE = "deadline, outcome unknown"
    OFFLINE = "offline, never sent"
    CANCELLED = "given up by the caller"
    SHUT_OUT = "the relay ended the session"
    BROKEN = "the relay crashed"


@dataclass(frozen=True, slots=True)
class Recipient:
    """To whom a command was sent: a session, and the process at the other end of the wire."""

    session_id: str
    boot_id: str


@dataclass(slots=True)
class Call:
    """One call, by its correlation id. ``runs`` are the processes that have begun to run it."""

    correlation_id: str
    expires_at_ms: int
    msg_id: str = ""
    sent_to: Recipient | None = None
    sent_over: object = None
    runs: list[str] = field(default_factory=list)
    outcome: Outcome | None = None
    is_not_run: bool = False


class History:
    """Every call, and the properties. ``counts`` is what happened how often, so that a walk can be judged."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.live: dict[str, Call] = {}
        self.by_msg_id: dict[str, Call] = {}
        self.counts: Counter[str] = Counter()

    def began(self, correlation_id: str, expires_at_ms: int) -> Call:
        """Take in a new call."""
        call = Call(correlation_id, expires_at_ms)
        self.calls[correlation_id] = self.live[correlation_id] = call
        return call

    def sent(  # noqa: PLR0913, PLR0917 - what is true of one frame
        self, msg_id: str, payload: Cmd, to: Recipient, resumes: str | None, wire: object, now_ms: int
    ) -> None:
        """Take in that a ``cmd`` was put on ``wire``, on which the node resumed the session ``resumes``.

        Only ever again to the same process that resumes the same session, and once on each connection.
        """
        call = self.calls[payload["correlation_id"]]
        _require(call.outcome is None, "a command was sent after its call had ended")
        _require(call.msg_id in {"", msg_id}, "a command was sent again under another msg_id")
        _require(call.sent_to in {None, to}, "a command was sent again to another process or session")
        if call.sent_to is not None:
            _require(call.sent_over is not wire, "a command was sent twice over one connection")
            _require(to.session_id == resumes, "a command was sent again to a process that does not resume")
        _require(now_ms < call.expires_at_ms, "a command was sent after its deadline")
        remaining_ms = call.expires_at_ms - payload["sent_at_ms"]
        _require(payload["deadline_ms"] == remaining_ms, "a command was sent with another deadline")
        self.counts["cmd" if call.sent_to is None else "cmd sent again"] += 1
        call.msg_id, call.sent_to, call.sent_over = msg_id, to, wire
        self.by_msg_id[msg_id] = call

    def ran(self, msg_id: str, boot_id: str) -> None:
        """Take in that a process begins to run a command: once, and only the one that it was sent to."""
        call = self.by_msg_id[msg_id]
        _require(not call.runs, "a command runs twice")
        _require(not call.is_not_run, "a command runs of which its caller was told that it does not")
        _require(call.sent_to is not None and call.sent_to.boot_id == boot_id, "a stranger runs a command")
        call.runs.append(boot_id)

    def ended(self, call: Call, outcome: Outcome, now_ms: int, answer: Mapping[str, Any] | None) -> None:
        """Take in what a caller is given: one outcome, by its deadline, and of no other call."""
        _require(call.outcome is None, "a call has two outcomes")
        _require(now_ms <= call.expires_at_ms, "a call ended after its deadline")
        if outcome is Outcome.DEADLINE:
            _require(now_ms == call.expires_at_ms, "a call was given up before its deadline")
        if outcome is Outcome.OFFLINE:
            _require(call.sent_to is None, "a call was said to be never sent, and was sent")
        if answer is not None:
            self._answered(call, answer)
        call.outcome = outcome
        del self.live[call.correlation_id]
        self.counts[outcome.value] += 1

    def check(self, now_ms: int) -> None:
        """Check what must hold whenever time has passed: no call outlives its deadline."""
        for call in self.live.values():
            _require(now_ms < call.expires_at_ms, "a call has no outcome by its deadline")

    def nothing_is_owed(self, to: Recipient | None) -> None:
        """Check, when nothing is left to do but wait, that ``to`` has answered all that it was sent."""
        for call in self.live.values():
            _require(to is None or call.sent_to != to, "an answer was lost, though its process resumed")

    def _answered(self, call: Call, answer: Mapping[str, Any]) -> None:
        if answer["ok"]:
            of, by = answer["result"]["of"], answer["result"]["by"]
            _require(of == call.correlation_id, "the answer of another call reached a caller")
            _require(call.runs == [by], "a call was answered by a process that did not run it")
            return
        error = answer["error"]
        _require(error["correlation_id"] == call.correlation_id, "the error of another call reached a caller")
        if error["code"] == _NOT_RUN:
            _require(not call.runs, "a command was run of which its caller is told that it was not")
            call.is_not_run = True


def _require(holds: bool, violated: str) -> None:  # noqa: FBT001 - the condition itself
    if not holds:
        raise ViolationError(violated)
