from relay.cluster.heard_relays import MAX_HEARD, HeardRelays, RelayIdentity
from tests.fakes.seconds import Seconds

URL, OTHER_URL = "https://relay.example", "https://other.example"
ROOT, OTHER_ROOT = "ab" * 32, "cd" * 32


def relay(name: str, url: str = URL, root: str = ROOT) -> RelayIdentity:
    return RelayIdentity(name, url, [root])


def heard(*relays: RelayIdentity) -> HeardRelays:
    others = HeardRelays(Seconds(), 90.0)
    for each in relays:
        others.add(each)
    return others


def test_of_two_the_one_stays_that_more_relays_agree_with() -> None:
    right, wrong = relay("9"), relay("1", OTHER_URL)
    others = heard(wrong, relay("8"))
    assert others.stays(right, wrong)
    assert not others.stays(wrong, right)


def test_roots_count_as_urls_do() -> None:
    right, wrong = relay("9"), relay("1", root=OTHER_ROOT)
    assert heard(relay("8")).stays(right, wrong)


def test_of_equally_many_the_one_with_the_lower_id_stays() -> None:
    one, other = relay("1"), relay("2", OTHER_URL)
    for others in (heard(), heard(relay("3"), relay("4", OTHER_URL))):
        assert others.stays(one, other)
        assert not others.stays(other, one)


def test_a_relay_counts_once_and_as_it_was_heard_last() -> None:
    right, wrong = relay("9"), relay("1", OTHER_URL)
    others = heard(relay("8"), relay("8"), relay("8", OTHER_URL))
    assert not others.stays(right, wrong)


def test_a_relay_that_was_not_heard_for_long_does_not_count() -> None:
    seconds = Seconds()
    others = HeardRelays(seconds, 90.0)
    others.add(relay("8"))
    assert "8" in others
    seconds.now += 91.0
    assert "8" not in others
    assert not others.stays(relay("9"), relay("1", OTHER_URL))


def test_no_more_relays_are_counted_than_the_bound() -> None:
    others = heard(*(relay(str(number)) for number in range(MAX_HEARD + 1)))
    assert "0" not in others
    assert str(MAX_HEARD) in others
