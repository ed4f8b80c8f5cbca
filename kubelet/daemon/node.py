"""One node, put together: what it can do, its manifests, and its connection to the relay.

Used once by the daemon and many times by the mock fleet. Must not open anything by itself.
"""

import asyncio
import json
import os
import random
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structlog.typing import FilteringBoundLogger

from kubelet.announce.announcer import Announcer
from kubelet.announce.mqtt import Publisher
from kubelet.announce.relay_kinds import RelayKinds
from kubelet.announce.signer import ManifestSigner, SignedManifest
from kubelet.ceiling import Ceiling, KindCeiling
from kubelet.config import DaemonPlan, NodeConfig, relay_kinds_file
from kubelet.daemon.findings_report import FindingsReport
from kubelet.dispatch import Dispatcher
from kubelet.handlers.base import Handler, work_in_background
from kubelet.process import ticks_ms
from kubelet.session.link import RelayLink
from kubelet.session.relay_addresses import RelayAddresses
from kubelet.session.relay_frames import RelayFrames
from kubelet.session.renewal import Renewal, installer
from kubelet.telemetry import TelemetrySampler
from schemas import topics
from schemas.frames import FrameReader, OneWayType
from schemas.health import endless
from schemas.identity_files import IdentityFiles, NodeIdentity
from schemas.kinds import KindRegistry
from schemas.lines import LogThreshold
from schemas.process.service_manager import ReadAgain
from schemas.registry import SchemaRegistry
from schemas.spans import SpanSink, no_spans
from schemas.ulids import UlidSource

if TYPE_CHECKING:
    from schemas.settings import Reloaded


_REMEMBERED_ETAGS = 3
"""The relay names what it received when it answers a heartbeat: the newest may still be on its way."""


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """What nodes of one process share, and what comes in from outside.

    Attributes:
        relay_tls: makes a context for one connection to the relay; None where that is not over TLS.
        spans: takes the span of each command that is traced.
    """

    config: NodeConfig
    publisher: Publisher
    registry: SchemaRegistry
    reader: FrameReader
    kinds: KindRegistry
    now_ms: Callable[[], int]
    random_bytes: Callable[[int], bytes]
    rng: random.Random
    log: FilteringBoundLogger
    relay_tls: Callable[[], ssl.SSLContext | None] = lambda: None
    spans: SpanSink = no_spans


