"""Runs one relay as a process: its environment, its log, the service manager and the listener.

Must not connect the parts with one another: ``relay.server.app`` does.
"""

import asyncio
import gc
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from relay.audit.log import AuditUnavailableError
from relay.http.listener import bind, bind_unix, serve
from relay.observability.metrics import Metrics
from relay.server.app import Relay
from relay.server.status import RelayStatus
from relay.settings.config import RelayConfig
from relay.settings.environment import RelayClock, RelayEnvironment, now_ms, ticks_ms
from relay.settings.table import LoadedRelaySettings
from schemas.health import endless, stalled
from schemas.kinds import KindRegistry
from schemas.lines import LogThreshold
from schemas.process.logs import fatal_errors_logged, open_log
from schemas.process.resources import keep_trimmed
from schemas.process.service_manager import ReadAgain, ServiceManager, SettingsReload
from schemas.process.spans import exported
from schemas.process.status_socket import served
from schemas.registry import SchemaRegistry
from schemas.settings import Reloaded, SerializedSettings, Settings
from schemas.ulids import UlidSource


@dataclass(frozen=True, slots=True)
class ReloadSource:
    """The settings that a relay was started with, and what reads them again."""

    settings: Settings
    load: Callable[[], LoadedRelaySettings]


class RelaySettings:
    """The settings of a relay; ``apply`` gets the configuration, and takes from it what reloads."""

    def __init__(self, source: ReloadSource, apply: Callable[[RelayConfig], None]) -> None:
        self._settings = source.settings
        self._load = source.load
        self._apply_config = apply

    def serialized(self) -> SerializedSettings:
        return self._settings.serialized()

    def read(self) -> ReadAgain:
        """Return the settings as they are now.

        Raises:
            ConfigError, StateError, OSError: they cannot be used.
        """
        loaded = self._load()
        config, reloaded = loaded.config(), self._settings.reloaded(loaded.settings)
        return ReadAgain(reloaded, lambda: self._apply(config, reloaded))

    def _apply(self, config: RelayConfig, reloaded: Reloaded) -> None:
        self._settings = reloaded.settings
        self._apply_config(config)


def tune_collector() -> None:
    """Make the garbage collector run less often.

    Thousands of nodes are a large heap that does not change, and a call of the old era leaves a few cycles
    behind in the SDK. With the default thresholds the collector walks the whole heap so often that such calls
    take nearly half as long again; with these, a few megabytes of garbage are collected later.

    All else stops while objects are walked, so the young generations are kept small: thousands of nodes that
    reconnect fill them every second.
    """
    gc.freeze()
    gc.set_threshold(2_000, 20, 500)


@dataclass(frozen=True, slots=True)
class _Listeners:
    """Bound sockets: ``public``, and that of the metrics if they have one."""

    public: socket.socket
    metrics: socket.socket | None


async def run_relay(  # noqa: PLR0913 - what comes in from outside
    config: RelayConfig,
    listener: socket.socket,
    stream: TextIO,
    registry: SchemaRegistry | None = None,
    kinds: KindRegistry | None = None,
    *,
    reload: ReloadSource | None = None,
) -> None:
    """Serve on ``listener``, which is bound, until cancelled.

    ``registry`` and ``kinds`` default to those that ship. With ``reload``, SIGHUP reads the settings again.

    Raises:
        StateError, ExposedFileError, OSError: as ``Relay``; a BrokerStartError of its own broker.
        FailedError: it has ended by itself.
    """
    metrics, threshold = Metrics(), LogThreshold(config.log_level)
    lost = metrics.log_lines_lost.inc
    logged = open_log("relay", stream, threshold=threshold, on_fault=metrics.fault, on_lost=lost)
    with (
        _metrics_listener(config) as metrics_listener,
        logged as (log, lines),
        exported(config.otlp, "edge-relay") as spans,
    ):
        environment = RelayEnvironment(
            config=config,
            registry=registry or SchemaRegistry(),
            kinds=kinds or KindRegistry(),
            ulids=UlidSource(now_ms, os.urandom),
            metrics=metrics,
            log=log,
            lines=lines,
            now_ms=now_ms,
            clock=RelayClock(now_ms, ticks_ms, log),
            ticks_ms=ticks_ms,
            monotonic=time.monotonic,
            random_bytes=os.urandom,
            spans=spans,
        )
        relay = Relay(environment)

        def apply(changed: RelayConfig) -> None:
            relay.apply(changed)
            threshold.level = changed.log_level

        manager = ServiceManager.of(os.environ, os.getpid(), log)
        settings = None if reload is None else RelaySettings(reload, apply)
        status = RelayStatus(relay, None if settings is None else settings.serialized)
        reloading = None if settings is None else SettingsReload(settings.read, manager, log)
        await relay.start_broker()
        with fatal_errors_logged(log):
            listeners = _Listeners(listener, metrics_listener)
            await _serve(relay, status, listeners, manager, reloading)


@contextmanager
def _metrics_listener(config: RelayConfig) -> Iterator[socket.socket | None]:
    if (place := config.metrics_listen) is None:
        yield None
        return
    with bind_unix(place) if isinstance(place, Path) else bind(place) as listener:
        listener.listen()  # a connection waits until the relay serves
        yield listener


async def _serve(
    relay: Relay,
    status: RelayStatus,
    listeners: _Listeners,
    manager: ServiceManager,
    reloading: SettingsReload | None,
) -> None:
    tune_collector()
    config, log, audit = relay.environment.config, relay.environment.log, relay.audit
    loops = relay.loops()

    async def drain() -> None:
        manager.stopping()
        await relay.drain()

    log.info(
        "relay started",
        url=config.public_url,
        listen=str(config.listen),
        broker=str(config.broker or "none: sessions alone"),
        audit_head=audit.head,
    )
    if config.old_metrics:
        log.warning("/metrics is on the public listener, and will not be in 0.4: set metrics_listen")
    if config.unnamed_proxy:
        log.warning(
            "all that a proxy of this machine forwards is limited as one address since 0.3: "
            "name the proxy in trusted_proxies"
        )
    try:
        async with served(config.state.root, status), asyncio.TaskGroup() as tasks:
            runs = {
                "parts": relay.run(),
                "service manager": manager.run(lambda: stalled(loops), status.line),
                "heap": keep_trimmed(),
            }
            if reloading is not None:
                runs["settings"] = reloading.run()
            if listeners.metrics is not None:
                runs["metrics"] = serve(relay.metrics_page, listeners.metrics, relay.metrics_connections)
            background = [tasks.create_task(endless(name, run)) for name, run in runs.items()]
            serving = serve(
                relay.application,
                listeners.public,
                relay.connections,
                relay.tls.served,
                started=manager.ready,
                drain=drain,
            )
            try:
                await endless("listener", serving)
            finally:
                for task in background:
                    task.cancel()
    finally:
        await relay.end_calls()
        with suppress(AuditUnavailableError):  # then the head is that of the newest line that is synced
            await asyncio.to_thread(audit.flush)
        log.info("relay ended", audit_head=audit.head)
        await relay.end()
