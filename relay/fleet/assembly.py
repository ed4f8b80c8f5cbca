"""Assembles the fleet: nodes and their tools, the broker's feed, the notifier of changes.

Must not decide anything: it constructs the parts and connects them.
"""

import asyncio
import ssl
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from relay.audit.assembly import AuditPart
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.fleet import Fleet
from relay.fleet.leaves import FleetTrust, KeptLeaves
from relay.fleet.mqtt_feed import MqttFeed
from relay.fleet.replay_marks import MarkStore
from relay.fleet.tools import Projector
from relay.part import Part
from relay.settings.environment import RelayEnvironment
from relay.state.names import NameLedger
from schemas.health import Health, Loop, endless

_CLIENT_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class FleetPart(Part):
    """The nodes that one relay knows."""

    fleet: Fleet
    marks: MarkStore
    feed: MqttFeed | None
    notifier: ChangeNotifier
    name_ledger: NameLedger

    async def run(self) -> None:
        """Follow the broker, if any, write the marks and notify agents of changes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name, work in self._work().items():
                tasks.create_task(endless(name, work))

    def health(self) -> Mapping[str, Health]:
        """Manifests arrive by the broker, and those that it retains have arrived; or by sessions alone.

        Only at the start do calls wait for them: a broker may be full, or away, for long.
        """
        if self.feed is None:
            return {}
        inventory, awaited = self.fleet.inventory, self.feed.is_awaited
        state = "" if self.feed.connected else "not connected: nodes announce themselves by their sessions"
        return {
            "broker": Health.of(self.feed.loop, ready=self.feed.connected, state=state, essential=awaited),
            "inventory": Health(
                started=inventory.is_subscribed,
                live=self.notifier.loop.is_live,
                ready=inventory.is_there,
                essential=awaited,
            ),
        }

    def loops(self) -> Mapping[str, Loop]:
        """The broker's messages are taken in, and tools whose time is over are delisted."""
        loops = {"inventory": self.notifier.loop, "marks": self.marks.loop}
        return loops if self.feed is None else {"broker": self.feed.loop, **loops}

    def _work(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        work = {"marks": self.marks.run(), "inventory": self.notifier.run()}
        return work if self.feed is None else {"broker": self.feed.run(), **work}


def assemble(
    environment: RelayEnvironment,
    audit: AuditPart,
    trust: FleetTrust,
    tls_to_broker: ssl.SSLContext | None,
    name_ledger: NameLedger,
) -> FleetPart:
    """Return the part, which accepts leaves and manifests by ``trust``.

    Raises:
        OSError: the marks cannot be read.
    """
    marks = MarkStore(environment.config.state.marks, environment.log)
    kept = KeptLeaves(marks.load_leaves(environment.clock()), marks.put_leaf)
    fleet = Fleet(
        trust=replace(trust, kept=kept),
        projector=Projector(environment.registry, environment.kinds),
        marks=marks,
        metrics=environment.metrics,
        refusals=audit.refusals,
        now_ms=environment.clock,
        log=environment.log,
    )
    broker = environment.config.broker
    feed = (
        None
        if broker is None
        else MqttFeed(
            broker=broker,
            # Not the process id: in containers it is often 1, and of two equal ids a broker disconnects one.
            client_id=f"edge-relay-{environment.random_bytes(_CLIENT_ID_BYTES).hex()}",
            fleet=fleet,
            registry=environment.registry,
            metrics=environment.metrics,
            refusals=audit.refusals,
            log=environment.log,
            tls=tls_to_broker,
        )
    )
    return FleetPart(
        fleet=fleet,
        marks=marks,
        feed=feed,
        notifier=ChangeNotifier(fleet, environment.log),
        name_ledger=name_ledger,
    )
