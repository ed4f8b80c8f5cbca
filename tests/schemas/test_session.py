from itertools import product
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.frames import (
    FRAME_TYPES,
    MAX_FRAME_BYTES,
    MAX_FRAME_BYTES_BEFORE_WELCOME,
    FrameReader,
    OneWayType,
    Role,
)
from schemas.registry import SchemaRegistry
from schemas.session import (
    ANSWERED_BY,
    SENDS,
    ByeReason,
    CancelReason,
    CloseCode,
    DropReason,
    OverRateError,
    PeerProtocolError,
    ProtocolError,
    SessionMachine,
    SessionState,
)
from tests.fakes.frames import PAYLOADS, REPLIES, frame_text, message_id
from tests.fakes.seconds import Seconds

CHALLENGE, AUTH, WELCOME = 1, 2, 3

# What each end may send in each state, and where that leads; written out once more, from the design.
MAY_SEND: Final = {
    (Role.RELAY, SessionState.CHALLENGING): {
        "challenge": SessionState.CHALLENGING,
        "bye": SessionState.CLOSED,
    },
    (Role.RELAY, SessionState.AUTHENTICATING): {"welcome": SessionState.OPEN, "bye": SessionState.CLOSED},
    (Role.RELAY, SessionState.OPEN): {
        "announce_ack": SessionState.OPEN,
        "heartbeat_ack": SessionState.OPEN,
        "cmd": SessionState.OPEN,
        "cmd_cancel": SessionState.OPEN,
        "renew_ack": SessionState.OPEN,
        "retire_ack": SessionState.OPEN,
        "telemetry_lease": SessionState.OPEN,
        "session_open": SessionState.OPEN,
        "session_message": SessionState.OPEN,
        "session_end": SessionState.OPEN,
        "caller_tool_result": SessionState.OPEN,
        "bye": SessionState.CLOSED,
    },
    (Role.RELAY, SessionState.CLOSED): {},
    (Role.NODE, SessionState.CHALLENGING): {"auth": SessionState.AUTHENTICATING, "bye": SessionState.CLOSED},
    (Role.NODE, SessionState.AUTHENTICATING): {"bye": SessionState.CLOSED},
    (Role.NODE, SessionState.OPEN): {
        "announce": SessionState.OPEN,
        "heartbeat": SessionState.OPEN,
        "cmd_ack": SessionState.OPEN,
        "renew": SessionState.OPEN,
        "retire": SessionState.OPEN,
        "telemetry": SessionState.OPEN,
        "session_event": SessionState.OPEN,
        "caller_tool": SessionState.OPEN,
        "caller_tool_cancel": SessionState.OPEN,
        "findings": SessionState.OPEN,
        "bye": SessionState.CLOSED,
    },
    (Role.NODE, SessionState.CLOSED): {},
}
OTHER_END: Final = {Role.RELAY: Role.NODE, Role.NODE: Role.RELAY}
EVERYTHING = [
    pytest.param(role, state, type_, id=f"{role.value}-{state.value}-{type_}")
    for role, state, type_ in product(Role, SessionState, FRAME_TYPES)
]


@pytest.fixture(scope="module")
def reader(registry: SchemaRegistry) -> FrameReader:
    return FrameReader(registry)


def send(session: SessionMachine, type_: str, number: int, answers: int | None = None) -> str:
    reply_to = None if answers is None else message_id(answers)
    return session.send(type_, message_id(number), PAYLOADS[type_], reply_to)


def machine(role: Role, reader: FrameReader) -> SessionMachine:
    return SessionMachine(role, reader, Seconds())


def pair(reader: FrameReader) -> tuple[SessionMachine, SessionMachine]:
    """Return both ends of a connection that is open, brought there by their own frames."""
    relay, node = machine(Role.RELAY, reader), machine(Role.NODE, reader)
    node.receive(send(relay, "challenge", CHALLENGE))
    relay.receive(send(node, "auth", AUTH, answers=CHALLENGE))
    node.receive(send(relay, "welcome", WELCOME, answers=AUTH))
    return relay, node


