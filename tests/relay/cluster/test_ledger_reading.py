"""When a reading of the stream is whole, and when it has to be done again."""

import json
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from nats.aio.msg import Msg

from relay.auth.revoked_tokens import RevokedTokens
from relay.auth.shared_revocations import SharedTokenRevocations
from relay.cluster.ledger_reading import LedgerReading, LostReaderError, Shared
from relay.cluster.ledger_stream import LedgerStream
from relay.cluster.retry_backoff import RetryBackoff
from relay.pki.join_tokens import JoinTokens
from relay.pki.shared_join_token_uses import SharedJoinTokenUses
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.signer import NODE_ID, NOW_MS

if TYPE_CHECKING:
    from nats.aio.client import Client

    from relay.shared_ledger import SharedLedger


HOUR_MS = 3_600_000
TOKEN = sha256(b"id").hexdigest()


class CountedClock(FakeClock):
    """A clock that counts how often it is read."""

    reads = 0

    def __call__(self) -> int:
        self.reads += 1
        return super().__call__()


@pytest.fixture
def clock() -> CountedClock:
    return CountedClock(NOW_MS - NOW_MS % HOUR_MS)


@pytest.fixture
def reading(registry: SchemaRegistry, tmp_path: Path, clock: CountedClock) -> LedgerReading:
    ledgers: list[SharedLedger] = [
        SharedTokenRevocations(RevokedTokens(tmp_path / "revoked_tokens.jsonl")),
        SharedJoinTokenUses(JoinTokens(tmp_path / "join.jsonl", clock, bytes), clock, issues=False),
    ]
    return LedgerReading(
        LedgerStream("main", ledgers, registry, clock),
        [Shared(ledger, RetryBackoff(1.0, 10.0, lambda: 0.0)) for ledger in ledgers],
        is_told=False,
        wake=lambda: None,
        count=lambda _kind, _outcome: None,
        log=make_logger("relay", LogLines()),
    )


def entry(pending: int) -> Msg:
    """Return one after which ``pending`` others are to come."""
    return message(f"token_revocation.{sha256(b'jti').hexdigest()}", {"jti": "jti", "revoked_ms": 1}, pending)


def use(number: int, expires_at_ms: int) -> Msg:
    """Return the use of that number, of a token that expires then."""
    used = {"token": TOKEN, "use": number, "node_id": NODE_ID, "expires_at_ms": expires_at_ms}
    return message(f"join_token_use.{TOKEN}-{number}", used, 0)


def message(key: str, content: object, pending: int) -> Msg:
    metadata = f"$JS.ACK.edge_main_ledger.reader.1.7.7.1700000000000000000.{pending}"
    subject = f"edge.main.ledger.{key}"
    return Msg(cast("Client", None), subject, metadata, json.dumps(content).encode())


async def test_it_is_whole_once_the_last_entry_has_arrived(reading: LedgerReading) -> None:
    await reading.arrive(entry(1))
    assert not reading.caught_up.is_set()
    await reading.arrive(entry(0))
    assert reading.caught_up.is_set()
    assert reading.lasting() == 1


async def test_it_is_whole_too_once_what_was_pending_was_removed(reading: LedgerReading) -> None:
    await reading.arrive(entry(1))
    reading.check_arrival(None, 0, is_new=False)
    assert not reading.caught_up.is_set()
    reading.check_arrival(1, 0, is_new=False)
    assert reading.caught_up.is_set()


async def test_what_is_pending_and_does_not_arrive_has_all_read_again(reading: LedgerReading) -> None:
    await reading.arrive(entry(1))
    with pytest.raises(LostReaderError):
        reading.check_arrival(1, 1, is_new=False)
    assert not reading.caught_up.is_set()


async def test_what_another_relay_has_appended_first_and_does_not_arrive_has_all_read_again(
    reading: LedgerReading,
) -> None:
    await reading.arrive(entry(0))
    reading.refused_at = reading.messages
    with pytest.raises(LostReaderError):
        reading.check_arrival(1, 0, is_new=False)


def test_of_an_empty_stream_it_is_whole_at_once(reading: LedgerReading) -> None:
    reading.check_arrival(None, 0, is_new=True)
    assert reading.caught_up.is_set()


async def test_what_has_ended_is_not_expected_of_the_servers_any_more(
    reading: LedgerReading, clock: CountedClock
) -> None:
    begun_ms = clock.now_ms
    await reading.arrive(entry(0))
    await reading.arrive(use(1, begun_ms + HOUR_MS))
    await reading.arrive(use(2, begun_ms + 2 * HOUR_MS + 1))
    assert reading.lasting() == 3
    await reading.arrive(use(1, begun_ms + 2 * HOUR_MS))  # with another end, which counts from now on
    clock.advance(HOUR_MS)
    assert reading.lasting() == 3
    clock.advance(HOUR_MS)
    # Both end in this hour: neither is expected in it. What never ends is.
    assert reading.lasting() == 1
    clock.advance(-HOUR_MS)
    assert reading.lasting() == 3


async def test_what_it_takes_to_count_them_does_not_grow_with_their_number(
    reading: LedgerReading, clock: CountedClock
) -> None:
    for number in range(1, 1001):
        await reading.arrive(use(number, clock.now_ms + HOUR_MS + number))
    before = clock.reads
    assert reading.lasting() == 1000
    assert clock.reads == before + 1
