"""Which addresses share a bound."""

import pytest

from relay.limits.address_groups import address_group


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("203.0.113.7", "::ffff:203.0.113.7"),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff:ffff:ffff:ffff"),
        ("fe80::1%eth0", "fe80::2%eth1"),
    ],
)
def test_addresses_of_one_subscriber_are_one_group(one: str, other: str) -> None:
    assert address_group(one) == address_group(other) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [("203.0.113.7", "203.0.113.8"), ("2001:db8:1:2::1", "2001:db8:1:3::1"), ("0.0.0.1", "::1:0:0:0:0")],
)
def test_addresses_of_two_subscribers_are_two_groups(one: str, other: str) -> None:
    assert address_group(one) != address_group(other)


def test_a_group_reads_as_a_network() -> None:
    assert address_group("2001:db8:1:2::1") == "2001:db8:1:2::/64"
    assert address_group("::ffff:203.0.113.7") == "203.0.113.7"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "", "unknown"])
def test_this_machine_and_what_is_no_address_are_in_no_group(address: str) -> None:
    assert address_group(address) is None
