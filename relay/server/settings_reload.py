"""Reads the settings again at SIGHUP, and applies to the running relay those that need no restart.

All that can be applied, or nothing when the settings cannot be used. Must not decide which those are.
"""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from relay.config import RelayConfig
from relay.settings import LoadedSettings
from schemas.error_roots import ConfigError, OperatorError, StateError
from schemas.process.service_manager import ServiceManager
from schemas.settings import Settings
from schemas.text import printable


@dataclass(frozen=True, slots=True)
class ReloadSource:
    """The settings that a relay was started with, and what reads them again."""

    settings: Settings
    load: Callable[[], LoadedSettings]


class SettingsReload:
    """Applies changed settings: ``apply`` gets the configuration, and takes from it what reloads."""

    def __init__(
        self,
        source: ReloadSource,
        apply: Callable[[RelayConfig], None],
        manager: ServiceManager,
        log: FilteringBoundLogger,
    ) -> None:
        self._settings = source.settings
        self._load = source.load
        self._apply = apply
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
        try:
            loaded, config = await asyncio.to_thread(self._read)
        except (OperatorError, StateError, OSError) as error:
            problems = error.problems if isinstance(error, ConfigError) else (str(error),)
            self._log.error("settings not reloaded", problems=[printable(each) for each in problems])
            return
        reloaded = self._settings.reloaded(loaded.settings)
        self._settings = reloaded.settings
        self._apply(config)
        for name, text in reloaded.applied.items():
            self._log.info("setting reloaded", setting=name, value=printable(text))
        for name in reloaded.need_restart:
            self._log.warning("setting needs a restart", setting=name)
        self._log.info("settings read again", changed=len(reloaded.applied) + len(reloaded.need_restart))

    def _read(self) -> tuple[LoadedSettings, RelayConfig]:
        loaded = self._load()
        return loaded, loaded.config()
