"""The settings of a running relay, read again, and what they change in it.

Must not decide which need a restart.
"""

from collections.abc import Callable
from dataclasses import dataclass

from relay.settings.config import RelayConfig
from relay.settings.table import LoadedRelaySettings
from schemas.process.settings_reload import ReadAgain
from schemas.settings import Reloaded, SerializedSettings, Settings


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
        """Return the settings that the relay runs with."""
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
