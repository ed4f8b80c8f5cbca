"""The settings of a running node, read again: what they change in it.

Must not load what reads settings before it is asked to: most daemons never are.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kubelet.config import DaemonPlan, NodeConfig
from kubelet.daemon.node import Node
from schemas.log_level import LogThreshold
from schemas.process.settings_reload import ReadAgain

if TYPE_CHECKING:
    from schemas.settings import Reloaded


class NodeSettings:
    """The settings of ``node``, and of the log of a daemon that runs by ``plan``."""

    def __init__(self, plan: DaemonPlan, node: Node, threshold: LogThreshold) -> None:
        self._plan = plan
        self._node = node
        self._threshold = threshold

    def serialized(self) -> Mapping[str, Mapping[str, str]]:
        """Return the settings that the daemon runs with, as ``schemas.settings.Settings.serialized`` does."""
        return self._plan.settings

    def read(self) -> ReadAgain:
        """Return the settings as they are now.

        Raises:
            ConfigError, StateError, OSError: they cannot be used.
        """
        from kubelet.settings import KUBELET, load_settings  # noqa: PLC0415 - as in the module's docstring
        from schemas.settings import settings_of  # noqa: PLC0415 - as above
        from schemas.settings_sources import read_sources  # noqa: PLC0415 - as above

        plan = self._plan
        sources = read_sources(KUBELET, plan.flags, plan.config_file, os.environ)
        loaded = load_settings(sources, plan.state_dir)
        config = loaded.config()
        reloaded = settings_of(KUBELET.table, plan.settings).reloaded(loaded.settings)
        return ReadAgain(reloaded, lambda: self._apply(config, reloaded))

    def _apply(self, config: NodeConfig, reloaded: "Reloaded") -> None:
        self._plan = replace(self._plan, settings=reloaded.settings.serialized())
        self._threshold.level = config.log_level
        if reloaded.applied.keys() & {"heartbeat", "ttl"}:
            self._node.announcer.change(config.heartbeat_s, config.ttl_ms)
