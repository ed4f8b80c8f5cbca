import asyncio
from contextlib import suppress

import pytest

from relay.calls.idempotency import (
    QUOTA_OF_ALL,
    QUOTA_OF_CALLER,
    QUOTA_OF_TENANT,
    REMEMBERED_S,
    CallKey,
    IdempotencyStore,
    KeyedCall,
    Quota,
)
from relay.settings.config import PER_AGENT
from schemas.errors import Failure, ToolError
from tests.fakes.seconds import Seconds

WHO = ("https://relay.example", "acme", "agent-1")
TOOL = "sysecho.01hzx9k3m4p7q8r9s0t1v2w3xy.echo.invoke"
ARGUMENTS, OTHER_ARGUMENTS = "a" * 64, "b" * 64


def place(key: str = "k", who: tuple[str, str, str] = WHO, tool: str = TOOL) -> CallKey:
    return who, tool, key


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def store(seconds: Seconds) -> IdempotencyStore[str]:
    return IdempotencyStore(seconds, of_all=Quota(3, 100))


def refused(store: IdempotencyStore[str], key: CallKey, arguments: str = ARGUMENTS) -> ToolError:
    with pytest.raises(ToolError) as caught:
        store.open(key, arguments, "late")
    return caught.value


def test_a_key_is_as_new_as_can_be_when_it_is_first_used(store: IdempotencyStore[str]) -> None:
    keyed = store.open(place(), ARGUMENTS, "first")
    assert (keyed.first, keyed.attempts, keyed.running) == ("first", 0, None)
    assert (keyed.outcome, keyed.unknown) == (None, False)
    assert len(store) == 1


def test_a_key_that_is_used_again_is_the_same_and_keeps_its_first_call(store: IdempotencyStore[str]) -> None:
    keyed = store.open(place(), ARGUMENTS, "first")
    assert store.open(place(), ARGUMENTS, "second") is keyed
    assert keyed.first == "first"
    assert len(store) == 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(place("l"), id="another key"),
        pytest.param(place(who=("https://relay.example", "globex", "agent-1")), id="another tenant"),
        pytest.param(place(who=("https://relay.example", "acme", "agent-2")), id="another principal"),
        pytest.param(place(who=("https://other.example", "acme", "agent-1")), id="another issuer's"),
        pytest.param(place(tool=TOOL.replace("echo.", "echo2.")), id="another tool"),
    ],
)
def test_a_key_counts_for_one_caller_and_one_tool(store: IdempotencyStore[str], other: CallKey) -> None:
    keyed = store.open(place(), ARGUMENTS, "first")
    assert store.open(other, OTHER_ARGUMENTS, "theirs") is not keyed
    assert len(store) == 2


def test_a_key_stands_for_the_arguments_of_its_first_call_alone(store: IdempotencyStore[str]) -> None:
    keyed = store.open(place(), ARGUMENTS, "first")
    error = refused(store, place(), OTHER_ARGUMENTS)
    assert error.failure is Failure.ENVELOPE_INVALID
    assert error.detail == "The idempotency key was used for other arguments of this tool."
    assert store.open(place(), ARGUMENTS, "second") is keyed


def test_a_key_counts_for_ten_minutes_from_its_first_use(
    store: IdempotencyStore[str], seconds: Seconds
) -> None:
    assert REMEMBERED_S == 600
    keyed = store.open(place(), ARGUMENTS, "first")
    seconds.now += REMEMBERED_S / 2
    assert store.open(place(), ARGUMENTS, "second") is keyed
    seconds.now += REMEMBERED_S / 2 - 0.001
    assert store.open(place(), ARGUMENTS, "third") is keyed
    seconds.now += 0.001
    fresh = store.open(place(), OTHER_ARGUMENTS, "fourth")
    assert fresh is not keyed
    assert fresh.first == "fourth"
    assert len(store) == 1