def at(reader: FrameReader, role: Role, state: SessionState) -> SessionMachine:
    """Return one end in ``state``, with the requests of that state sent."""
    relay, node = machine(Role.RELAY, reader), machine(Role.NODE, reader)
    challenge = send(relay, "challenge", CHALLENGE)
    if state is SessionState.AUTHENTICATING:
        node.receive(challenge)
        relay.receive(send(node, "auth", AUTH, answers=CHALLENGE))
    elif state is SessionState.OPEN:
        relay, node = pair(reader)
    session = relay if role is Role.RELAY else node
    if state is SessionState.CLOSED:
        session.close()
    assert session.state is state
    return session


def test_the_table_is_that_of_the_design() -> None:
    for (role, state), moves in MAY_SEND.items():
        without_bye = {type_: to for type_, to in moves.items() if type_ != "bye"}
        assert SENDS[role].get(state, {}) == without_bye


def test_every_type_of_frame_is_sent_by_some_end() -> None:
    assert {type_ for moves in MAY_SEND.values() for type_ in moves} == set(FRAME_TYPES)


def test_every_answer_has_its_question_and_says_so() -> None:
    # cmd_cancel names its cmd, but is not an answer to it.
    assert {*ANSWERED_BY.values(), "cmd_cancel"} == REPLIES


@pytest.mark.parametrize(("role", "state", "type_"), EVERYTHING)
def test_an_end_may_send_what_the_table_says_and_nothing_else(
    reader: FrameReader, role: Role, state: SessionState, type_: str
) -> None:
    session = at(reader, role, state)
    following = MAY_SEND[role, state].get(type_)
    if following is None:
        with pytest.raises(ProtocolError, match=f"{type_} does not belong in state {state.value}"):
            send(session, type_, 50, answers=60)
        assert session.state is state
    else:
        send(session, type_, 50, answers=60)
        assert session.state is following


@pytest.mark.parametrize(("role", "state", "type_"), EVERYTHING)
def test_an_end_may_receive_what_the_other_end_may_send_and_nothing_else(
    reader: FrameReader, role: Role, state: SessionState, type_: str
) -> None:
    session = at(reader, role, state)
    answers = None
    if type_ in REPLIES:
        answers = {"auth": CHALLENGE, "welcome": AUTH}.get(type_, 40)
        question = {answer: asked for asked, answer in ANSWERED_BY.items()}.get(type_)
        if answers == 40 and question in MAY_SEND[role, state]:
            assert question is not None
            send(session, question, answers)
    following = MAY_SEND[OTHER_END[role], state].get(type_)
    text = frame_text(type_, 50, answers=answers)
    if following is None:
        with pytest.raises(ProtocolError) as caught:
            session.receive(text)
        assert caught.value.code is CloseCode.PROTOCOL_VIOLATION
        assert session.state is state
    else:
        frame = session.receive(text)
        assert frame is not None
        assert frame.type == type_
        assert session.state is following
        assert not session.dropped


def test_a_command_goes_there_and_its_answer_comes_back(reader: FrameReader) -> None:
    relay, node = pair(reader)
    cmd = node.receive(send(relay, "cmd", 10))
    assert cmd is not None
    assert cmd.payload == PAYLOADS["cmd"]
    ack = relay.receive(send(node, "cmd_ack", 11, answers=10))
    assert ack is not None
    assert (ack.in_reply_to, ack.payload) == (message_id(10), PAYLOADS["cmd_ack"])


def test_answers_may_come_in_another_order_than_their_questions(reader: FrameReader) -> None:
    relay, node = pair(reader)
    for number in (10, 11, 12):
        node.receive(send(relay, "cmd", number))
    for number in (12, 10, 11):
        assert relay.receive(send(node, "cmd_ack", 20 + number, answers=number)) is not None
    assert not relay.dropped


