"""Attacker: an admitted node. Tried: announces of which a parser reads another manifest than is cut out.

What must happen: what is cut out is, byte for byte, the text of the one payload that the parser sees; or the
frame is refused. A payload in another spelling than the signed one is rejected, and its frame answered.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.canonical import jcs
from schemas.frames import MAX_FRAME_BYTES, FrameError, FrameReader
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads
from tests.fakes.frames import message_id
from tests.fakes.refusals import manifest_in_force
from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import NOW_MS, SimulatedNode

READER = FrameReader(SchemaRegistry())
TYPE, ID = '"type":"announce"', f'"msg_id":"{message_id(1)}"'
GOOD, OTHER = '{"a":"good"}', '{"a":"other"}'

REFUSED = {
    "a payload before": f'{{{TYPE},{ID},"payload":{OTHER},"payload":{GOOD}}}',
    "a payload behind": f'{{"payload":{GOOD},{TYPE},{ID},"payload":{OTHER}}}',
    "a payload of another spelling before": f'{{"p\\u0061yload":{OTHER},{TYPE},{ID},"payload":{GOOD}}}',
    "an escape in the payload's name": f'{{{TYPE},{ID},"p\\u0061yload":{GOOD}}}',
    "an escape in the type": f'{{"type":"\\u0061nnounce",{ID},"payload":{GOOD}}}',
    "an escape in the type's name": f'{{"typ\\u0065":"announce",{ID},"payload":{GOOD}}}',
    "another member behind": f'{{{TYPE},{ID},"payload":{GOOD},"x":{OTHER}}}',
    "another member between": f'{{{TYPE},"x":{{"payload":{OTHER}}},{ID},"payload":{GOOD}}}',
    "two types": f'{{{TYPE},{TYPE},"payload":{GOOD}}}',
    "two ids": f'{{{TYPE},{ID},{ID},"payload":{GOOD}}}',
    "two ids around the payload": f'{{{TYPE},{ID},"payload":{GOOD},{ID}}}',
    "no id": f'{{{TYPE},"payload":{GOOD}}}',
    "a brace too many": f'{{{TYPE},{ID},"payload":{GOOD}}}}}',
    "a brace too few": f'{{{TYPE},{ID},"payload":{GOOD}',
    "another frame behind": f'{{{TYPE},{ID},"payload":{GOOD}}}{{{TYPE},{ID},"payload":{OTHER}}}',
    "a member twice in the payload": f'{{{TYPE},{ID},"payload":{{"a":1,"a":2}}}}',
    "a payload too deep": f'{{{TYPE},{ID},"payload":{{"a":{"[" * 31}{"]" * 31}}}}}',
    "a list": f'{{{TYPE},{ID},"payload":[{GOOD}]}}',
    "a string": f'{{{TYPE},{ID},"payload":"{{}}"}}',
    "a blank that JSON does not know": f'{{{TYPE},{ID},\u00a0"payload":{GOOD}}}',
    "a byte order mark": f'\ufeff{{{TYPE},{ID},"payload":{GOOD}}}',
}

TEXTS = st.sampled_from(["", "}", '"', "\\", ',"payload":{}', "é"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from('ab}"'), inner, max_size=3),
    max_leaves=8,
)
PAYLOADS = st.dictionaries(st.sampled_from(["a", "b", "payload", "type", "msg_id", "}"]), VALUES, max_size=4)
SPACES = st.text(" \t\r\n", max_size=3)


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_a_frame_that_can_be_cut_in_two_ways_is_refused(text: str) -> None:
    for data in (text, text.encode()):
        with pytest.raises(FrameError):
            READER.read(data, MAX_FRAME_BYTES)


@given(PAYLOADS, st.permutations([0, 1, 2]), st.lists(SPACES, min_size=14, max_size=14))
def test_the_cut_is_the_payload_however_the_frame_is_spelled(
    payload: dict[str, Any], order: list[int], spaces: list[str]
) -> None:
    space = iter(spaces)
    signed = jcs(payload).decode()
    pairs = [('"type"', '"announce"'), ('"msg_id"', f'"{message_id(1)}"'), ('"payload"', signed)]
    spelled = [[next(space) + part + next(space) for part in pairs[number]] for number in order]
    members = map(":".join, spelled)
    text = f"{next(space)}{{{','.join(members)}}}{next(space)}"
    for data in (text, text.encode()):
        frame = READER.read(data, MAX_FRAME_BYTES)
        assert (frame.wire, frame.payload, frame.msg_id) == (jcs(payload), payload, message_id(1))


@given(
    st.sampled_from([*REFUSED.values(), f'{{{TYPE},{ID},"payload":{GOOD}}}']),
    st.integers(0, 200),
    st.integers(0, 12),
    st.sampled_from(["", "}", "{", '"', ",", ":", "\\", " ", TYPE, ID, f'"payload":{OTHER}', '"x":1']),
)
def test_of_any_text_the_cut_is_what_a_parser_sees(text: str, start: int, length: int, other: str) -> None:
    changed = text[:start] + other + text[start + length :]
    try:
        frame = READER.read(changed, MAX_FRAME_BYTES)
    except FrameError:
        return
    if frame.type == "announce":
        members = loads(changed, max_bytes=MAX_FRAME_BYTES)
        assert set(members) == {"type", "msg_id", "payload"}
        assert loads(frame.wire, max_bytes=MAX_FRAME_BYTES) == members["payload"] == frame.payload


def test_a_cut_that_is_searched_for_in_many_braces_takes_linear_work() -> None:
    # With a backtracking that is quadratic this would take minutes, and the test's timeout would end it.
    text = f'{{{TYPE},{ID},"payload":{{"a":"{"} ,{" * 60_000}"}},"x":1}}'
    with pytest.raises(FrameError):
        READER.read(text, MAX_FRAME_BYTES)
    with pytest.raises(StrictJsonError):
        loads(text[:-1], max_bytes=MAX_FRAME_BYTES)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_manifest_that_is_spelled_otherwise_than_signed_is_rejected(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    signed = node.manifest(issued_at_ms=NOW_MS + 1)
    spaced = json.dumps(json.loads(signed))
    async with relay.session(node) as end:
        before = manifest_in_force(relay.hub, node)
        await end.send("announce", spaced.encode())
        refused = (await end.receive("announce_ack")).payload
        assert (refused["ok"], refused["error"]["code"]) == (False, "E_MANIFEST_INVALID")
        assert manifest_in_force(relay.hub, node) == before
        await end.send("announce", signed)
        assert (await end.receive("announce_ack")).payload["ok"] is True
        assert manifest_in_force(relay.hub, node) == signed
