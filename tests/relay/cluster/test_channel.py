"""Two relays in memory. What is forged, changed, repeated, or of another conversation opens nothing."""

import os
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.cluster import channel as channel_module
from relay.cluster.channel import (
    WINDOW,
    Asking,
    ChannelError,
    Offered,
    RelayKey,
    ReplayWindow,
    SealedChannel,
    session_of,
)
from tests.fakes.relay_keys import RelayCa

ASKER, ANSWERER, THIRD = (
    "01HZX9K3M4P7Q8R9S0T1V2W3XA",
    "01HZX9K3M4P7Q8R9S0T1V2W3XB",
    "01HZX9K3M4P7Q8R9S0T1V2W3XC",
)
CA = RelayCa()
ONE, OTHER = CA.key("one"), CA.key("other")
FLEET = "main"
TICKS_MS = 86_400_000


def asked(own: RelayKey = ONE, to: str = ANSWERER) -> Asking:
    return Asking.begun(own, to=to, relay=ASKER, fleet=FLEET, random_bytes=os.urandom)


def offered(hello: bytes, own: RelayKey = OTHER, relay: str = ANSWERER, fleet: str = FLEET) -> Offered:
    return Offered.by(hello, own, relay=relay, fleet=fleet, random_bytes=os.urandom, verify=CA.relay)


def joined() -> tuple[SealedChannel, SealedChannel]:
    """Return both ends of a channel."""
    asking = asked()
    offer = offered(asking.hello)
    finish, asker = asking.finish(offer.welcome, CA.relay, TICKS_MS)
    confirm, answerer = offer.finish(finish)
    asker.confirm(confirm)
    return asker, answerer


def changed(message: bytes, at: int, bit: int) -> bytes:
    at %= len(message)
    return message[:at] + bytes([message[at] ^ 1 << bit]) + message[at + 1 :]


changes = partial(st.tuples, st.integers(0, 4096), st.integers(0, 7))


def test_both_know_who_the_other_is_and_what_it_says() -> None:
    asker, answerer = joined()
    assert (asker.relay, answerer.relay) == (ANSWERER, ASKER)
    assert answerer.finished_ms == TICKS_MS
    assert (asker.peer, answerer.peer) == (CA.relay(OTHER.certificate), CA.relay(ONE.certificate))
    number, request = asker.seal(b"a question")
    assert b"a question" not in request
    assert answerer.open(request) == (number, b"a question")
    reply = answerer.seal_reply(number, b"an answer")
    assert asker.open_reply(number, reply) == b"an answer"
    assert session_of(request) == session_of(reply) == asker.session


@given(changes(), st.sampled_from(["hello", "welcome", "finish", "confirm"]))
def test_a_handshake_of_which_a_bit_was_changed_on_its_way_makes_no_channel(
    change: tuple[int, int], which: str
) -> None:
    asking = asked()
    with pytest.raises(ChannelError):  # noqa: PT012 - at one end or the other
        offer = offered(changed(asking.hello, *change) if which == "hello" else asking.hello)
        welcome = changed(offer.welcome, *change) if which == "welcome" else offer.welcome
        finish, asker = asking.finish(welcome, CA.relay, TICKS_MS)
        confirm, _ = offer.finish(changed(finish, *change) if which == "finish" else finish)
        asker.confirm(changed(confirm, *change) if which == "confirm" else confirm)


@given(st.binary(max_size=300))
def test_what_is_no_message_is_dropped(noise: bytes) -> None:
    asker, answerer = joined()
    asking = asked()
    offer = offered(asking.hello)
    for take in (
        offered,
        partial(asking.finish, verify=CA.relay, ticks_ms=TICKS_MS),
        offer.finish,
        answerer.open,
        partial(asker.open_reply, 1),
        asker.confirm,
    ):
        with pytest.raises(ChannelError):
            take(noise)


@given(changes(), st.booleans())
def test_a_message_of_which_a_bit_was_changed_opens_nothing_and_uses_up_nothing(
    change: tuple[int, int],
    is_reply: bool,  # noqa: FBT001 - drawn
) -> None:
    asker, answerer = joined()
    number, request = asker.seal(b"a question")
    if is_reply:
        answerer.open(request)
        reply = answerer.seal_reply(number, b"an answer")
        with pytest.raises(ChannelError):
            asker.open_reply(number, changed(reply, *change))
        assert asker.open_reply(number, reply) == b"an answer"
    else:
        with pytest.raises(ChannelError):
            answerer.open(changed(request, *change))
        assert answerer.open(request) == (number, b"a question")