def test_announcements_and_heartbeats_are_answered(reader: FrameReader) -> None:
    relay, node = pair(reader)
    for number, question in ((10, "announce"), (12, "heartbeat")):
        assert relay.receive(send(node, question, number)) is not None
        assert node.receive(send(relay, ANSWERED_BY[question], number + 1, answers=number)) is not None


# --- answers to nothing -------------------------------------------------------------------------------


def test_a_late_answer_is_dropped_and_counted(reader: FrameReader) -> None:
    relay, node = pair(reader)
    send(relay, "cmd", 10)
    relay.forget(message_id(10))
    assert relay.receive(send(node, "cmd_ack", 11, answers=10)) is None
    assert relay.dropped == {"unasked": 1}
    assert relay.state is SessionState.OPEN


def test_of_too_many_questions_without_an_answer_the_oldest_are_forgotten(reader: FrameReader) -> None:
    relay, node = pair(reader)
    for number in range(5000):
        send(node, "heartbeat", 10 + number)
    assert node.receive(send(relay, "heartbeat_ack", 6000, answers=10)) is None
    assert node.receive(send(relay, "heartbeat_ack", 6001, answers=5009)) is not None


def test_forgetting_what_was_never_asked_does_nothing(reader: FrameReader) -> None:
    relay, _node = pair(reader)
    relay.forget(message_id(99))
    assert relay.state is SessionState.OPEN


def test_an_answer_to_a_question_of_another_type_is_dropped_and_the_question_stays(
    reader: FrameReader,
) -> None:
    relay, node = pair(reader)
    send(node, "heartbeat", 10)
    assert node.receive(send(relay, "announce_ack", 11, answers=10)) is None
    assert node.dropped == {"unasked": 1}
    assert node.receive(send(relay, "heartbeat_ack", 12, answers=10)) is not None


@pytest.mark.parametrize("type_", ["cmd_ack", "announce_ack", "heartbeat_ack"])
def test_an_answer_to_nothing_never_closes_an_open_session(reader: FrameReader, type_: str) -> None:
    relay, node = pair(reader)
    session = relay if type_ == "cmd_ack" else node
    for number in range(3):
        assert session.receive(frame_text(type_, 20 + number, answers=99)) is None
    assert session.dropped == {"unasked": 3}
    assert session.state is SessionState.OPEN


def test_a_malformed_answer_to_a_command_is_dropped_and_the_command_still_waits(reader: FrameReader) -> None:
    relay, node = pair(reader)
    send(relay, "cmd", 10)
    assert relay.receive(frame_text("cmd_ack", 11, answers=10, result="no object")) is None
    assert relay.dropped == {"malformed": 1}
    assert relay.receive(send(node, "cmd_ack", 12, answers=10)) is not None


def test_a_malformed_frame_of_any_other_type_breaks_the_protocol(reader: FrameReader) -> None:
    relay, _ = pair(reader)
    with pytest.raises(ProtocolError, match="does not fit the schema of its type"):
        relay.receive(frame_text("heartbeat", 11, inflight=-1))


@pytest.mark.parametrize(
    ("role", "state"),
    [
        pytest.param(role, state, id=f"{role.value}-{state.value}")
        for role, state in product(Role, SessionState)
        if "cmd_ack" not in MAY_SEND[OTHER_END[role], state]
    ],
)
def test_a_malformed_answer_to_an_end_that_may_not_receive_one_breaks_the_protocol(
    reader: FrameReader, role: Role, state: SessionState
) -> None:
    session = at(reader, role, state)
    with pytest.raises(ProtocolError, match="does not fit the schema of its type") as caught:
        session.receive(frame_text("cmd_ack", 11, answers=10, result="no object"))
    assert caught.value.code is CloseCode.PROTOCOL_VIOLATION
    assert session.state is state
    assert not session.dropped


def test_an_auth_that_answers_another_challenge_breaks_the_protocol(reader: FrameReader) -> None:
    relay = at(reader, Role.RELAY, SessionState.CHALLENGING)
    with pytest.raises(ProtocolError, match="an answer to nothing that was asked"):
        relay.receive(frame_text("auth", AUTH, answers=99))
    assert relay.state is SessionState.CHALLENGING


