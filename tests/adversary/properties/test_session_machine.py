"""Both ends of a session, and a wire between them that drops, doubles, reorders, changes and invents.

Whatever it does: no answer reaches a caller twice, nothing but ``ProtocolError`` is raised, the state moves
along the table alone, and an end that has closed says nothing more.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schemas.frames import FRAME_TYPES, FrameReader, Role
from schemas.registry import SchemaRegistry
from schemas.session import ANSWERED_BY, SENDS, ProtocolError, SessionMachine, SessionState
from tests.fakes.examples import examples
from tests.fakes.frames import PAYLOADS, frame_text, message_id
from tests.fakes.seconds import Seconds

READER = FrameReader(SchemaRegistry())
OTHER = {Role.RELAY: Role.NODE, Role.NODE: Role.RELAY}
QUESTIONS = {answer: question for question, answer in ANSWERED_BY.items()}
ROLES = st.sampled_from(Role)
TYPES = st.sampled_from(FRAME_TYPES)
ORDER = list(SessionState)
HANDSHAKE = ("challenge", "auth", "welcome")
# Weighed by hand: a wire that mostly closes, or says what answers nothing, shows little.
UP_TO = st.sampled_from((0, 1, 2, 3, 3, 3, 3, 3, 3))
TALK = st.sampled_from([type_ for type_ in FRAME_TYPES if type_ != "bye"] * 3 + ["cmd", "cmd", "cmd", "bye"])
QUESTION = st.sampled_from(sorted(ANSWERED_BY))
ANSWERS = st.sampled_from(sorted(QUESTIONS))
PICK = st.integers(0, 30)


class TwoEnds(RuleBasedStateMachine):
    """What a test can make of two ends; what an end asked and was answered is noted here."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = {role: SessionMachine(role, READER, Seconds()) for role in Role}
        self.wire: dict[Role, list[str]] = {role: [] for role in Role}
        self.seen: dict[Role, SessionState] = dict.fromkeys(Role, SessionState.CHALLENGING)
        self.asked: dict[Role, dict[str, str]] = {role: {} for role in Role}
        self.ever: dict[Role, list[str]] = {role: [] for role in Role}
        self.heard: dict[Role, list[tuple[str, str]]] = {role: [] for role in Role}
        self.answered: dict[Role, list[str]] = {role: [] for role in Role}
        self.numbers = 0

    @initialize(up_to=UP_TO)
    def shake_hands(self, up_to: int) -> None:
        """Begin anywhere in the handshake, or after it: chance alone would seldom come that far."""
        for type_ in HANDSHAKE[:up_to]:
            role = Role.NODE if type_ == "auth" else Role.RELAY
            self.send(role, type_, self.numbers)
            self.deliver(OTHER[role], 0, keep=False)
        if up_to == len(HANDSHAKE):
            assert all(end.state is SessionState.OPEN for end in self.ends.values())

    @rule(role=ROLES, type_=TALK, answers=st.integers(0, 12))
    def send(self, role: Role, type_: str, answers: int) -> None:
        """Let an end send anything; if it may, it is on the wire."""
        end, before = self.ends[role], self.ends[role].state
        self.numbers += 1
        msg_id = message_id(self.numbers)
        reply_to = None if type_ not in QUESTIONS and type_ != "cmd_cancel" else message_id(answers)
        allowed = type_ in SENDS[role].get(before, {}) or (
            type_ == "bye" and before is not SessionState.CLOSED
        )
        try:
            text = end.send(type_, msg_id, PAYLOADS[type_], reply_to)
        except ProtocolError:
            assert not allowed
            assert end.state is before
            return
        assert allowed
        self.moved(role, SENDS[role].get(before, {}).get(type_, SessionState.CLOSED))
        if type_ in ANSWERED_BY:
            self.asked[role][msg_id] = type_
            self.ever[role].append(msg_id)
        self.wire[OTHER[role]].append(text)

    @rule(role=ROLES, at=PICK)
    def reply(self, role: Role, at: int) -> None:
        """Let an end answer something that it has heard: for the first time, or once more."""
        if self.heard[role]:
            question, msg_id = self.heard[role][at % len(self.heard[role])]
            self.send(role, ANSWERED_BY[question], int(msg_id))

    @rule(role=ROLES, question=QUESTION, trick=st.sampled_from(("none", "twice", "late", "other")))
    def converse(self, role: Role, question: str, trick: str) -> None:
        """Let an end ask and be answered, with a trick: alone, chance would pair few of them."""
        other = OTHER[role]
        asked = self.said(role, question, 0)
        if asked is None:
            return
        msg_id = self.ever[role][-1]
        self.receive(other, asked)
        answer = self.said(other, ANSWERED_BY[question], int(msg_id))
        if trick == "late":
            self.forget(role, msg_id)
        elif trick == "other":
            for type_ in QUESTIONS:
                if type_ != ANSWERED_BY[question]:
                    self.receive(role, frame_text(type_, 9, answers=int(msg_id)))
        for _ in range(0 if answer is None else 2 if trick == "twice" else 1):
            self.receive(role, str(answer))

    @rule(role=ROLES, at=PICK, type_=ANSWERS)
    def forge(self, role: Role, at: int, type_: str) -> None:
        """Let an answer arrive that no end gave, to something that was asked at some time."""
        if self.ever[role]:
            self.receive(role, frame_text(type_, 9, answers=int(self.ever[role][at % len(self.ever[role])])))

    @rule(role=ROLES, at=PICK, keep=st.booleans())
    def deliver(self, role: Role, at: int, *, keep: bool) -> None:
        """Let something of what is on the wire arrive: out of order, and perhaps not for the last time."""
        waiting = self.wire[role]
        if waiting:
            text = waiting[at % len(waiting)] if keep else waiting.pop(at % len(waiting))
            self.receive(role, text)

    @rule(role=ROLES, at=PICK)
    def lose(self, role: Role, at: int) -> None:
        """Drop something."""
        if self.wire[role]:
            self.wire[role].pop(at % len(self.wire[role]))

    @rule(role=ROLES, type_=TYPES, answers=st.integers(0, 12), number=st.integers(0, 12))
    def invent(self, role: Role, type_: str, answers: int, number: int) -> None:
        """Let a frame arrive that no end sent."""
        self.receive(role, frame_text(type_, number, answers=answers))

    @rule(role=ROLES, junk=st.text(max_size=40) | st.binary(max_size=40) | st.just("[" * 40))
    def disturb(self, role: Role, junk: str | bytes) -> None:
        """Let anything arrive."""
        self.receive(role, junk)

    @rule(role=ROLES, at=PICK, position=st.integers(0, 400), put=st.characters())
    def damage(self, role: Role, at: int, position: int, put: str) -> None:
        """Let something arrive with a character changed."""
        waiting = self.wire[role]
        if waiting:
            text = waiting[at % len(waiting)]
            self.receive(role, text[: position % len(text)] + put + text[position % len(text) + 1 :])

    @rule(role=ROLES, at=PICK)
    def give_up(self, role: Role, at: int) -> None:
        """Let an end stop waiting for something."""
        if self.asked[role]:
            self.forget(role, sorted(self.asked[role])[at % len(self.asked[role])])

    @precondition(lambda machine: machine.numbers > 12)
    @rule(role=ROLES)
    def close(self, role: Role) -> None:
        """Let the connection end."""
        self.ends[role].close()
        self.moved(role, SessionState.CLOSED)

    def forget(self, role: Role, msg_id: str) -> None:
        self.ends[role].forget(msg_id)
        self.asked[role].pop(msg_id, None)

    def said(self, role: Role, type_: str, answers: int) -> str | None:
        """Let an end say something, and return it instead of leaving it on the wire."""
        waiting = self.wire[OTHER[role]]
        before = len(waiting)
        self.send(role, type_, answers)
        return waiting.pop() if len(waiting) > before else None

    def receive(self, role: Role, text: str | bytes) -> None:
        end, before = self.ends[role], self.ends[role].state
        dropped = sum(end.dropped.values())
        try:
            frame = end.receive(text)
        except ProtocolError:
            assert end.state is before
            return
        if frame is None:
            assert before is SessionState.OPEN
            assert sum(end.dropped.values()) == dropped + 1
            self.moved(role, before)
            return
        expected: Any = SENDS[OTHER[role]].get(before, {}).get(frame.type)
        self.moved(role, SessionState.CLOSED if frame.type == "bye" else expected)
        if frame.type in ANSWERED_BY:
            self.heard[role].append((frame.type, frame.msg_id))
        question = QUESTIONS.get(frame.type)
        if question is not None:
            # It was asked, by this very end, and had not been answered yet.
            assert frame.in_reply_to is not None
            assert self.asked[role].pop(frame.in_reply_to) == question
            assert frame.in_reply_to not in self.answered[role]
            self.answered[role].append(frame.in_reply_to)

    def moved(self, role: Role, to: SessionState) -> None:
        assert self.ends[role].state is to
        assert ORDER.index(to) >= ORDER.index(self.seen[role])
        self.seen[role] = to

    @invariant()
    def states_move_only_with_what_was_said(self) -> None:
        """Nothing moved but where a rule saw it."""
        assert {role: end.state for role, end in self.ends.items()} == self.seen

    @invariant()
    def who_has_closed_says_nothing(self) -> None:
        """No frame of any type leaves a closed end."""
        for end in self.ends.values():
            if end.state is SessionState.CLOSED:
                for type_ in FRAME_TYPES:
                    try:
                        end.send(type_, message_id(0), PAYLOADS[type_], message_id(0))
                    except ProtocolError:
                        continue
                    raise AssertionError(type_)


TestTwoEnds = TwoEnds.TestCase
TestTwoEnds.settings = settings(examples(60, 300), stateful_step_count=40)
