"""Questions between two relays, over a real nats-server."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from relay.cluster import peers as relay_peers
from relay.cluster.messages import FRAME, MAX_PEER_BYTES, ClusterMessageError, PeerMessages
from relay.routing.port import Asker, NoResponderError
from schemas.errors import Failure, ToolError
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Member
from tests.fakes.cluster_server import FLEET
from tests.fakes.polling import BOUND_S, until
from tests.fakes.signer import NODE_ID

pytestmark = pytest.mark.integration

ASK_ID = "01HZX9K3M4P7Q8R9S0T1V2W3XC"


class Waiting:
    """A handler whose questions wait until the test ends them."""

    def __init__(self) -> None:
        self.began = asyncio.Queue[Mapping[str, Any]]()
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, _asker: Asker, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.began.put_nowait(body)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return body


async def relay_of(member: Member, other: Member) -> str:
    """Return the id of ``member`` when ``other`` knows it."""
    await until(lambda: len(other.part.peers.running()) == 1)
    (relay,) = other.part.peers.running()
    assert member.part.peers.relay == relay
    return relay


async def failure_of(member: Member, relay: str, kind: str, body: Mapping[str, Any]) -> ToolError:
    with pytest.raises(ToolError) as told:
        await member.part.peers.ask(relay, kind, body, BOUND_S)
    return told.value


async def test_a_question_is_answered_by_the_handler_of_its_kind(asker: Member, owner: Member) -> None:
    async def told(asker: Asker, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"asked_by": asker.relay, **body}

    owner.part.peers.answer("told", told)
    answer = await asker.part.peers.ask(await relay_of(owner, asker), "told", {"some": 1}, BOUND_S)
    assert answer == {"asked_by": asker.part.peers.relay, "some": 1}


async def test_a_question_that_is_not_needed_is_cancelled_there(asker: Member, owner: Member) -> None:
    waiting = Waiting()
    owner.part.peers.answer("held", waiting)
    question = asyncio.create_task(asker.part.peers.ask(await relay_of(owner, asker), "held", {}, BOUND_S))
    await asyncio.wait_for(waiting.began.get(), BOUND_S)
    question.cancel()
    await asyncio.wait_for(waiting.cancelled.wait(), BOUND_S)


async def test_a_question_whose_time_is_over_fails_and_the_next_is_answered(
    asker: Member, owner: Member
) -> None:
    waiting = Waiting()
    owner.part.peers.answer("held", waiting)
    relay = await relay_of(owner, asker)
    with pytest.raises(TimeoutError):
        await asker.part.peers.ask(relay, "held", {}, 0.05)
    waiting.go_on.set()
    assert await asker.part.peers.ask(relay, "held", {"number": 2}, BOUND_S) == {"number": 2}


async def test_why_a_question_has_failed_is_told_without_a_text(asker: Member, owner: Member) -> None:
    async def fails(_asker: Asker, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if body:
            raise ToolError(Failure.SESSION_UNKNOWN, "a text", retry_after_ms=7)
        raise ValueError("a bug")

    owner.part.peers.answer("broken", fails)
    relay = await relay_of(owner, asker)
    told = await failure_of(asker, relay, "broken", {"some": 1})
    assert (told.failure, told.retry_after_ms) == (Failure.SESSION_UNKNOWN, 7)
    assert "a text" not in str(told)
    assert (await failure_of(asker, relay, "broken", {})).failure is Failure.INTERNAL
    assert (
        "ValueError: a bug" in (await owner.fake.lines.until("question of another relay failed"))["exception"]
    )
    assert (await failure_of(asker, relay, "unknown", {})).failure is Failure.INTERNAL


async def test_what_is_too_large_is_not_sent_and_not_answered(asker: Member, owner: Member) -> None:
    async def large(_asker: Asker, _body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"some": "x" * (1 << 20)}

    owner.part.peers.answer("large", large)
    relay = await relay_of(owner, asker)
    assert (
        await failure_of(asker, relay, "large", await large(Asker("", None), {}))
    ).failure is Failure.ARGUMENTS_INVALID
    assert (await failure_of(asker, relay, "large", {})).failure is Failure.RESULT_INVALID
    await owner.fake.lines.until("answer to another relay too large")


async def test_no_more_questions_are_answered_at_once_than_the_bound(
    asker: Member, owner: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_peers, "MAX_IN_FLIGHT", 1)
    waiting = Waiting()
    owner.part.peers.answer("held", waiting)
    relay = await relay_of(owner, asker)
    first = asyncio.create_task(asker.part.peers.ask(relay, "held", {"number": 1}, BOUND_S))
    await asyncio.wait_for(waiting.began.get(), BOUND_S)
    busy = await failure_of(asker, relay, "held", {})
    assert busy.failure is Failure.RATE_LIMITED
    assert busy.retry_after_ms == 100
    waiting.go_on.set()
    assert await first == {"number": 1}


async def test_what_is_no_question_is_refused_and_logged_without_its_content(
    asker: Member, owner: Member
) -> None:
    relay = await relay_of(owner, asker)
    subject = f"edge.{FLEET}.relay.{relay}.frame"
    answer = await asker.part.connection.request(subject, b'{"secret": 1}', BOUND_S)
    assert b"INTERNAL" in answer
    line = await owner.fake.lines.until("question of another relay dropped")
    assert "secret" not in str(line)


async def test_a_relay_that_does_not_run_answers_nothing(asker: Member) -> None:
    with pytest.raises(NoResponderError):
        await asker.part.peers.ask(ASK_ID, "held", {}, BOUND_S)


async def test_a_relay_that_ends_answers_no_question_any_more(asker: Member, owner: Member) -> None:
    waiting = Waiting()
    owner.part.peers.answer("held", waiting)
    question = asyncio.create_task(asker.part.peers.ask(await relay_of(owner, asker), "held", {}, BOUND_S))
    await asyncio.wait_for(waiting.began.get(), BOUND_S)
    await owner.part.peers.close()
    assert waiting.cancelled.is_set()
    question.cancel()
    with pytest.raises(asyncio.CancelledError):
        await question


# --- what relays ask each other, as bytes: what one writes another reads, and nothing else is read


RELAY, OTHER_RELAY = "01HZX9K3M4P7Q8R9S0T1V2W3XA", "01HZX9K3M4P7Q8R9S0T1V2W3XB"

BODY = {"node_id": NODE_ID, "session_id": ASK_ID, "type": "telemetry", "payload": {"cap_id": "metrics"}}


@pytest.fixture
def messages(registry: SchemaRegistry) -> PeerMessages:
    return PeerMessages(registry, RELAY)


def question(**members: Any) -> bytes:
    return json.dumps({"relay": OTHER_RELAY, "id": ASK_ID, "body": BODY} | members).encode()


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


def test_a_failure_of_a_later_version_is_an_internal_one(messages: PeerMessages) -> None:
    with pytest.raises(ToolError) as told:
        messages.read_reply(b'{"failure": {"name": "OF_A_LATER_VERSION"}}')
    assert told.value.failure is Failure.INTERNAL


@pytest.mark.parametrize("data", [b"", b"{}", b'{"reply": 1}', b'{"reply": {}, "failure": {"name": "X"}}'])
def test_what_is_no_answer_is_refused(messages: PeerMessages, data: bytes) -> None:
    with pytest.raises(ClusterMessageError):
        messages.read_reply(data)
