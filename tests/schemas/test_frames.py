import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.frames import (
    FRAME_TYPES,
    MAX_FRAME_BYTES,
    MAX_FRAME_BYTES_BEFORE_WELCOME,
    ONE_WAY,
    SUBPROTOCOL,
    SUBPROTOCOL_1_1,
    SUBPROTOCOL_1_2,
    Frame,
    FrameBudgets,
    FrameError,
    FrameReader,
    OneWayType,
    Role,
    agreed,
    includes,
    known_announce,
)
from schemas.registry import SchemaRegistry
from tests.fakes.frames import ERROR, PAYLOADS, REPLIES, frame_text, message, message_id
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID


@pytest.fixture(scope="module")
def reader(registry: SchemaRegistry) -> FrameReader:
    return FrameReader(registry)


def read(reader: FrameReader, value: object) -> Frame:
    return reader.read(value if isinstance(value, str | bytes) else json.dumps(value), MAX_FRAME_BYTES)


def test_the_types_are_those_that_the_session_needs() -> None:
    assert sorted(FRAME_TYPES) == sorted(PAYLOADS)


@pytest.mark.parametrize("type_", FRAME_TYPES)
def test_a_frame_is_read_as_it_was_written(reader: FrameReader, type_: str) -> None:
    answers = message_id(7) if type_ in REPLIES else None
    frame = Frame(type_, message_id(1), PAYLOADS[type_], answers)
    text = frame.encode()
    wire = text[text.index('"payload":') + len('"payload":') : -1].encode() if type_ == "announce" else b""
    assert read(reader, text) == read(reader, text.encode()) == frame._replace(wire=wire)


@pytest.mark.parametrize("type_", FRAME_TYPES)
def test_a_frame_travels_as_ascii_without_spaces_and_only_with_what_it_has(type_: str) -> None:
    text = Frame(type_, message_id(1), {"a": ["\u20ac", 1]}).encode()
    assert text == (f'{{"type":"{type_}","msg_id":"{message_id(1)}","payload":{{"a":["\\u20ac",1]}}}}')
    assert '"in_reply_to"' not in text


@pytest.mark.parametrize("type_", sorted(REPLIES))
def test_an_answer_must_say_what_it_answers(reader: FrameReader, type_: str) -> None:
    frame = message(type_)
    del frame["in_reply_to"]
    with pytest.raises(FrameError):
        read(reader, frame)


@pytest.mark.parametrize("type_", sorted(set(FRAME_TYPES) - REPLIES))
def test_what_is_no_answer_must_not_claim_to_be_one(reader: FrameReader, type_: str) -> None:
    with pytest.raises(FrameError):
        read(reader, message(type_, answers=7))


@pytest.mark.parametrize("type_", FRAME_TYPES)
def test_a_stray_member_is_refused_on_every_level(reader: FrameReader, type_: str) -> None:
    with pytest.raises(FrameError, match="does not fit the schema of its type"):
        read(reader, {**message(type_), "token": "x"})
    if type_ != "announce":  # judged by the trust rules, so that a bad manifest is refused with its reason
        with pytest.raises(FrameError, match="does not fit the schema of its type"):
            read(reader, message(type_, stray=1))