def test_what_is_forgotten_is_as_if_it_had_never_been(store: IdempotencyStore[str]) -> None:
    keyed = store.open(place(), ARGUMENTS, "first")
    store.forget(place())
    store.forget(place())
    assert len(store) == 0
    assert store.open(place(), OTHER_ARGUMENTS, "second") is not keyed


# --- attempts --------------------------------------------------------------------------------------------


async def hanging() -> str:
    await asyncio.Event().wait()
    return "never"


async def attempt(store: IdempotencyStore[str]) -> KeyedCall[str]:
    """Make an attempt that has ended, of which it is not known yet how."""
    keyed = store.open(place(), ARGUMENTS, "first")

    async def sent() -> str:
        return "ok"

    task = asyncio.create_task(sent())
    keyed.begin(task)
    assert keyed.running is task
    assert not keyed.may_be_sent(repeatable=True)
    await task
    assert store.open(place(), ARGUMENTS, "again").running is None
    return keyed


FATES = [
    pytest.param(None, "answer", "answer", id="a result"),
    pytest.param(Failure.INTERNAL, "answer", "answer", id="an error that the node answered with"),
    pytest.param(Failure.INTERNAL, None, "unknown", id="an error on the way"),
    pytest.param(Failure.DEADLINE_EXCEEDED, None, "unknown", id="no answer in time"),
    pytest.param(Failure.DEADLINE_EXCEEDED, "answer", "unknown", id="the node gave up"),
    pytest.param(Failure.NODE_OFFLINE, None, "forgotten", id="never sent"),
    pytest.param(Failure.RATE_LIMITED, "answer", "forgotten", id="refused by the node"),
]


@pytest.mark.parametrize(("failure", "answer", "fate"), FATES)
async def test_how_an_attempt_ends_decides_what_becomes_of_its_key(
    store: IdempotencyStore[str], failure: Failure | None, answer: str | None, fate: str
) -> None:
    keyed = await attempt(store)
    store.ended(place(), failure, answer, 6)
    assert len(store) == (0 if fate == "forgotten" else 1)
    assert keyed.outcome == ("answer" if fate == "answer" else None)
    if fate != "forgotten":
        assert keyed.may_be_sent(repeatable=True) is (fate == "unknown")
        assert not keyed.may_be_sent(repeatable=False)


@pytest.mark.parametrize(("failure", "answer", "fate"), FATES)
async def test_a_key_under_which_an_earlier_attempt_may_have_run_is_not_forgotten(
    store: IdempotencyStore[str], failure: Failure | None, answer: str | None, fate: str
) -> None:
    await attempt(store)
    store.ended(place(), Failure.DEADLINE_EXCEEDED, None)
    keyed = await attempt(store)
    assert keyed.attempts == 2
    store.ended(place(), failure, answer, 6)
    assert store.open(place(), ARGUMENTS, "again") is keyed
    assert keyed.may_be_sent(repeatable=True) is (fate != "answer")
    assert not keyed.may_be_sent(repeatable=False)


async def test_an_attempt_of_which_nothing_is_known_may_have_run(store: IdempotencyStore[str]) -> None:
    keyed = await attempt(store)
    assert not keyed.may_be_sent(repeatable=False)
    assert keyed.may_be_sent(repeatable=True)


async def test_an_attempt_that_ends_before_its_first_step_is_no_longer_running(
    store: IdempotencyStore[str],
) -> None:
    keyed = store.open(place(), ARGUMENTS, "first")
    keyed.begin(task := asyncio.create_task(hanging()))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert keyed.running is None


# --- full -----------------------------------------------------------------------------------------------


def filled(store: IdempotencyStore[str], seconds: Seconds) -> None:
    """Fill the store with three keys, ten seconds apart."""
    for number in range(3):
        store.open(place(f"key {number}"), ARGUMENTS, f"call {number}")
        seconds.now += 10


