import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from relay.auth.permissions import Rights
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.fleet import GRACE_MS
from tests.fakes.hub import Hub
from tests.fakes.signer import ECHO, METRICS, NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, TTL_MS, SimulatedNode

BOUND_S = 10
READERS = Rights(TENANT, frozenset({"read_only"}))
OTHERS = Rights("globex", frozenset({"read_only"}))
ACTORS = Rights(TENANT, frozenset({"physical_actuation"}))


class Ear:
    """A listener; counts what it hears."""

    def __init__(self) -> None:
        self.heard = 0
        self._events: asyncio.Queue[None] = asyncio.Queue()

    async def __call__(self) -> None:
        self.heard += 1
        self._events.put_nowait(None)

    async def next(self) -> None:
        await asyncio.wait_for(self._events.get(), BOUND_S)


@pytest.fixture
def node(hub: Hub) -> SimulatedNode:
    return hub.ca.issue()


@asynccontextmanager
async def running(notifier: ChangeNotifier) -> AsyncIterator[None]:
    task = asyncio.create_task(notifier.run())
    yield
    assert not task.done()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.fixture
async def notifier(hub: Hub) -> AsyncIterator[ChangeNotifier]:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=0, timeout_s=1000)
    async with running(notifier):
        yield notifier


async def test_a_listener_hears_of_a_node_that_comes_and_goes(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    ear = Ear()
    notifier.listen(READERS, ear)
    hub.connect(node)
    await ear.next()
    hub.fleet.set_connected(NODE_ID, connected=False)
    hub.clock.advance(GRACE_MS)
    await ear.next()
    assert ear.heard == 2


async def test_an_expiry_is_heard_though_nothing_happened(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    hub.connect(node)
    ear = Ear()
    notifier.listen(READERS, ear)
    hub.clock.advance(TTL_MS)
    await ear.next()


async def test_what_changes_between_two_looks_is_told_once(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    ear = Ear()
    notifier.listen(READERS, ear)
    hub.connect(node)
    hub.connect(hub.ca.issue(OTHER_NODE_ID))
    hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
    await ear.next()
    hub.announce(node, issued_at_ms=NOW_MS + 2)
    await ear.next()
    assert ear.heard == 2


async def test_a_renewal_that_nobody_can_see_is_not_told(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    hub.connect(node)
    ear = Ear()
    notifier.listen(READERS, ear)
    slower = {**ECHO, "constraints": {"rate_limit_rps": 1}}
    hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
    await ear.next()
    hub.announce(node, issued_at_ms=NOW_MS + 2, capabilities=[slower])
    hub.fleet.set_connected(NODE_ID, connected=False)
    other = Ear()
    notifier.listen(OTHERS, other)
    hub.connect(hub.ca.issue(OTHER_NODE_ID, "globex"))
    await other.next()
    assert ear.heard == 1


async def test_only_those_hear_who_can_see_the_change(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    readers, others, actors = Ear(), Ear(), Ear()
    for audience, ear in ((READERS, readers), (OTHERS, others), (ACTORS, actors)):
        notifier.listen(audience, ear)
    hub.connect(node)
    await readers.next()
    hub.connect(hub.ca.issue(OTHER_NODE_ID, "globex"))
    await others.next()
    assert (readers.heard, others.heard, actors.heard) == (1, 1, 0)


async def test_who_has_stopped_listening_hears_nothing_and_the_others_go_on(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    leaver, stayer = Ear(), Ear()
    stop = notifier.listen(READERS, leaver)
    notifier.listen(READERS, stayer)
    stop()
    stop()
    hub.connect(node)
    await stayer.next()
    assert leaver.heard == 0


async def test_who_listens_again_hears_only_of_what_changes_from_then_on(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    early = Ear()
    notifier.listen(READERS, early)()
    hub.connect(node)
    late = Ear()
    notifier.listen(READERS, late)
    hub.connect(hub.ca.issue(OTHER_NODE_ID))
    await late.next()
    assert (early.heard, late.heard) == (0, 1)


async def never_returns() -> None:
    await asyncio.Event().wait()


async def test_a_listener_that_fails_costs_the_others_nothing(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    async def fails() -> None:
        raise ConnectionResetError

    ear = Ear()
    notifier.listen(READERS, fails)
    notifier.listen(READERS, ear)
    hub.connect(node)
    await ear.next()
    hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
    await ear.next()
    (line,) = hub.lines.entries("an agent was not told of a change")
    assert "in fails: raise ConnectionResetError" in line["exception"]


async def test_nobody_waits_for_a_listener_that_does_not_return(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    ear = Ear()
    notifier.listen(READERS, never_returns)
    notifier.listen(READERS, ear)
    hub.connect(node)
    await ear.next()


async def test_a_listener_that_does_not_return_is_given_up_and_the_next_change_is_told(
    hub: Hub, node: SimulatedNode
) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=0, timeout_s=0.001)
    ear = Ear()
    notifier.listen(READERS, never_returns)
    notifier.listen(READERS, ear)
    async with running(notifier):
        hub.connect(node)
        await ear.next()
        hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
        await ear.next()


async def test_an_audience_that_does_not_read_keeps_no_other_waiting(hub: Hub, node: SimulatedNode) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=0, timeout_s=1000)
    ear = Ear()
    notifier.listen(READERS, never_returns)
    notifier.listen(OTHERS, ear)
    async with running(notifier):
        for issued_at_ms in (NOW_MS, NOW_MS + 1, NOW_MS + 2):
            capabilities = [ECHO] if issued_at_ms % 2 else [METRICS]
            hub.connect(node, issued_at_ms=issued_at_ms, capabilities=capabilities)
            other = hub.ca.issue(OTHER_NODE_ID, "globex")
            hub.connect(other, issued_at_ms=issued_at_ms, capabilities=capabilities)
            await ear.next()
    assert ear.heard == 3


async def test_an_audience_is_not_told_twice_at_a_time_and_what_changed_meanwhile_is_told_then(
    hub: Hub, node: SimulatedNode
) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=0.001, timeout_s=1000)
    told, read_on = asyncio.Queue[None](), asyncio.Event()
    others = Ear()

    async def slow() -> None:
        told.put_nowait(None)
        await read_on.wait()

    notifier.listen(READERS, slow)
    notifier.listen(OTHERS, others)
    async with running(notifier):
        hub.connect(node)
        await asyncio.wait_for(told.get(), BOUND_S)
        hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
        hub.connect(hub.ca.issue(OTHER_NODE_ID, "globex"))
        await others.next()  # the notifier has looked at everybody since
        assert told.empty()
        read_on.set()
        await asyncio.wait_for(told.get(), BOUND_S)


async def test_what_changed_while_an_audience_was_told_does_not_wait_for_the_next_look(
    hub: Hub, node: SimulatedNode
) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=1000, timeout_s=1000, quiet_s=0)
    told, read_on = asyncio.Queue[None](), asyncio.Event()

    async def slow() -> None:
        told.put_nowait(None)
        await read_on.wait()

    notifier.listen(READERS, slow)
    async with running(notifier):
        hub.connect(node)
        notifier.wake()
        await asyncio.wait_for(told.get(), BOUND_S)
        hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
        read_on.set()
        await asyncio.wait_for(told.get(), BOUND_S)


async def test_who_is_woken_within_the_quiet_while_tells_when_that_ends_and_not_at_the_next_look(
    hub: Hub, node: SimulatedNode
) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=1000, quiet_s=0.05)
    ear = Ear()
    notifier.listen(READERS, ear)
    async with running(notifier):
        for issued_at_ms in range(NOW_MS, NOW_MS + 4):
            hub.connect(node, issued_at_ms=issued_at_ms, capabilities=[ECHO, METRICS][issued_at_ms % 2 :])
            notifier.wake()
            await ear.next()


# --- at once, but not too often -----------------------------------------------------------------------


async def test_who_is_woken_looks_at_once(hub: Hub, node: SimulatedNode) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=1000)
    ear = Ear()
    notifier.listen(READERS, ear)
    async with running(notifier):
        hub.connect(node)
        notifier.wake()
        await ear.next()


async def test_to_be_woken_without_a_change_tells_nobody(hub: Hub, node: SimulatedNode) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=1000)
    ears = {READERS: Ear(), OTHERS: Ear()}
    for audience, ear in ears.items():
        notifier.listen(audience, ear)
    async with running(notifier):
        notifier.wake()
        hub.connect(hub.ca.issue(OTHER_NODE_ID, "globex"))
        notifier.wake()
        await ears[OTHERS].next()
        hub.connect(node)
        notifier.wake()
        await ears[READERS].next()
    assert [ear.heard for ear in ears.values()] == [1, 1]


async def test_an_audience_hears_once_in_a_while_however_often_it_is_woken_and_others_are_not_held_up(
    hub: Hub, node: SimulatedNode
) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=1000)
    ours, theirs = Ear(), Ear()
    notifier.listen(READERS, ours)
    notifier.listen(OTHERS, theirs)
    async with running(notifier):
        hub.connect(node)
        notifier.wake()
        await ours.next()
        hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
        notifier.wake()
        hub.connect(hub.ca.issue(OTHER_NODE_ID, "globex"))
        notifier.wake()
        await theirs.next()
    assert (ours.heard, theirs.heard) == (1, 1)


async def test_what_could_not_be_told_at_once_is_told_when_the_while_is_over(
    hub: Hub, node: SimulatedNode
) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=0.02)
    ear = Ear()
    notifier.listen(READERS, ear)
    async with running(notifier):
        hub.connect(node)
        notifier.wake()
        await ear.next()
        hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
        notifier.wake()
        await ear.next()
    assert ear.heard == 2