@pytest.mark.parametrize(
    ("value", "reason", "type_"),
    [
        pytest.param("", "not JSON", None, id="nothing"),
        pytest.param(b"\xff", "not UTF-8", None, id="not-utf-8"),
        pytest.param('{"type":"bye","type":"cmd"}', "a duplicate key in an object", None, id="two-types"),
        pytest.param("[" * 100, "nested too deeply", None, id="too-deep"),
        pytest.param([message("bye")], "an unknown frame type", None, id="an-array"),
        pytest.param("null", "an unknown frame type", None, id="null"),
        pytest.param({}, "an unknown frame type", None, id="no-type"),
        pytest.param({**message("bye"), "type": "BYE"}, "an unknown frame type", None, id="in-upper-case"),
        pytest.param({**message("bye"), "type": "shell"}, "an unknown frame type", None, id="invented"),
        pytest.param(
            {**message("bye"), "type": ["bye"]}, "an unknown frame type", None, id="a-type-in-a-list"
        ),
        pytest.param({**message("bye"), "type": None}, "an unknown frame type", None, id="the-type-null"),
    ],
)
def test_what_is_no_frame_is_refused_with_a_fixed_reason(
    reader: FrameReader, value: object, reason: str, type_: str | None
) -> None:
    with pytest.raises(FrameError) as caught:
        read(reader, value)
    assert (caught.value.reason, str(caught.value), caught.value.type) == (reason, reason, type_)


BAD_FRAMES: dict[str, dict[str, Any]] = {
    "an-id-in-lower-case": {**message("bye"), "msg_id": message_id(1)[:-1] + "a"},
    "an-id-too-short": {**message("bye"), "msg_id": message_id(1)[:-1]},
    "an-id-and-a-line-feed": {**message("bye"), "msg_id": message_id(1) + "\n"},
    "no-id": {name: value for name, value in message("bye").items() if name != "msg_id"},
    "no-payload": {name: value for name, value in message("bye").items() if name != "payload"},
    "a-payload-that-is-a-list": {**message("announce"), "payload": []},
    "an-answer-to-null": {**message("cmd_ack"), "in_reply_to": None},
    "a-bye-for-an-invented-reason": message("bye", reason="bored"),
    "a-bye-until-after-tomorrow": message("bye", retry_after_ms=86_400_001),
    "a-tool-of-three-tokens": message("cmd", tool=f"sysecho.{NODE_ID}.echo"),
    "a-tool-in-its-dashed-form": message("cmd", tool=f"sysecho-{NODE_ID}-echo-invoke"),
    "a-tool-of-65-characters": message("cmd", tool="a.b.c." + "d" * 59),
    "a-deadline-of-nothing": message("cmd", deadline_ms=0),
    "a-deadline-over-30-seconds": message("cmd", deadline_ms=30_001),
    "arguments-as-a-list": message("cmd", arguments=[]),
    "a-trace-in-upper-case": message("cmd", traceparent=f"00-{'A' * 32}-{'b' * 16}-01"),
    "an-ack-with-result-and-error": message("cmd_ack", error=ERROR),
    "an-ack-that-is-ok-with-an-error": {**message("cmd_ack"), "payload": {"ok": True, "error": ERROR}},
    "an-ack-that-failed-with-a-result": {**message("cmd_ack"), "payload": {"ok": False, "result": {}}},
    "an-ack-that-failed-without-an-error": {**message("cmd_ack"), "payload": {"ok": False}},
    "an-ack-with-an-unknown-code": {
        **message("cmd_ack"),
        "payload": {"ok": False, "error": {**ERROR, "code": "E_TIMEOUT"}},
    },
    "an-ack-with-text-beyond-ascii": {
        **message("cmd_ack"),
        "payload": {"ok": False, "error": {**ERROR, "message": "\u202e"}},
    },
    "an-ack-whose-ok-is-a-number": message("cmd_ack", ok=1),
    "a-result-that-is-a-text": message("cmd_ack", result="pong"),
    "a-nonce-too-short": message("challenge", nonce="n" * 42),
    "an-audience-with-a-space": message("challenge", audience="https://relay.example evil"),
    "a-token-of-two-parts": message("auth", token="aa.bb"),
    "a-node-id-in-upper-case": message("auth", node_id=NODE_ID.upper()),
    "a-certificate-over-6000-characters": message("auth", certificate="x" * 6001),
    "a-frame-limit-under-8-kib": message("welcome", max_frame_bytes=8191),
    "resumed-as-a-number": message("welcome", resumed=0),
    "a-heartbeat-every-millisecond": message("welcome", heartbeat_interval_ms=1),
    "a-hash-in-upper-case": message("heartbeat", manifest_etag="AB" * 32),
    "a-negative-count": message("heartbeat", inflight=-1),
    "a-cancellation-for-an-invented-reason": message("cmd_cancel", reason="bored"),
    "an-announcement-refused-without-an-error": {**message("announce_ack"), "payload": {"ok": False}},
}


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_a_frame_that_does_not_fit_its_type_is_refused_and_named(
    reader: FrameReader, frame: dict[str, Any]
) -> None:
    with pytest.raises(FrameError, match="does not fit the schema of its type") as caught:
        read(reader, frame)
    assert caught.value.type == frame["type"]


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(message("auth", resume=message_id(3)), id="a-node-that-resumes"),
        pytest.param(message("bye", reason="over_capacity", retry_after_ms=5000), id="a-bye-with-a-delay"),
        pytest.param(message("cmd", traceparent=f"00-{'a' * 32}-{'b' * 16}-01"), id="a-traced-command"),
        pytest.param(
            {**message("cmd_ack"), "payload": {"ok": False, "error": ERROR}}, id="an-ack-of-a-failure"
        ),
        pytest.param(
            {
                **message("announce_ack"),
                "payload": {"ok": False, "error": ERROR, "mark_issued_at_ms": 1_760_000_000_000},
            },
            id="a-refusal-with-the-mark",
        ),
    ],
)
def test_what_may_be_left_out_may_be_said(reader: FrameReader, frame: dict[str, Any]) -> None:
    assert read(reader, frame).payload == frame["payload"]


