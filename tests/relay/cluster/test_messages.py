"""What relays ask each other, as bytes: what one writes another reads, and nothing else is read."""

import json
from typing import Any

import pytest

from relay.cluster.messages import FRAME, MAX_PEER_BYTES, Asked, ClusterMessageError, PeerMessages
from schemas.errors import Failure, ToolError
from schemas.registry import SchemaRegistry
from tests.fakes.signer import NODE_ID

RELAY, OTHER_RELAY = "01HZX9K3M4P7Q8R9S0T1V2W3XA", "01HZX9K3M4P7Q8R9S0T1V2W3XB"
ASK_ID = "01HZX9K3M4P7Q8R9S0T1V2W3XC"
BODY = {"node_id": NODE_ID, "session_id": ASK_ID, "type": "telemetry", "payload": {"cap_id": "metrics"}}


@pytest.fixture
def messages(registry: SchemaRegistry) -> PeerMessages:
    return PeerMessages(registry, RELAY)


def question(**members: Any) -> bytes:
    return json.dumps({"relay": OTHER_RELAY, "id": ASK_ID, "body": BODY} | members).encode()


def test_a_question_is_read_as_it_was_asked(messages: PeerMessages, registry: SchemaRegistry) -> None:
    asked = messages.ask(ASK_ID, BODY)
    assert PeerMessages(registry, OTHER_RELAY).read_ask(asked, FRAME) == Asked(RELAY, ASK_ID, BODY)


def test_a_body_of_any_form_is_read_where_no_kind_is_asked_for(messages: PeerMessages) -> None:
    assert messages.read_ask(question(body={"any": 1}), None).body == {"any": 1}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"no JSON", id="no JSON"),
        pytest.param(b"[]", id="no object"),
        pytest.param(question().replace(b'"id"', b'"relay": "x", "id"', 1), id="a member twice"),
        pytest.param(question(relay="a relay"), id="no id of a relay"),
        pytest.param(question(id=7), id="no id"),
        pytest.param(question(body=[]), id="no body"),
        pytest.param(question(more=1), id="an unknown member"),
        pytest.param(question(body={**BODY, "node_id": "x"}), id="a body of another form"),
        pytest.param(question(body={**BODY, "payload": {"x": "x" * MAX_PEER_BYTES}}), id="too large"),
    ],
)
def test_what_is_no_question_is_refused_without_its_content(messages: PeerMessages, data: bytes) -> None:
    with pytest.raises(ClusterMessageError) as refused:
        messages.read_ask(data, FRAME)
    assert NODE_ID not in str(refused.value)


def test_an_answer_is_read_as_it_was_given(messages: PeerMessages) -> None:
    assert messages.read_reply(messages.reply({"samples": [1]})) == {"samples": [1]}


@pytest.mark.parametrize("retry_after_ms", [None, 70])
def test_a_failure_is_told_by_its_name_and_its_text_stays(
    messages: PeerMessages, retry_after_ms: int | None
) -> None:
    failed = messages.failure(ToolError(Failure.RATE_LIMITED, "a text", retry_after_ms=retry_after_ms))
    assert b"a text" not in failed
    with pytest.raises(ToolError) as told:
        messages.read_reply(failed)
    assert told.value.failure is Failure.RATE_LIMITED
    assert told.value.retry_after_ms == retry_after_ms


def test_a_failure_of_a_later_version_is_an_internal_one(messages: PeerMessages) -> None:
    with pytest.raises(ToolError) as told:
        messages.read_reply(b'{"failure": {"name": "OF_A_LATER_VERSION"}}')
    assert told.value.failure is Failure.INTERNAL


@pytest.mark.parametrize("data", [b"", b"{}", b'{"reply": 1}', b'{"reply": {}, "failure": {"name": "X"}}'])
def test_what_is_no_answer_is_refused(messages: PeerMessages, data: bytes) -> None:
    with pytest.raises(ClusterMessageError):
        messages.read_reply(data)
