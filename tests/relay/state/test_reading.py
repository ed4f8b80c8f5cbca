"""When a reading of the stream is whole, and when it has to be done again."""

from hashlib import sha256
from pathlib import Path

import pytest

from relay.state.join_tokens import JoinTokens
from relay.state.ledger import Entry
from relay.state.sharer import Arrived, Compared, LostReaderError, Reading, StreamEntry
from relay.state.tokens import RevokedTokens
from schemas.pacing import Backoff
from schemas.process.logs import make_logger
from schemas.times import SystemMs
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.shared import shared
from tests.fakes.signer import NODE_ID, NOW_MS

HOUR_MS = 3_600_000
TOKEN = sha256(b"id").hexdigest()


class CountedClock(FakeClock):
    """A clock that counts how often it is read."""

    reads = 0

    def __call__(self) -> SystemMs:
        self.reads += 1
        return SystemMs(self.now_ms)


@pytest.fixture
def clock() -> CountedClock:
    return CountedClock(NOW_MS - NOW_MS % HOUR_MS)


@pytest.fixture
def reading(tmp_path: Path, clock: CountedClock) -> Reading:
    ledgers = [
        shared("token_revocation", RevokedTokens(tmp_path / "revoked_tokens.jsonl").ledger),
        shared("join_token_use", JoinTokens(tmp_path / "join.jsonl", clock, bytes).ledger, clock),
    ]
    return Reading(
        {ledger.kind: Compared(ledger, Backoff(1.0, 10.0)) for ledger in ledgers},
        now_ms=clock,
        is_reported=False,
        wake=lambda: None,
        count=lambda _kind, _outcome: None,
        log=make_logger("relay", LogLines()),
    )


def entry(following: int) -> Arrived:
    """Return one after which ``following`` others are to come."""
    return arrived("token_revocation", "a", {"jti": "jti", "revoked_ms": 1}, following)


def use(number: int, expires_at_ms: int) -> Arrived:
    """Return the use of that number, of a token that expires then."""
    used = {"token": TOKEN, "use": number, "node_id": NODE_ID, "expires_at_ms": expires_at_ms}
    return arrived("join_token_use", f"{TOKEN}-{number}", used, 0)


def arrived(kind: str, key: str, entry: Entry, following: int) -> Arrived:
    return Arrived(lambda: StreamEntry(kind, key, entry, 7), 7, kind, following)


def test_it_is_whole_once_the_last_entry_has_arrived(reading: Reading) -> None:
    reading.arrive(entry(1))
    assert not reading.caught_up.is_set()
    reading.arrive(entry(0))
    assert reading.caught_up.is_set()
    assert reading.lasting() == 1


def test_it_is_whole_too_once_what_was_pending_was_removed(reading: Reading) -> None:
    reading.arrive(entry(1))
    reading.check_arrival(None, 0, is_new=False)
    assert not reading.caught_up.is_set()
    reading.check_arrival(1, 0, is_new=False)
    assert reading.caught_up.is_set()


def test_what_is_pending_and_does_not_arrive_has_all_read_again(reading: Reading) -> None:
    reading.arrive(entry(1))
    with pytest.raises(LostReaderError):
        reading.check_arrival(1, 1, is_new=False)
    assert not reading.caught_up.is_set()


def test_what_another_relay_has_appended_first_and_does_not_arrive_has_all_read_again(
    reading: Reading,
) -> None:
    reading.arrive(entry(0))
    reading.refused_at = reading.messages
    with pytest.raises(LostReaderError):
        reading.check_arrival(1, 0, is_new=False)


def test_of_an_empty_stream_it_is_whole_at_once(reading: Reading) -> None:
    reading.check_arrival(None, 0, is_new=True)
    assert reading.caught_up.is_set()


def test_what_has_ended_is_not_expected_of_the_servers_any_more(
    reading: Reading, clock: CountedClock
) -> None:
    begun_ms = clock.now_ms
    reading.arrive(entry(0))
    reading.arrive(use(1, begun_ms + HOUR_MS))
    reading.arrive(use(2, begun_ms + 2 * HOUR_MS + 1))
    assert reading.lasting() == 3
    reading.arrive(use(1, begun_ms + 2 * HOUR_MS))  # with another end, which counts from now on
    clock.advance(HOUR_MS)
    assert reading.lasting() == 3
    clock.advance(HOUR_MS)
    # Both end in this hour: neither is expected in it. What never ends is.
    assert reading.lasting() == 1
    clock.advance(-HOUR_MS)
    assert reading.lasting() == 3


def test_what_it_takes_to_count_them_does_not_grow_with_their_number(
    reading: Reading, clock: CountedClock
) -> None:
    for number in range(1, 1001):
        reading.arrive(use(number, clock.now_ms + HOUR_MS + number))
    before = clock.reads
    assert reading.lasting() == 1000
    assert clock.reads == before + 1