def test_the_limits_are_those_of_the_design() -> None:
    assert MAX_FRAME_BYTES == 262_144
    assert MAX_FRAME_BYTES_BEFORE_WELCOME == 8192


def test_a_frame_of_the_limit_is_read_and_one_byte_more_is_not(reader: FrameReader) -> None:
    text = frame_text("bye")
    assert reader.read(text, len(text)).type == "bye"
    with pytest.raises(FrameError, match="larger than the limit"):
        reader.read(text, len(text) - 1)


@given(data=st.text(max_size=60) | st.binary(max_size=60) | st.sampled_from(FRAME_TYPES).map(frame_text))
def test_reading_gives_a_frame_or_a_frame_error(reader: FrameReader, data: str | bytes) -> None:
    try:
        frame = reader.read(data, MAX_FRAME_BYTES)
    except FrameError:
        return
    assert frame.type in FRAME_TYPES


# --- announces that need no parser ----------------------------------------------------------------------

_ANNOUNCE_ID = "01HZX9K3M4P7Q8R9S0T1V2W3XY"
_WIRE = b'{"a":1}'
_ENCODED = f'{{"type":"announce","msg_id":"{_ANNOUNCE_ID}","payload":{{"a":1}}}}'


def test_an_announce_whose_payload_is_known_is_taken_unparsed() -> None:
    assert Frame("announce", _ANNOUNCE_ID, {}, None, _WIRE).encode() == _ENCODED
    asked: list[bytes] = []

    def is_known(wire: bytes) -> bool:
        asked.append(wire)
        return True

    frame = known_announce(_ENCODED, len(_ENCODED), is_known)
    assert frame == Frame("announce", _ANNOUNCE_ID, None, None, _WIRE)
    assert asked == [_WIRE]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(_ENCODED.encode(), id="bytes"),
        pytest.param(_ENCODED.replace("type", " type"), id="another member"),
        pytest.param(_ENCODED.replace('":"', '": "'), id="spaces"),
        pytest.param(_ENCODED.replace(_ANNOUNCE_ID, _ANNOUNCE_ID.lower()), id="a lower-case id"),
        pytest.param(_ENCODED.replace(_ANNOUNCE_ID, _ANNOUNCE_ID[:-1]), id="a short id"),
        pytest.param(_ENCODED.replace("announce", "heartbeat"), id="another type"),
        pytest.param(_ENCODED[:-1], id="its first bytes"),
        pytest.param(_ENCODED + "\n", id="a line feed at the end"),
        pytest.param(_ENCODED.replace("1}", "\u0661}"), id="a digit that is not ASCII"),
        pytest.param(_ENCODED.replace("{", " {", 1), id="a space before it"),
        pytest.param(_ENCODED.replace("}}", "}}" + " " * 10), id="over the limit"),
    ],
)
def test_an_announce_in_any_other_spelling_is_left_to_the_parser(text: str | bytes) -> None:
    assert known_announce(text, len(_ENCODED) + 1, lambda wire: wire == _WIRE) is None