def test_there_is_room_for_ten_thousand_keys_and_no_more(seconds: Seconds) -> None:
    store = IdempotencyStore[str](seconds)
    for number in range(QUOTA_OF_ALL.keys):
        tenant, agent = f"tenant-{number // QUOTA_OF_TENANT.keys}", f"agent-{number // QUOTA_OF_CALLER.keys}"
        store.open(place(str(number), ("iss", tenant, agent)), ARGUMENTS, "first")
    assert QUOTA_OF_ALL.keys == len(store) == 10_000
    assert refused(store, place("one more")).failure is Failure.RATE_LIMITED
    assert len(store) == QUOTA_OF_ALL.keys


def test_one_caller_cannot_take_the_room_of_all(seconds: Seconds) -> None:
    store = IdempotencyStore[str](seconds, of_caller=Quota(2, 100))
    store.open(place("first"), ARGUMENTS, "first")
    seconds.now += 10
    store.open(place("second"), ARGUMENTS, "second")
    error = refused(store, place("third"))
    assert (error.failure, error.retry_after_ms) == (Failure.RATE_LIMITED, 590_000)
    store.open(place("third", ("iss", "acme", "another")), ARGUMENTS, "third")
    store.forget(place("first"))
    store.open(place("third"), ARGUMENTS, "third")


def test_answers_are_remembered_up_to_so_many_bytes(seconds: Seconds) -> None:
    store = IdempotencyStore[str](seconds, of_tenant=Quota(10, 10))
    store.open(place("large"), ARGUMENTS, "first")
    store.ended(place("large"), None, "x" * 10, 10)
    assert refused(store, place("new")).failure is Failure.RATE_LIMITED
    assert store.open(place("large"), ARGUMENTS, "again").outcome == "x" * 10
    seconds.now += REMEMBERED_S
    store.open(place("new"), ARGUMENTS, "second")


def test_when_it_is_full_a_new_key_is_told_when_the_oldest_ends(
    store: IdempotencyStore[str], seconds: Seconds
) -> None:
    filled(store, seconds)
    error = refused(store, place("new"))
    assert (error.failure, error.retry_after_ms) == (Failure.RATE_LIMITED, 570_000)
    assert error.detail == "Too many idempotency keys are in use."


def test_when_it_is_full_no_live_key_is_lost(store: IdempotencyStore[str], seconds: Seconds) -> None:
    filled(store, seconds)
    for number in range(20):
        refused(store, place(f"new {number}"))
    for number in range(3):
        assert store.open(place(f"key {number}"), ARGUMENTS, "again").first == f"call {number}"


def test_a_retry_after_the_returned_time_is_accepted(store: IdempotencyStore[str], seconds: Seconds) -> None:
    filled(store, seconds)
    wait_ms = refused(store, place("new")).retry_after_ms
    assert wait_ms is not None
    seconds.now += wait_ms / 1000
    assert store.open(place("new"), ARGUMENTS, "new").first == "new"
    assert refused(store, place("newer")).retry_after_ms == 10_000
    assert len(store) == 3


def test_a_key_that_is_used_anew_after_its_time_ends_after_the_others(
    store: IdempotencyStore[str], seconds: Seconds
) -> None:
    filled(store, seconds)
    seconds.now += REMEMBERED_S - 30
    store.open(place("key 0"), ARGUMENTS, "anew")
    assert refused(store, place("new")).retry_after_ms == 10_000
    seconds.now += 10
    store.open(place("new"), ARGUMENTS, "new")
    assert store.open(place("key 0"), ARGUMENTS, "again").first == "anew"


def test_all_that_has_expired_is_evicted_at_once(store: IdempotencyStore[str], seconds: Seconds) -> None:
    filled(store, seconds)
    seconds.now += REMEMBERED_S
    store.open(place("new"), ARGUMENTS, "new")
    assert len(store) == 1