def test_an_auth_before_any_challenge_breaks_the_protocol(reader: FrameReader) -> None:
    with pytest.raises(ProtocolError, match="an answer to nothing that was asked"):
        machine(Role.RELAY, reader).receive(frame_text("auth", AUTH, answers=CHALLENGE))


def test_a_welcome_to_another_auth_breaks_the_protocol(reader: FrameReader) -> None:
    node = machine(Role.NODE, reader)
    node.receive(frame_text("challenge", CHALLENGE))
    send(node, "auth", AUTH, answers=CHALLENGE)
    with pytest.raises(ProtocolError, match="an answer to nothing that was asked"):
        node.receive(frame_text("welcome", WELCOME, answers=99))
    assert node.state is SessionState.AUTHENTICATING


# --- the end ------------------------------------------------------------------------------------------


def test_the_close_codes_are_those_of_the_design() -> None:
    assert {code.name: int(code) for code in CloseCode} == {
        "NORMAL": 1000,
        "GOING_AWAY": 1001,
        "AUTH_FAILED": 4001,
        "REVOKED": 4003,
        "SUPERSEDED": 4008,
        "PROTOCOL_VIOLATION": 4009,
        "MANIFEST_REJECTED": 4010,
        "OVER_CAPACITY": 4013,
    }


@pytest.mark.parametrize("state", [SessionState.CHALLENGING, SessionState.AUTHENTICATING, SessionState.OPEN])
@pytest.mark.parametrize("role", Role)
def test_a_bye_closes_at_any_time(reader: FrameReader, role: Role, state: SessionState) -> None:
    sender, receiver = at(reader, role, state), at(reader, OTHER_END[role], state)
    frame = receiver.receive(send(sender, "bye", 50))
    assert frame is not None
    assert frame.payload == PAYLOADS["bye"]
    assert sender.state is receiver.state is SessionState.CLOSED


@pytest.mark.parametrize("role", Role)
def test_after_the_end_nothing_is_sent_or_received(reader: FrameReader, role: Role) -> None:
    session = at(reader, role, SessionState.OPEN)
    session.close()
    session.close()
    with pytest.raises(ProtocolError):
        send(session, "bye", 50)
    with pytest.raises(ProtocolError):
        session.receive(frame_text("bye", 51))


# --- sizes --------------------------------------------------------------------------------------------


def padded(text: str, size: int) -> str:
    return text[:-1] + " " * (size - len(text)) + "}"


@pytest.mark.parametrize("state", [SessionState.CHALLENGING, SessionState.AUTHENTICATING])
def test_before_the_welcome_a_frame_has_at_most_8_kib(reader: FrameReader, state: SessionState) -> None:
    bye = frame_text("bye", 50)
    too_large = padded(bye, MAX_FRAME_BYTES_BEFORE_WELCOME + 1)
    with pytest.raises(ProtocolError, match="larger than the limit"):
        at(reader, Role.RELAY, state).receive(too_large)
    fitting = padded(bye, MAX_FRAME_BYTES_BEFORE_WELCOME)
    assert at(reader, Role.RELAY, state).receive(fitting) is not None


def test_after_the_welcome_a_frame_has_at_most_256_kib(reader: FrameReader) -> None:
    heartbeat = frame_text("heartbeat", 50)
    relay = at(reader, Role.RELAY, SessionState.OPEN)
    assert relay.receive(padded(heartbeat, MAX_FRAME_BYTES)) is not None
    with pytest.raises(ProtocolError, match="larger than the limit"):
        relay.receive(padded(heartbeat, MAX_FRAME_BYTES + 1))


def test_a_frame_that_the_other_end_would_refuse_for_its_size_is_not_sent(reader: FrameReader) -> None:
    relay, node = pair(reader)
    payload = {**PAYLOADS["cmd"], "arguments": {"message": "x" * MAX_FRAME_BYTES}}
    with pytest.raises(ProtocolError, match="a frame over the limit"):
        relay.send("cmd", message_id(10), payload)
    assert relay.state is SessionState.OPEN
    # It was never sent, so an answer to it is an answer to nothing.
    assert relay.receive(send(node, "cmd_ack", 11, answers=10)) is None