def test_an_announce_whose_payload_is_not_known_is_left_to_the_parser() -> None:
    assert known_announce(_ENCODED, len(_ENCODED), lambda _: False) is None
    assert known_announce(_ENCODED, len(_ENCODED) - 1, lambda _: True) is None


@pytest.mark.parametrize(
    ("offered", "spoken"),
    [
        ([SUBPROTOCOL, SUBPROTOCOL_1_1, SUBPROTOCOL_1_2, "edge-kubelet.v1.3"], SUBPROTOCOL_1_2),
        ([SUBPROTOCOL, SUBPROTOCOL_1_1], SUBPROTOCOL_1_1),
        ([SUBPROTOCOL], SUBPROTOCOL),
        (["edge-kubelet.v2"], None),
        ([], None),
    ],
)
def test_the_newest_subprotocol_that_both_speak_is_chosen(offered: list[str], spoken: str | None) -> None:
    assert agreed(offered) == spoken


@pytest.mark.parametrize(
    ("spoken", "has_1_1", "has_1_2"),
    [
        (SUBPROTOCOL_1_2, True, True),
        (SUBPROTOCOL_1_1, True, False),
        (SUBPROTOCOL, False, False),
        (None, False, False),
    ],
)
def test_a_subprotocol_has_what_those_before_it_have(
    spoken: str | None, *, has_1_1: bool, has_1_2: bool
) -> None:
    assert includes(spoken, SUBPROTOCOL_1_1) is has_1_1
    assert includes(spoken, SUBPROTOCOL_1_2) is has_1_2


@pytest.mark.parametrize("type_", OneWayType)
def test_a_row_is_a_frame_type_with_limits_within_those_of_a_connection(type_: OneWayType) -> None:
    assert ONE_WAY[type_.value] is type_
    assert type_.value in FRAME_TYPES
    assert 0 < type_.max_bytes <= MAX_FRAME_BYTES
    assert 0 < type_.per_s <= type_.burst


def taken(budgets: FrameBudgets, type_: OneWayType) -> int:
    count = 0
    while budgets.take(type_) == 0:
        count += 1
    return count


@pytest.mark.parametrize("type_", OneWayType)
def test_a_receiver_accepts_a_burst_and_then_the_rate(type_: OneWayType) -> None:
    clock = Seconds()
    receiver = Role.NODE if type_.sender is Role.RELAY else Role.RELAY
    budgets = FrameBudgets(receiver, clock)
    assert taken(budgets, type_) == type_.burst
    wait_s = budgets.take(type_)
    assert wait_s == pytest.approx(1 / type_.per_s)
    clock.now += wait_s
    assert taken(budgets, type_) == 1


@pytest.mark.parametrize("type_", OneWayType)
def test_a_sender_sends_less_at_once_than_the_receiver_accepts(type_: OneWayType) -> None:
    assert taken(FrameBudgets(type_.sender, Seconds()), type_) == max(1, type_.burst // 2)


def test_each_type_has_a_rate_of_its_own() -> None:
    budgets = FrameBudgets(Role.RELAY, Seconds())
    taken(budgets, OneWayType.TELEMETRY)
    assert budgets.take(OneWayType.TELEMETRY_LEASE) == 0
