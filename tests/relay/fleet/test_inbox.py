import threading
from collections.abc import Iterator
from contextlib import contextmanager

from relay.fleet.inbox import Inbox

BOUND_S = 10
TOPIC = "t"


class Counted:
    """Counts what has arrived; can be waited for."""

    def __init__(self) -> None:
        self.arrivals = threading.Semaphore(0)

    def __call__(self) -> None:
        self.arrivals.release()

    def next(self) -> bool:
        return self.arrivals.acquire(timeout=BOUND_S)

    def is_quiet(self) -> bool:
        return not self.arrivals.acquire(blocking=False)


@contextmanager
def putting(inbox: Inbox, *payloads: bytes) -> Iterator[threading.Thread]:
    """Put, from a thread of its own, which has ended at the end of the block."""

    def put() -> None:
        for payload in payloads:
            inbox.put(TOPIC, payload)

    thread = threading.Thread(target=put)
    thread.start()
    yield thread
    thread.join(BOUND_S)
    assert not thread.is_alive()


def drained(inbox: Inbox) -> list[bytes]:
    messages = []
    while (message := inbox.take()) is not None:
        assert message[0] == TOPIC
        messages.append(message[1])
    return messages


def test_what_is_put_comes_out_in_order_and_each_arrival_is_told() -> None:
    arrived = Counted()
    inbox = Inbox(arrived, 10, 1000)
    with putting(inbox, b"a", b"b", b"c"):
        assert all(arrived.next() for _ in range(3))
    assert drained(inbox) == [b"a", b"b", b"c"]
    assert inbox.take() is None


def test_a_full_inbox_lets_who_puts_wait_for_room_in_number() -> None:
    arrived = Counted()
    inbox = Inbox(arrived, 2, 1000)
    with putting(inbox, b"a", b"b", b"c") as thread:
        assert arrived.next()
        assert arrived.next()
        assert thread.is_alive()
        assert arrived.is_quiet()
        assert inbox.take() == (TOPIC, b"a")
        assert arrived.next()
    assert drained(inbox) == [b"b", b"c"]


def test_and_in_bytes_those_of_the_topic_too() -> None:
    arrived = Counted()
    inbox = Inbox(arrived, 100, 10)
    with putting(inbox, b"1234", b"1234", b"1") as thread:
        assert arrived.next()
        assert arrived.next()
        assert thread.is_alive()
        assert arrived.is_quiet()
        assert inbox.take() == (TOPIC, b"1234")
        assert arrived.next()
    assert drained(inbox) == [b"1234", b"1"]


def test_an_empty_inbox_has_room_for_what_is_larger_than_it() -> None:
    inbox = Inbox(lambda: None, 1, 1)
    with putting(inbox, b"large"):
        pass
    assert drained(inbox) == [b"large"]


def test_a_closed_inbox_lets_go_who_waits_and_takes_nothing_more() -> None:
    arrived = Counted()
    inbox = Inbox(arrived, 1, 1000)
    with putting(inbox, b"a", b"b", b"c"):
        assert arrived.next()
        inbox.close()
    assert drained(inbox) == []
    assert arrived.is_quiet()