async def test_a_call_under_way_is_neither_forgotten_nor_begun_anew_when_its_time_is_over(
    store: IdempotencyStore[str], seconds: Seconds
) -> None:
    filled(store, seconds)
    keyed = store.open(place("key 0"), ARGUMENTS, "again")
    keyed.begin(task := asyncio.create_task(hanging()))
    seconds.now += 2 * REMEMBERED_S
    assert store.open(place("key 0"), ARGUMENTS, "late") is keyed
    error = refused(store, place("new"))
    assert (error.failure, error.retry_after_ms) == (Failure.RATE_LIMITED, 1)
    assert store.open(place("key 0"), ARGUMENTS, "later") is keyed
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert store.open(place("key 0"), ARGUMENTS, "last").first == "last"


# --- full, and some calls may run twice -----------------------------------------------------------------


async def ended(store: IdempotencyStore[str], key: CallKey, answer: str = "ok") -> None:
    """Make a call that may run twice, and let it end."""

    async def sent() -> str:
        store.ended(key, None, answer, len(answer))
        return answer

    keyed = store.open(key, ARGUMENTS, "first", repeatable=True)
    keyed.begin(task := asyncio.create_task(sent()))
    await task


async def test_the_oldest_ended_key_of_a_call_that_may_run_twice_goes_first(
    store: IdempotencyStore[str],
) -> None:
    store.open(place("lasting"), ARGUMENTS, "lasting")
    for key in ("older", "newer"):
        await ended(store, place(key))
    store.open(place("new"), ARGUMENTS, "new")
    assert len(store) == 3
    assert store.open(place("lasting"), ARGUMENTS, "again").first == "lasting"
    assert store.open(place("newer"), ARGUMENTS, "again").outcome == "ok"
    assert store.open(place("older"), OTHER_ARGUMENTS, "again", repeatable=True).outcome is None


async def test_twenty_thousand_calls_that_may_run_twice_are_not_refused(seconds: Seconds) -> None:
    store = IdempotencyStore[str](seconds)
    store.open(place("lasting"), ARGUMENTS, "lasting")
    for number in range(20_000):
        await ended(store, place(str(number)), "x" * 20_000)
        seconds.now += 1 / PER_AGENT.rate
    assert store.open(place("lasting"), ARGUMENTS, "again").first == "lasting"
    assert store.open(place("19999"), ARGUMENTS, "again").outcome is not None


async def test_neither_a_running_call_nor_one_that_may_not_run_twice_goes(
    store: IdempotencyStore[str],
) -> None:
    tasks = [asyncio.create_task(hanging()) for _ in range(2)]
    for number, task in enumerate(tasks):
        store.open(place(str(number)), ARGUMENTS, str(number), repeatable=True).begin(task)
    store.open(place("lasting"), ARGUMENTS, "lasting")
    assert refused(store, place("new")).failure is Failure.RATE_LIMITED
    for number in range(10):
        await ended(store, place(f"repeatable {number}"))  # over the quota while it runs
        assert len(store) == 4
    for first in ("0", "1", "lasting"):
        assert store.open(place(first), ARGUMENTS, "again").first == first
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    store.open(place("new"), ARGUMENTS, "new")
    assert len(store) == 3


async def test_a_caller_that_uses_up_its_quota_takes_no_key_of_another(seconds: Seconds) -> None:
    store = IdempotencyStore[str](seconds, of_all=Quota(4, 1000), of_caller=Quota(2, 100))
    other = place("theirs", ("iss", "acme", "other"))
    await ended(store, other)
    for number in range(10):
        await ended(store, place(str(number)))
    assert len(store) == 3
    assert store.open(other, ARGUMENTS, "again").outcome == "ok"


async def test_large_answers_of_calls_that_may_run_twice_make_room(seconds: Seconds) -> None:
    store = IdempotencyStore[str](seconds, of_caller=Quota(10, 100))
    for number in range(20):
        await ended(store, place(str(number)), "x" * 60)
    assert len(store) == 2
