"""A seed replays its schedule, and a long schedule has every fault on every link and process."""

from itertools import chain, pairwise

import pytest

from tests.chaos.schedule import ROUND, rounds
from tests.chaos.topology import ONE_RELAY, THREE_RELAYS, End, Link, Topology
from tests.fakes.fault_proxy import LinkFault


def test_the_same_seed_is_the_same_schedule() -> None:
    assert list(rounds(7, 100)) == list(rounds(7, 100))
    assert list(rounds(7, 100)) != list(rounds(8, 100))


def test_there_are_as_many_faults_as_were_asked_for() -> None:
    assert [len(faults) for faults in rounds(7, 2 * ROUND + 3)] == [ROUND, ROUND, 3]


def test_the_faults_of_one_process_follow_each_other() -> None:
    for faults in rounds(7, 1000):
        for target in ONE_RELAY.programs:
            own = [fault for fault in faults if fault.target is target]
            assert all(one.at_s + one.for_s <= following.at_s for one, following in pairwise(own))


def test_those_of_a_link_overlap() -> None:
    faults = [fault for fault in chain.from_iterable(rounds(7, 1000)) if fault.target is Link.NODE_RELAY]
    assert any(one.at_s + one.for_s > following.at_s > one.at_s for one, following in pairwise(faults))


@pytest.mark.parametrize("topology", [ONE_RELAY, THREE_RELAYS], ids=["one relay", "three relays"])
def test_every_part_and_kind_of_fault_occurs(topology: Topology) -> None:
    faults = list(chain.from_iterable(rounds(7, 2000, topology)))
    assert {fault.target for fault in faults} == topology.weights.keys()
    assert {fault.kind for fault in faults} == {*LinkFault, *End}
    for program in topology.programs:
        assert {fault.kind for fault in faults if fault.target is program} == set(End)


@pytest.mark.parametrize("topology", [ONE_RELAY, THREE_RELAYS], ids=["one relay", "three relays"])
def test_bytes_are_changed_only_where_tls_notices_it(topology: Topology) -> None:
    changed = {
        fault.target
        for fault in chain.from_iterable(rounds(7, 2000, topology))
        if fault.kind in {LinkFault.CORRUPT, LinkFault.REORDER}
    }
    assert changed == {link for relay in topology.relays for link in (relay.agents, relay.nodes)}
