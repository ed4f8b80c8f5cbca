"""Reads the settings again at SIGHUP, and applies to the running node those that need no restart.

All that can be applied, or nothing when the settings cannot be used. Must not load what reads settings before
it is asked to: most daemons never are.
"""

import asyncio
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from structlog.typing import FilteringBoundLogger

from kubelet.config import DaemonPlan, NodeConfig
from kubelet.daemon.node import Node
from schemas.error_roots import ConfigError, OperatorError, StateError
from schemas.log_level import LogThreshold
from schemas.process.service_manager import ServiceManager
from schemas.text import printable

if TYPE_CHECKING:
    from kubelet.settings import LoadedSettings


class SettingsReload:
    """Applies changed settings to ``node`` and to the log of a daemon that runs by ``plan``."""

    def __init__(
        self,
        plan: DaemonPlan,
        node: Node,
        threshold: LogThreshold,
        manager: ServiceManager,
        log: FilteringBoundLogger,
    ) -> None:
        self._plan = plan
        self._node = node
        self._threshold = threshold
        self._manager = manager
        self._log = log

    async def run(self) -> None:
        """Reload at each SIGHUP until cancelled."""
        asked = asyncio.Event()
        # Until the loop is closed: without a handler the signal would end a program that is draining.
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
        while True:
            await asked.wait()
            asked.clear()
            self._manager.reloading()
            await self.reload()
            self._manager.ready()

    async def reload(self) -> None:
        """Read the settings and apply them; the log names each that has changed, or what is wrong."""
        from kubelet.settings import KUBELET, load_settings  # noqa: PLC0415 - as in the module's docstring
        from schemas.settings import settings_of  # noqa: PLC0415 - as above
        from schemas.settings_sources import read_sources  # noqa: PLC0415 - as above

        plan = self._plan

        def load() -> tuple["LoadedSettings", NodeConfig]:
            sources = read_sources(KUBELET, plan.flags, plan.config_file, os.environ)
            loaded = load_settings(sources, plan.state_dir)
            return loaded, loaded.config()

        try:
            loaded, config = await asyncio.to_thread(load)
        except (OperatorError, StateError, OSError) as error:
            problems = error.problems if isinstance(error, ConfigError) else (str(error),)
            self._log.error("settings not reloaded", problems=[printable(each) for each in problems])
            return
        reloaded = settings_of(KUBELET.table, plan.settings).reloaded(loaded.settings)
        self._plan = replace(plan, settings=reloaded.settings.texts())
        self._threshold.level = config.log_level
        if reloaded.applied.keys() & {"heartbeat", "ttl"}:
            self._node.announcer.change(config.heartbeat_s, config.ttl_ms)
        for name, text in reloaded.applied.items():
            self._log.info("setting reloaded", setting=name, value=printable(text))
        for name in reloaded.need_restart:
            self._log.warning("setting needs a restart", setting=name)
        self._log.info("settings read again", changed=len(reloaded.applied) + len(reloaded.need_restart))