class Node:
    """The parts of one node and the tasks that they need.

    ``files`` is where a renewed leaf goes; a node without them does not renew.

    Attributes:
        relay_kinds: which kinds it announces.
        by_broker: the ETags of the newest manifests that were handed to the broker, the newest last.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what a node is made of
        self,
        identity: NodeIdentity,
        handlers: Sequence[Handler],
        hw_fingerprint: Mapping[str, Any],
        environment: NodeEnvironment,
        last_issued: Path | None,
        files: IdentityFiles | None = None,
    ) -> None:
        self.identity = identity
        self._handlers = handlers
        self._environment = environment
        self.publisher = environment.publisher
        self._sequence = 0
        self._published_identity = ""
        self.by_broker: deque[str] = deque(maxlen=_REMEMBERED_ETAGS)
        state_dir = None if last_issued is None else last_issued.parent
        kept = None if state_dir is None else relay_kinds_file(state_dir)
        capabilities = [handler.capability for handler in handlers]
        self.relay_kinds = RelayKinds(capabilities, environment.kinds, kept, ticks_ms, environment.log)
        self._signer = signer = ManifestSigner(
            identity=identity,
            hw_fingerprint=hw_fingerprint,
            capabilities=self.relay_kinds.capabilities(),
            ttl_ms=environment.config.ttl_ms,
            now_ms=environment.now_ms,
            registry=environment.registry,
            last_issued=last_issued,
            log=environment.log,
        )
        self.announcer = Announcer(signer, environment.config.heartbeat_s, environment.rng, environment.log)
        self.dispatcher = Dispatcher(
            identity.node_id,
            handlers,
            environment.kinds,
            environment.registry,
            environment.log,
            spans=environment.spans,
        )
        self.frames = RelayFrames(environment.log)
        self.telemetry = TelemetrySampler(
            handlers, environment.kinds, environment.registry, self._take_sample, environment.log
        )
        self.frames.on_frame(OneWayType.TELEMETRY_LEASE, self.telemetry.lease)
        FindingsReport(handlers, self.frames)
        renewal = None
        if files is not None:
            done = self.announcer.announce_now
            now_ms, log = environment.now_ms, environment.log
            renewal = Renewal(identity, files, installer(files), done, now_ms, ticks_ms, log)
        self.link = RelayLink(
            identity=identity,
            public_url=environment.config.relay_url,
            relays=RelayAddresses(environment.config.relays, identity.node_id, environment.rng, ticks_ms),
            reader=environment.reader,
            announcer=self.announcer,
            dispatcher=self.dispatcher,
            frames=self.frames,
            ulids=UlidSource(environment.now_ms, environment.random_bytes),
            log=environment.log,
            tls=environment.relay_tls,
            renewal=renewal,
            told_kinds=lambda kinds: self._announces(self.relay_kinds.welcomed(kinds)),
            kinds_refused=lambda: self._announces(self.relay_kinds.refused()),
        )
        self.announcer.add_sender(self._send_to_broker)
        self.announcer.add_sender(self.link.send_manifest)
        self.publisher.when_connected(self._publish_current)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for handler in self._handlers:
                    tasks.create_task(work_in_background(handler, self._environment.log))
                announcing = tasks.create_task(endless("manifest", self.announcer.run()))
                await self.link.run()
                # It ends only when the node was revoked. No relay accepts what it would announce: the daemon
                # stays up so that the operator can read this state on the loopback pages.
                announcing.cancel()
                self.announcer.loop.waits()
                await asyncio.Event().wait()
        finally:
            await self.telemetry.close()
            await self.dispatcher.close()

    def _announces(self, others: bool) -> bool:  # noqa: FBT001 - what has just been decided
        """Announce at once if ``others`` are the kinds that this node announces from now on."""
        if others:
            self._signer.capabilities = self.relay_kinds.capabilities()
            self.announcer.announce_now()
        return others

    def _take_sample(self, cap_id: str, sample: Mapping[str, Any]) -> None:
        """Send a sample to the relay, and publish it for other readers; what cannot be sent is left out."""
        self.frames.send(OneWayType.TELEMETRY, {"cap_id": cap_id, "sample": sample})
        text = json.dumps(sample, separators=(",", ":"), allow_nan=False)
        self.publisher.publish(topics.telemetry(self.identity.node_id), text.encode("ascii"), retain=False)

    def _publish_current(self) -> None:
        """Publish everything again: the connection is new, and the broker may have lost what it held."""
        self._published_identity = ""
        if (current := self.announcer.current) is not None and self._publish(current):
            self.announcer.published = current

    async def _send_to_broker(self, manifest: SignedManifest) -> bool:
        return self._publish(manifest)

    def _publish(self, manifest: SignedManifest) -> bool:
        """Publish identity and manifest, retained, then a heartbeat.

        The identity only if it is new, or the connection: the broker holds it, and its readers would verify
        it with every heartbeat.
        """
        publish, node_id = self.publisher.publish, self.identity.node_id
        # The identity first: a manifest whose leaf is not known yet is held as pending.
        identity = self.identity.chain_pem
        if identity != self._published_identity and publish(
            topics.identity(node_id), identity.encode("ascii"), retain=True
        ):
            self._published_identity = identity
        sent = publish(topics.announce(node_id), manifest.wire, retain=True)
        if sent:
            self.by_broker.append(manifest.etag)
        self._sequence += 1
        beat = {
            "node_id": node_id,
            "ts_ms": self._environment.now_ms(),
            "seq": self._sequence,
            "manifest_etag": manifest.etag,
            "expires_at_ms": manifest.expires_at_ms,
        }
        publish(
            topics.heartbeat(node_id), json.dumps(beat, separators=(",", ":")).encode("ascii"), retain=False
        )
        return sent


class NodeSettings:
    """The settings of ``node``, of the log of a daemon and of its ``ceiling``, which can be read again.

    Attributes:
        plan: with the settings that the daemon runs with.
    """

    def __init__(self, plan: DaemonPlan, node: Node, threshold: LogThreshold, ceiling: Ceiling) -> None:
        self.plan = plan
        self._node = node
        self._threshold = threshold
        self._ceiling = ceiling

    def read(self) -> ReadAgain:
        """Return the settings as they are now.

        Raises:
            ConfigError, StateError, OSError: they cannot be used.
        """
        from kubelet.settings import KUBELET, ceiling_in, load_settings  # noqa: PLC0415 - most daemons never need it
        from schemas.settings import read_sources, settings_of  # noqa: PLC0415 - as above

        plan = self.plan
        sources = read_sources(KUBELET, plan.flags, plan.config_file, os.environ)
        loaded = load_settings(sources, plan.state_dir)
        config, tables = loaded.config(), ceiling_in(loaded.settings)
        reloaded = settings_of(KUBELET.table, plan.settings).reloaded(loaded.settings)
        return ReadAgain(reloaded, lambda: self._apply(config, tables, reloaded))

    def _apply(self, config: NodeConfig, tables: Mapping[str, KindCeiling], reloaded: "Reloaded") -> None:
        self.plan = replace(self.plan, settings=reloaded.settings.serialized())
        self._threshold.level = config.log_level
        self._ceiling.replace(tables)
        if reloaded.applied.keys() & {"heartbeat", "ttl"}:
            self._node.announcer.change(config.heartbeat_s, config.ttl_ms)
