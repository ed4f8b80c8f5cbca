"""The checks of the model themselves: with a part that errs, a walk finds the property that it violates."""

from contextlib import closing
from dataclasses import astuple
from typing import Any

import pytest

from relay.routing.port import CommandAnswer
from relay.sessions.session import NodeSession
from schemas.delivery import AnswerCache, CommandStatus, PendingCommands, TransitGauge
from schemas.frames import FrameReader
from schemas.payloads import Cmd
from schemas.registry import SchemaRegistry
from tests.model.history import Call, ViolationError
from tests.model.relay_end import RelayConnection, RelayEnd, connection_of
from tests.model.walk import walk
from tests.model.world import Parts, World

READER = FrameReader(SchemaRegistry())
STEPS = 200_000


class ResumedByAnyone(NodeSession):
    """Sends again to another process."""

    def is_resumed_by(self, boot_id: str, resume: str | None) -> bool:  # noqa: ARG002 - that is its error
        return True


class ResumedWithoutItsName(NodeSession):
    """Takes the same process for the same session."""

    def is_resumed_by(self, boot_id: str, resume: str | None) -> bool:  # noqa: ARG002 - as above
        return self.boot_id == boot_id


class SettledByAnyAnswer(NodeSession):
    """Gives an answer to whichever command waits longest."""

    def settle(self, msg_id: str, answer: Any) -> None:
        super().settle(next(iter(self.pending), msg_id), answer)


class NeverSettled(NodeSession):
    """Loses the answers."""

    def settle(self, msg_id: str, answer: Any) -> None:
        pass


class ForgetfulCache(AnswerCache):
    """Forgets what it has seen."""

    def admit(self, msg_id: str, expires_at_ms: int, now_ms: int) -> CommandStatus:
        status = super().admit(msg_id, expires_at_ms, now_ms)
        return CommandStatus.NEW if status is CommandStatus.SEEN else status


class RefusingCache(AnswerCache):
    """Refuses, as if it had not run, what it has seen."""

    def admit(self, msg_id: str, expires_at_ms: int, now_ms: int) -> CommandStatus:
        status = super().admit(msg_id, expires_at_ms, now_ms)
        return CommandStatus.FULL if status is CommandStatus.SEEN else status


class LenientCache(AnswerCache):
    """Runs again what it has no answer to any more."""

    def admit(self, msg_id: str, expires_at_ms: int, now_ms: int) -> CommandStatus:
        status = super().admit(msg_id, expires_at_ms, now_ms)
        return CommandStatus.NEW if status is CommandStatus.FORGOTTEN else status


class ConfusedCache(AnswerCache):
    """Answers a repeated command with the answer to another."""

    def recall(self, msg_id: str) -> Any:  # noqa: ARG002 - as above
        return next((super(ConfusedCache, self).recall(other) for other in self._answers), None)


class NeverRemoved(PendingCommands[CommandAnswer]):
    """Keeps what is answered, as if it still waited."""

    def pop(self, msg_id: str) -> CommandAnswer | None:
        sent = self._sent.get(msg_id)
        return None if sent is None else sent.waiter


class DeadlineIgnored(PendingCommands[CommandAnswer]):
    """Sends again what is over, with a budget that it does not have."""

    def renewed(self, msg_id: str, now_ms: int) -> Cmd | None:
        sent = self._sent.get(msg_id)
        return None if sent is None else {**sent.payload, "sent_at_ms": now_ms}


class NeverSentAgain(PendingCommands[CommandAnswer]):
    """Sends nothing again."""

    def renewed(self, msg_id: str, now_ms: int) -> Cmd | None:  # noqa: ARG002 - as above
        return None


class NoDelay(TransitGauge):
    """Takes every message to arrive at once."""

    def delay_ms(self, sent_at_ms: int, received_at_ms: int) -> int:  # noqa: ARG002 - as above
        return 0


class NeverExpires(RelayEnd):
    """Lets callers wait beyond their deadline."""

    def expire(self, msg_id: str) -> None:
        pass


class SendsTwice(RelayEnd):
    """Sends again, after a resume, also what it sends meanwhile."""

    def call(self, call: Call) -> None:
        super().call(call)
        if (connection := connection_of(self.session)) is not None and connection.again:
            connection.again.append(next(reversed(self.waiting)))


class DropsWithoutCounting(RelayEnd):
    """Drops answers, and does not count them."""

    def receive(self, connection: RelayConnection, text: str | None) -> None:
        super().receive(connection, text)
        connection.end.machine.dropped.clear()


class OfflineAfterSending(RelayEnd):
    """Says that a command was never sent when its connection is lost."""

    def lose(self, connection: RelayConnection) -> None:
        super().lose(connection)
        for msg_id, waiting in tuple(self.waiting.items()):
            if waiting.session is connection.session:
                del self.waiting[msg_id]
                self.report_offline(waiting.call)


def changed(parts: Parts) -> list[str]:
    """Return the names of the parts that err."""
    pairs = zip(astuple(parts), astuple(Parts()), strict=True)
    return [part.__name__ for part, good in pairs if part is not good]


PLANTED = [
    (Parts(session=ResumedByAnyone), "sent again to another process or session"),
    (Parts(session=ResumedWithoutItsName), "sent again to a process that does not resume"),
    (Parts(session=SettledByAnyAnswer), "reached a caller"),
    (Parts(session=NeverSettled), "an answer was lost"),
    (Parts(memory=ForgetfulCache), "a command runs twice"),
    (Parts(memory=LenientCache), "a command runs twice"),
    (Parts(memory=RefusingCache), "of which its caller is told that it was not"),
    (Parts(memory=ConfusedCache), "reached a caller"),
    (Parts(pending=NeverRemoved), "after its call had ended"),
    (Parts(pending=DeadlineIgnored), "a command was sent"),
    (Parts(pending=NeverSentAgain), "an answer was lost"),
    (Parts(gauge=NoDelay), "a command runs twice"),
    (Parts(relay=NeverExpires), "no outcome by its deadline"),
    (Parts(relay=SendsTwice), "sent twice over one connection"),
    (Parts(relay=DropsWithoutCounting), "was not dropped and counted"),
    (Parts(relay=OfflineAfterSending), "said to be never sent"),
]


@pytest.mark.parametrize(
    ("parts", "violated"),
    PLANTED,
    ids=[next(iter(changed(parts))) for parts, _ in PLANTED],
)
def test_a_part_that_errs_is_found(parts: Parts, violated: str) -> None:
    with closing(World(READER, parts)) as world, pytest.raises(ViolationError, match=violated) as caught:
        walk(world, STEPS, seed=1)
    assert "seed 1" in caught.value.__notes__[0]