def test_an_auth_over_8_kib_is_not_sent_and_leaves_the_session_where_it_was(reader: FrameReader) -> None:
    node = machine(Role.NODE, reader)
    node.receive(frame_text("challenge", CHALLENGE))
    payload = {**PAYLOADS["auth"], "certificate": "\n" * 6000}
    with pytest.raises(ProtocolError, match="a frame over the limit"):
        node.send("auth", message_id(AUTH), payload, message_id(CHALLENGE))
    assert node.state is SessionState.CHALLENGING


def test_the_limit_of_an_open_session_can_be_agreed_upon(reader: FrameReader) -> None:
    limit = len(send(pair(reader)[0], "cmd", 10))
    relay = SessionMachine(Role.RELAY, reader, Seconds(), limit)
    send(relay, "challenge", CHALLENGE)
    relay.receive(frame_text("auth", AUTH, answers=CHALLENGE))
    send(relay, "welcome", WELCOME, answers=AUTH)
    assert len(send(relay, "cmd", 10)) == limit
    with pytest.raises(ProtocolError, match="a frame over the limit"):
        relay.send("cmd", message_id(11), {**PAYLOADS["cmd"], "arguments": {"message": "pingpong"}})


# --- anything at all ----------------------------------------------------------------------------------

NUMBERS = st.integers(1, 6)
TEXTS = (
    st.builds(
        frame_text,
        st.sampled_from(FRAME_TYPES),
        NUMBERS,
        answers=st.none() | NUMBERS,
    )
    | st.builds(frame_text, st.sampled_from(FRAME_TYPES), NUMBERS, answers=NUMBERS, ok=st.just("maybe"))
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.just("[" * 100)
    | st.just(" " * (MAX_FRAME_BYTES_BEFORE_WELCOME + 1))
)
STEPS = (
    st.tuples(st.just("receive"), TEXTS)
    | st.tuples(st.just("send"), st.tuples(st.sampled_from(FRAME_TYPES), NUMBERS, NUMBERS))
    | st.tuples(st.just("forget"), NUMBERS.map(message_id))
    | st.tuples(st.just("close"), st.none())
)


@given(role=st.sampled_from(Role), state=st.sampled_from(SessionState), steps=st.lists(STEPS, max_size=12))
def test_nothing_that_is_done_to_a_session_raises_anything_but_a_protocol_error(
    reader: FrameReader, role: Role, state: SessionState, steps: list[tuple[str, object]]
) -> None:
    session = at(reader, role, state)
    closed = state is SessionState.CLOSED
    for step in steps:
        before = session.state
        try:
            match step:
                case "receive", str() | bytes() as text:
                    session.receive(text)
                case "send", (str() as type_, int() as number, int() as answers):
                    send(session, type_, number, answers)
                case "forget", str() as msg_id:
                    session.forget(msg_id)
                case _:
                    session.close()
        except ProtocolError:
            assert session.state is before
        closed = closed or session.state is SessionState.CLOSED
        assert closed is (session.state is SessionState.CLOSED)


@given(st.data())
def test_an_answer_reaches_the_caller_exactly_once_however_often_it_comes(
    reader: FrameReader, data: st.DataObject
) -> None:
    relay, node = pair(reader)
    asked = data.draw(st.sets(st.integers(10, 12)))
    for number in sorted(asked):
        send(relay, "cmd", number)
    arriving = data.draw(st.lists(st.integers(10, 14), max_size=30))
    taken = [
        number for number in arriving if relay.receive(send(node, "cmd_ack", 30, answers=number)) is not None
    ]
    assert len(taken) == len(set(taken))
    assert set(taken) == asked & set(arriving)
    assert relay.dropped.get(DropReason.UNSOLICITED, 0) == len(arriving) - len(taken)


