from collections.abc import Callable

import pytest

from relay.auth.agent_tokens import Principal
from relay.mcp_api.change_streams import OpenStreams, StreamLimitError


def principal(sub: str = "agent-1", jti: str = "jti-1", tenant: str = "acme") -> Principal:
    return Principal(
        tenant, sub, jti, "https://relay.example", frozenset({"tools:call:read_only"}), 0, "kid-1", b""
    )


def nothing() -> None:
    pass


class Ends:
    """Notes whose stream was ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def of(self, name: str) -> Callable[[], None]:
        return lambda: self.ended.append(name)


def may_open(streams: OpenStreams, who: Principal) -> bool:
    try:
        streams.check(who)
    except StreamLimitError:
        return False
    return True


# --- shares -------------------------------------------------------------------------------------------


def test_an_agent_has_its_share_and_no_more() -> None:
    streams = OpenStreams(per_agent=2)
    for _ in range(2):
        streams.check(principal())
        streams.hold(principal(), nothing)
    with pytest.raises(StreamLimitError):
        streams.check(principal())


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(principal("agent-2"), id="another subject"),
        pytest.param(principal(tenant="globex"), id="another tenant"),
        pytest.param(
            Principal("acme", "agent-1", "jti-1", "https://other.example", frozenset(), 0, "kid-1", b""),
            id="another issuer",
        ),
    ],
)
def test_another_agent_has_a_share_of_its_own(other: Principal) -> None:
    streams = OpenStreams(per_agent=1)
    streams.hold(principal(), nothing)
    assert not may_open(streams, principal())
    assert may_open(streams, other)


def test_another_token_of_the_same_agent_brings_no_further_share() -> None:
    streams = OpenStreams(per_agent=1)
    streams.hold(principal(jti="jti-1"), nothing)
    assert not may_open(streams, principal(jti="jti-2"))


def test_there_is_room_for_so_many_in_all() -> None:
    streams = OpenStreams(per_agent=10, in_all=3)
    releases = [streams.hold(principal(f"agent-{number}"), nothing) for number in range(3)]
    assert not may_open(streams, principal("a newcomer"))
    releases[1]()
    assert may_open(streams, principal("a newcomer"))


def test_what_is_closed_gives_its_place_back_once() -> None:
    streams = OpenStreams(per_agent=2)
    first, _second = streams.hold(principal(), nothing), streams.hold(principal(), nothing)
    for _ in range(3):
        first()
    streams.hold(principal(), nothing)
    assert not may_open(streams, principal())


def test_to_ask_for_room_takes_none() -> None:
    streams = OpenStreams(per_agent=1)
    for _ in range(5):
        streams.check(principal())
    assert may_open(streams, principal())


def test_who_holds_nothing_is_forgotten() -> None:
    streams = OpenStreams()
    for number in range(100):
        streams.check(principal(f"agent-{number}", f"jti-{number}"))
        streams.hold(principal(f"agent-{number}", f"jti-{number}"), nothing)()
    assert (len(streams._held), len(streams._ends)) == (0, 0)  # noqa: SLF001 - a leak shows nowhere else


# --- revocation ---------------------------------------------------------------------------------------


def test_what_a_token_opened_ends_when_it_is_revoked_and_nothing_else() -> None:
    streams, ends = OpenStreams(), Ends()
    for name, jti in (("first", "jti-1"), ("second", "jti-1"), ("other", "jti-2")):
        streams.hold(principal(jti=jti), ends.of(name))
    streams.revoke(frozenset({"jti-1", "never seen"}))
    assert ends.ended == ["first", "second"]


def test_what_was_closed_before_is_not_ended_again() -> None:
    streams, ends = OpenStreams(), Ends()
    closed = streams.hold(principal(), ends.of("closed"))
    streams.hold(principal(), ends.of("open"))
    closed()
    streams.revoke({"jti-1"})
    assert ends.ended == ["open"]


def test_a_stream_that_closes_as_it_is_ended_gives_its_place_back() -> None:
    streams = OpenStreams(per_agent=2)
    releases: list[Callable[[], None]] = []
    for _ in range(2):
        number = len(releases)
        releases.append(streams.hold(principal(), lambda number=number: releases[number]()))  # type: ignore[misc]
    assert not may_open(streams, principal())
    streams.revoke({"jti-1"})
    streams.revoke({"jti-1"})
    streams.hold(principal(), nothing)
    assert may_open(streams, principal())


def test_a_stream_that_goes_on_until_it_notices_keeps_its_place_until_then() -> None:
    streams = OpenStreams(per_agent=1)
    release = streams.hold(principal(), nothing)
    streams.revoke({"jti-1"})
    assert not may_open(streams, principal())
    release()
    assert may_open(streams, principal())
