"""Questions between two relays, over a real nats-server."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from relay.cluster import peers as relay_peers
from relay.routing.peers import NoResponderError
from schemas.errors import Failure, ToolError
from tests.fakes.cluster import Member
from tests.fakes.cluster_server import FLEET
from tests.fakes.polling import BOUND_S, until

pytestmark = pytest.mark.integration

ASK_ID = "01HZX9K3M4P7Q8R9S0T1V2W3XC"


class Waiting:
    """A handler whose questions wait until the test ends them."""

    def __init__(self) -> None:
        self.began = asyncio.Queue[Mapping[str, Any]]()
        self.go_on = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, _relay: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
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
    async def told(relay: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"asked_by": relay, **body}

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
    async def fails(_relay: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
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
    async def large(_relay: str, _body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"some": "x" * (1 << 20)}

    owner.part.peers.answer("large", large)
    relay = await relay_of(owner, asker)
    assert (await failure_of(asker, relay, "large", await large("", {}))).failure is Failure.ARGUMENTS_INVALID
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