def test_the_reasons_of_a_bye_are_those_of_its_document(registry: SchemaRegistry) -> None:
    reason = registry.document("session.bye@1.0.0")["properties"]["payload"]["properties"]["reason"]
    assert set(ByeReason) == set(reason["enum"])


def test_every_reason_of_a_cancellation_is_one_that_its_document_knows(registry: SchemaRegistry) -> None:
    reason = registry.document("session.cmd_cancel@1.0.0")["properties"]["payload"]["properties"]["reason"]
    assert set(CancelReason) == set(reason["enum"])


def test_only_what_is_received_is_the_fault_of_the_other_end(reader: FrameReader) -> None:
    relay, node = pair(reader)
    with pytest.raises(ProtocolError) as sent:
        send(relay, "auth", 50, answers=60)
    assert not isinstance(sent.value, PeerProtocolError)
    with pytest.raises(PeerProtocolError):
        relay.receive(send(node, "bye", 51).replace("bye", "cmd"))


# --- one-way frames -----------------------------------------------------------------------------------


def sample(size: int = 1) -> str:
    return frame_text("telemetry", 50, sample={"node_id": "n" * size})


def test_a_one_way_frame_over_its_size_is_dropped_and_the_session_goes_on(reader: FrameReader) -> None:
    relay, _ = pair(reader)
    assert relay.receive(sample(OneWayType.TELEMETRY.max_bytes)) is None
    assert relay.dropped == {DropReason.OVERSIZED: 1}
    assert relay.receive(frame_text("heartbeat", 51)) is not None


def test_one_way_frames_over_their_rate_are_dropped_until_time_has_passed(reader: FrameReader) -> None:
    clock = Seconds()
    relay = SessionMachine(Role.RELAY, reader, clock)
    relay.state = SessionState.OPEN
    accepted = [relay.receive(sample()) is not None for _ in range(int(OneWayType.TELEMETRY.burst) + 3)]
    assert accepted == [True] * int(OneWayType.TELEMETRY.burst) + [False] * 3
    assert relay.dropped == {DropReason.OVER_RATE: 3}
    assert relay.receive(frame_text("heartbeat", 51)) is not None
    clock.now += 1 / OneWayType.TELEMETRY.per_s
    assert relay.receive(sample()) is not None


def test_a_malformed_one_way_frame_counts_and_is_dropped(reader: FrameReader) -> None:
    relay, _ = pair(reader)
    assert relay.receive(frame_text("telemetry", 50, cap_id="NOT ONE")) is None
    assert relay.dropped == {DropReason.MALFORMED: 1}


def test_what_is_over_the_rate_is_not_validated(reader: FrameReader) -> None:
    relay, _ = pair(reader)
    for _ in range(int(OneWayType.TELEMETRY.burst)):
        relay.receive(sample())
    assert relay.receive(frame_text("telemetry", 50, cap_id="NOT ONE")) is None
    assert relay.dropped == {DropReason.OVER_RATE: 1}


def test_a_one_way_frame_before_the_welcome_ends_the_session(reader: FrameReader) -> None:
    for text in (sample(), frame_text("telemetry", 50, cap_id="NOT ONE")):
        with pytest.raises(PeerProtocolError):
            at(reader, Role.RELAY, SessionState.AUTHENTICATING).receive(text)


def test_an_end_does_not_send_one_way_frames_beyond_their_limits(reader: FrameReader) -> None:
    _, node = pair(reader)
    with pytest.raises(ProtocolError, match="over the limit"):
        node.send("telemetry", message_id(50), {"sample": "x" * OneWayType.TELEMETRY.max_bytes})
    for _ in range(int(OneWayType.TELEMETRY.burst) // 2):
        send(node, "telemetry", 50)
    with pytest.raises(OverRateError) as caught:
        send(node, "telemetry", 50)
    assert caught.value.wait_s == pytest.approx(1 / OneWayType.TELEMETRY.per_s)
    assert send(node, "heartbeat", 51)
