from relay.auth.accepted_keys import AcceptedKeys
from relay.state.tokens import AcceptedKey
from tests.fakes.clock import FakeClock
from tests.fakes.signer import NOW_MS

OLD, NEW = b"o" * 32, b"n" * 32


def test_a_key_is_accepted_until_its_end() -> None:
    clock = FakeClock(NOW_MS)
    keys = AcceptedKeys(clock)
    assert keys.accept({"old": AcceptedKey(OLD, NOW_MS + 1), "new": AcceptedKey(NEW, None)}) == {"old", "new"}
    assert dict(keys) == {"old": OLD, "new": NEW}
    clock.advance(1)
    assert keys.get("old") is None
    assert dict(keys) == {"new": NEW}
    assert len(keys) == 1


def test_only_the_keys_of_the_last_time_are_accepted() -> None:
    keys = AcceptedKeys(FakeClock(NOW_MS))
    keys.accept({"old": AcceptedKey(OLD, None)})
    assert keys.accept({"old": AcceptedKey(OLD, NOW_MS), "new": AcceptedKey(NEW, None)}) == {"new"}
    assert dict(keys) == {"new": NEW}
    assert keys.accept({}) == set()
    assert dict(keys) == {}


def test_an_end_that_was_known_stays() -> None:
    keys = AcceptedKeys(FakeClock(NOW_MS))
    keys.accept({"old": AcceptedKey(OLD, NOW_MS), "new": AcceptedKey(NEW, None)})
    keys.accept({"old": AcceptedKey(OLD, None), "new": AcceptedKey(NEW, None)})
    assert dict(keys) == {"new": NEW}
