import asyncio
from collections.abc import AsyncIterator

import pytest

from relay.auth.permissions import Rights
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.fleet import GRACE_MS
from relay.fleet.node_record import Where
from relay.fleet.selection import WHOLE_FLEET, Selection
from schemas.addresses import View
from schemas.labels import NodeName
from tests.fakes.background import in_background
from tests.fakes.hub import Hub
from tests.fakes.signer import ECHO, METRICS, NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, TTL_MS, SimulatedNode

BOUND_S = 30
READERS = Rights(TENANT, frozenset({"read_only"}))
OTHERS = Rights("globex", frozenset({"read_only"}))
ACTORS = Rights(TENANT, frozenset({"physical_actuation"}))


class CountingListener:
    """A listener that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self._events: asyncio.Queue[None] = asyncio.Queue()

    async def __call__(self) -> None:
        self.calls += 1
        self._events.put_nowait(None)

    async def next(self) -> None:
        await asyncio.wait_for(self._events.get(), BOUND_S)


def listening(
    notifier: ChangeNotifier, rights: Rights = READERS, selection: Selection = WHOLE_FLEET
) -> CountingListener:
    listener = CountingListener()
    notifier.listen(rights, listener, selection)
    return listener


@pytest.fixture
async def notifier(hub: Hub) -> AsyncIterator[ChangeNotifier]:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=0, timeout_s=1000)
    async with in_background(notifier.run()):
        yield notifier


async def test_a_listener_hears_of_a_node_that_comes_and_goes(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    listener = listening(notifier)
    hub.connect(node)
    await listener.next()
    hub.fleet.connection_changed(NODE_ID, Where.NOWHERE)
    hub.clock.advance(GRACE_MS)
    await listener.next()
    assert listener.calls == 2


async def test_an_expiry_is_heard_though_nothing_happened(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    hub.connect(node)
    listener = listening(notifier)
    hub.clock.advance(TTL_MS)
    await listener.next()


async def test_what_changes_between_two_looks_is_told_once(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    listener = listening(notifier)
    hub.connect(node)
    hub.connect(hub.ca.issue(OTHER_NODE_ID))
    hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
    await listener.next()
    hub.announce(node, issued_at_ms=NOW_MS + 2)
    await listener.next()
    assert listener.calls == 2


async def test_a_renewal_that_no_list_shows_is_not_notified(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    hub.connect(node)
    listener = listening(notifier)
    slower = {**ECHO, "constraints": {"rate_limit_rps": 1}}
    hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
    await listener.next()
    hub.announce(node, issued_at_ms=NOW_MS + 2, capabilities=[slower])
    hub.fleet.connection_changed(NODE_ID, Where.NOWHERE)
    other = listening(notifier, OTHERS)
    hub.connect(hub.ca.issue(OTHER_NODE_ID, "globex"))
    await other.next()
    assert listener.calls == 1


async def test_only_those_hear_who_can_see_the_change(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    readers, others, actors = (listening(notifier, rights) for rights in (READERS, OTHERS, ACTORS))
    hub.connect(node)
    await readers.next()
    hub.connect(hub.ca.issue(OTHER_NODE_ID, "globex"))
    await others.next()
    assert (readers.calls, others.calls, actors.calls) == (1, 1, 0)


async def test_who_has_stopped_listening_hears_nothing_and_the_others_go_on(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    leaver = CountingListener()
    stop = notifier.listen(READERS, leaver)
    stayer = listening(notifier)
    stop()
    stop()
    hub.connect(node)
    await stayer.next()
    assert leaver.calls == 0


async def test_who_listens_again_hears_only_of_what_changes_from_then_on(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    early = CountingListener()
    notifier.listen(READERS, early)()
    hub.connect(node)
    late = listening(notifier)
    hub.connect(hub.ca.issue(OTHER_NODE_ID))
    await late.next()
    assert (early.calls, late.calls) == (0, 1)


async def never_returns() -> None:
    await asyncio.Event().wait()


async def test_a_listener_that_fails_costs_the_others_nothing(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    async def fails() -> None:
        raise ConnectionResetError

    notifier.listen(READERS, fails)
    listener = listening(notifier)
    hub.connect(node)
    await listener.next()
    hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
    await listener.next()
    (line,) = hub.lines.entries("an agent was not notified of a change")
    assert "in fails: raise ConnectionResetError" in line["exception"]


async def test_a_listener_that_does_not_return_does_not_delay_the_others(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    notifier.listen(READERS, never_returns)
    listener = listening(notifier)
    hub.connect(node)
    await listener.next()


async def test_a_listener_that_does_not_return_is_given_up_and_the_next_change_is_told(
    hub: Hub, node: SimulatedNode
) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=0, timeout_s=0.001)
    notifier.listen(READERS, never_returns)
    listener = listening(notifier)
    async with in_background(notifier.run()):
        hub.connect(node)
        await listener.next()
        hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
        await listener.next()


async def test_an_audience_that_does_not_read_keeps_no_other_waiting(hub: Hub, node: SimulatedNode) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=0, timeout_s=1000)
    notifier.listen(READERS, never_returns)
    listener = listening(notifier, OTHERS)
    async with in_background(notifier.run()):
        for issued_at_ms in (NOW_MS, NOW_MS + 1, NOW_MS + 2):
            capabilities = [ECHO] if issued_at_ms % 2 else [METRICS]
            hub.connect(node, issued_at_ms=issued_at_ms, capabilities=capabilities)
            other = hub.ca.issue(OTHER_NODE_ID, "globex")
            hub.connect(other, issued_at_ms=issued_at_ms, capabilities=capabilities)
            await listener.next()
    assert listener.calls == 3


async def test_an_audience_is_not_told_twice_at_a_time_and_what_changed_meanwhile_is_told_then(
    hub: Hub, node: SimulatedNode
) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=0.001, timeout_s=1000)
    notified, read_on = asyncio.Queue[None](), asyncio.Event()

    async def slow() -> None:
        notified.put_nowait(None)
        await read_on.wait()

    notifier.listen(READERS, slow)
    others = listening(notifier, OTHERS)
    async with in_background(notifier.run()):
        hub.connect(node)
        await asyncio.wait_for(notified.get(), BOUND_S)
        hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
        hub.connect(hub.ca.issue(OTHER_NODE_ID, "globex"))
        await others.next()  # the notifier has checked every audience since
        assert notified.empty()
        read_on.set()
        await asyncio.wait_for(notified.get(), BOUND_S)


async def test_what_changed_while_an_audience_was_told_does_not_wait_for_the_next_look(
    hub: Hub, node: SimulatedNode
) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=1000, timeout_s=1000, quiet_s=0)
    notified, read_on = asyncio.Queue[None](), asyncio.Event()

    async def slow() -> None:
        notified.put_nowait(None)
        await read_on.wait()

    notifier.listen(READERS, slow)
    async with in_background(notifier.run()):
        hub.connect(node)
        notifier.wake()
        await asyncio.wait_for(notified.get(), BOUND_S)
        hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
        read_on.set()
        await asyncio.wait_for(notified.get(), BOUND_S)


async def test_who_is_woken_within_the_quiet_while_tells_when_that_ends_and_not_at_the_next_look(
    hub: Hub, node: SimulatedNode
) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=1000, quiet_s=0.05)
    listener = listening(notifier)
    async with in_background(notifier.run()):
        for issued_at_ms in range(NOW_MS, NOW_MS + 4):
            hub.connect(node, issued_at_ms=issued_at_ms, capabilities=[ECHO, METRICS][issued_at_ms % 2 :])
            notifier.wake()
            await listener.next()


# --- at once, but not too often -----------------------------------------------------------------------


async def test_who_is_woken_looks_at_once(hub: Hub, node: SimulatedNode) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=1000)
    listener = listening(notifier)
    async with in_background(notifier.run()):
        hub.connect(node)
        notifier.wake()
        await listener.next()


async def test_a_wakeup_without_a_change_notifies_no_listener(hub: Hub, node: SimulatedNode) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=1000)
    listeners = {rights: listening(notifier, rights) for rights in (READERS, OTHERS)}
    async with in_background(notifier.run()):
        notifier.wake()
        hub.connect(hub.ca.issue(OTHER_NODE_ID, "globex"))
        notifier.wake()
        await listeners[OTHERS].next()
        hub.connect(node)
        notifier.wake()
        await listeners[READERS].next()
    assert [listener.calls for listener in listeners.values()] == [1, 1]


async def test_an_audience_hears_once_in_a_while_however_often_it_is_woken_and_others_are_not_held_up(
    hub: Hub, node: SimulatedNode
) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=1000)
    ours, theirs = listening(notifier), listening(notifier, OTHERS)
    async with in_background(notifier.run()):
        hub.connect(node)
        notifier.wake()
        await ours.next()
        hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
        notifier.wake()
        hub.connect(hub.ca.issue(OTHER_NODE_ID, "globex"))
        notifier.wake()
        await theirs.next()
    assert (ours.calls, theirs.calls) == (1, 1)


async def test_what_could_not_be_told_at_once_is_told_when_the_while_is_over(
    hub: Hub, node: SimulatedNode
) -> None:
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=0.02)
    listener = listening(notifier)
    async with in_background(notifier.run()):
        hub.connect(node)
        notifier.wake()
        await listener.next()
        hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
        notifier.wake()
        await listener.next()
    assert listener.calls == 2


async def test_a_client_of_the_kinds_view_hears_of_a_new_kind_and_not_of_a_new_node(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    hub.connect(node, capabilities=[ECHO])
    by_kind, by_tool = listening(notifier, selection=Selection(View.KINDS)), listening(notifier)
    other = hub.ca.issue(OTHER_NODE_ID)
    hub.connect(other, capabilities=[ECHO])
    await by_tool.next()
    assert by_kind.calls == 0
    hub.connect(other, capabilities=[ECHO, METRICS], issued_at_ms=NOW_MS + 1)
    await by_kind.next()


async def test_a_client_that_selects_by_tags_hears_when_a_node_gets_the_tag(
    hub: Hub, notifier: ChangeNotifier, node: SimulatedNode
) -> None:
    hub.connect(node, capabilities=[ECHO])
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "barn", ("site=south",))})
    north = listening(notifier, selection=Selection(tags=("site=north",)))
    everything = listening(notifier)
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "barn", ("site=north",))})
    await north.next()
    assert everything.calls == 0
