"""Two demos that start at once do not choose the same port."""

import socket

import pytest

from relay.cli.demo.ports import ClaimedPorts
from tests.fakes.ports import unused_port

pytestmark = pytest.mark.integration


def test_the_usual_port_is_taken_where_it_is_free() -> None:
    wanted = unused_port()
    with ClaimedPorts() as ports:
        assert ports.take(wanted) == wanted


def test_a_port_in_use_is_left_to_its_owner() -> None:
    wanted = unused_port()
    with socket.socket() as taken, ClaimedPorts() as ports:
        taken.bind(("127.0.0.1", wanted))
        taken.listen()
        assert ports.take(wanted) != wanted


def test_a_port_that_another_demo_has_chosen_and_not_bound_yet_is_left_to_it() -> None:
    wanted = unused_port()
    with ClaimedPorts() as first, ClaimedPorts() as second:
        chosen = [ports.take(wanted) for ports in (first, second, first, second)]
    assert chosen[0] == wanted
    assert len(set(chosen)) == 4


def test_the_port_of_a_demo_that_has_ended_is_free() -> None:
    wanted = unused_port()
    for _ in range(2):
        with ClaimedPorts() as ports:
            assert ports.take(wanted) == wanted


def test_one_demo_never_takes_a_port_twice() -> None:
    wanted = unused_port()
    with ClaimedPorts() as ports:
        assert len({ports.take(wanted) for _ in range(50)}) == 50