@given(st.lists(st.integers(0, 19), max_size=60))
def test_each_request_is_opened_once_in_whatever_order_and_how_often_it_arrives(arrivals: list[int]) -> None:
    asker, answerer = joined()
    requests = [asker.seal(bytes([n])) for n in range(20)]
    seen = set[int]()
    for index in arrivals:
        number, request = requests[index]
        if index in seen:
            with pytest.raises(ChannelError, match="repeated"):
                answerer.open(request)
        else:
            assert answerer.open(request) == (number, bytes([index]))
            seen.add(index)


@given(st.lists(st.integers(1, 3 * WINDOW), max_size=40))
def test_no_number_is_taken_twice_however_far_they_are_apart(numbers: list[int]) -> None:
    window, taken = ReplayWindow(), set[int]()
    for number in numbers:
        was_new = window.take(number)
        assert not (was_new and number in taken)
        # What is not too far behind is taken, too.
        assert was_new or number in taken or number <= max(taken) - WINDOW
        taken |= {number} if was_new else set()


def test_an_answer_is_to_its_own_question_alone() -> None:
    asker, answerer = joined()
    (first, one), (second, two) = asker.seal(b"one"), asker.seal(b"two")
    answerer.open(one)
    answerer.open(two)
    with pytest.raises(ChannelError):
        asker.open_reply(second, answerer.seal_reply(first, b"of one"))
    # Nor is a request one.
    with pytest.raises(ChannelError):
        asker.open_reply(first, one)


def test_what_was_said_in_one_channel_says_nothing_in_another() -> None:
    (asker, answerer), (another, _) = joined(), joined()
    number, request = asker.seal(b"a question")
    answerer.open(request)
    reply = answerer.seal_reply(number, b"an answer")
    with pytest.raises(ChannelError):
        joined()[1].open(request)
    with pytest.raises(ChannelError):
        another.open_reply(number, reply)


def test_a_handshake_that_is_repeated_gives_no_keys() -> None:
    asking = asked()
    first = offered(asking.hello)
    finish, _ = asking.finish(first.welcome, CA.relay, TICKS_MS)
    # To the same hello the other relay has another key, which the old signature is not over.
    with pytest.raises(ChannelError):
        offered(asking.hello).finish(finish)
    with pytest.raises(ChannelError):
        asked().finish(first.welcome, CA.relay, TICKS_MS)


@pytest.mark.parametrize(
    "what", ["another process", "another fleet", "another CA", "revoked", "ended", "itself", "too large"]
)
def test_a_relay_makes_no_channel_with_what_is_not_the_other(what: str) -> None:
    other_ca = RelayCa("of others", CA.now_ms)
    hello = asked().hello
    with pytest.raises(ChannelError):  # noqa: PT012 - at one end or the other
        match what:
            case "another process":
                offered(hello, relay=THIRD)
            case "another fleet":
                asking = asked()
                asking.finish(offered(asking.hello, fleet="another").welcome, CA.relay, TICKS_MS)
            case "another CA":
                offered(asked(other_ca.key("one")).hello)
            case "revoked":
                barred = RelayCa(CA.name, CA.now_ms, {CA.relay(ONE.certificate).name})
                Offered.by(
                    hello, OTHER, relay=ANSWERER, fleet=FLEET, random_bytes=os.urandom, verify=barred.relay
                )
            case "ended":
                later = RelayCa(CA.name, CA.now_ms + 91 * 86_400_000)
                later.ca = CA.ca
                Offered.by(
                    hello, OTHER, relay=ANSWERER, fleet=FLEET, random_bytes=os.urandom, verify=later.relay
                )
            case "itself":
                offered(hello, own=ONE)
            case _:
                offered(hello + bytes(4096))


def test_one_that_has_anothers_certificate_and_not_its_key_proves_nothing() -> None:
    thief = RelayKey(ONE.certificate, CA.key("a thief").key)
    asking = asked(thief)
    offer = offered(asking.hello)
    finish, _ = asking.finish(offer.welcome, CA.relay, TICKS_MS)
    with pytest.raises(ChannelError, match="not signed"):
        offer.finish(finish)
    asking = asked()
    with pytest.raises(ChannelError, match="not signed"):
        asking.finish(
            offered(asking.hello, RelayKey(OTHER.certificate, thief.key)).welcome, CA.relay, TICKS_MS
        )


def test_a_key_of_low_order_is_refused() -> None:
    hello = asked().hello
    with pytest.raises(ChannelError, match="usable key"):
        offered(hello[:17] + bytes(32) + hello[49:])


def test_a_channel_that_is_spent_seals_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MOST_MESSAGES", 2)
    asker, _ = joined()
    asker.seal(b"one")
    asker.seal(b"two")
    assert asker.is_spent
    with pytest.raises(ChannelError, match="spent"):
        asker.seal(b"three")
