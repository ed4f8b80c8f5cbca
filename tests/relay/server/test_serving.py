"""Settings that change while the relay runs, and how the process serves: collector, signals, start."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relay.server.serving import RelaySettings, ReloadSource
from relay.settings.config import EnvelopeMode, RelayConfig
from relay.settings.table import RELAY, LoadedRelaySettings, load_settings
from schemas.addresses import View
from schemas.lines import LogLevel
from schemas.process.logs import make_logger
from schemas.process.service_manager import ServiceManager, SettingsReload
from schemas.settings import read_sources
from tests.fakes.lines import LogLines

BROKER = 'broker = "127.0.0.1:1883"\n'


class Stage:
    """A reload of a file, and what it has applied."""

    applied: list[RelayConfig]

    def __init__(self, directory: Path) -> None:
        self.file = directory / "relay.toml"
        self.lines = LogLines()
        self.applied = []
        self.write("")
        source = ReloadSource(self._load().settings, self._load)
        log = make_logger("relay", self.lines)
        manager = ServiceManager(None, None, log)
        self.reload = SettingsReload(RelaySettings(source, self.applied.append).read, manager, log)

    def write(self, text: str) -> None:
        self.file.write_text(BROKER + text)
        self.file.chmod(0o600)

    def _load(self) -> LoadedRelaySettings:
        return load_settings(read_sources(RELAY, {"listen": "127.0.0.1:9"}, self.file, {}), self.file.parent)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


async def test_what_reloads_is_applied_and_what_does_not_is_named(stage: Stage) -> None:
    stage.write('agent_rps = 7\nenvelope = "off"\ntls_own = true\npublic_url = "https://relay.example"\n')
    await stage.reload.reload()
    [config] = stage.applied
    assert (config.per_agent.rate, config.envelope_mode) == (7, EnvelopeMode.OFF)
    assert [(line["setting"], line["value"]) for line in stage.lines.entries("setting reloaded")] == [
        ("agent_rps", "7"),
        ("envelope", "off"),
    ]
    restart = [line["setting"] for line in stage.lines.entries("setting needs a restart")]
    assert restart == ["public_url", "tls_own"]


async def test_every_setting_that_reloads_is_taken(stage: Stage) -> None:
    stage.write(
        'agent_rps = 7\nagent_concurrency = 2\ncaller_timeout = "5s"\nenvelope = "shadow"\n'
        'default_view = "kinds"\nlog_level = "error"\naudit_keep = "30d"\naudit_sync = "always"\n'
    )
    await stage.reload.reload()
    [config] = stage.applied
    assert (config.per_agent.concurrency, config.caller_timeout_s) == (2, 5)
    assert (config.default_view, config.log_level) == (View.KINDS, LogLevel.ERROR)
    reloaded = {line["setting"] for line in stage.lines.entries("setting reloaded")}
    assert reloaded == {setting.name for setting in RELAY.table if setting.reloads}


@pytest.mark.parametrize(
    "text",
    ["agent_rps = 7\nlistne = 1", "agent_rps = 7\nenvelope =", 'agent_rps = 7\ntls_key = "x"'],
    ids=["an unknown key", "no TOML", "a contradiction"],
)
async def test_a_broken_file_changes_nothing_and_says_so(stage: Stage, text: str) -> None:
    stage.write(text)
    await stage.reload.reload()
    assert stage.applied == []
    [line] = stage.lines.entries("settings not reloaded")
    assert len(line["problems"]) == 1
    stage.write("agent_rps = 8")
    await stage.reload.reload()
    assert [config.per_agent.rate for config in stage.applied] == [8]


async def test_a_signal_asks_for_it(stage: Stage) -> None:
    running = asyncio.create_task(stage.reload.run())
    await asyncio.sleep(0)
    stage.write("agent_rps = 9")
    os.kill(os.getpid(), signal.SIGHUP)
    await stage.lines.until("settings read again")
    running.cancel()
    assert [config.per_agent.rate for config in stage.applied] == [9]


pytestmark = pytest.mark.integration

_LOOK = """
import gc
from relay.server.serving import tune_collector

before = gc.get_threshold()
tune_collector()
larger = all(now > then for now, then in zip(gc.get_threshold(), before))
print(larger, gc.get_freeze_count() > 0, gc.isenabled())
"""


def test_the_collector_looks_less_often_and_not_at_what_is_there() -> None:
    command = [sys.executable, "-P", "-c", _LOOK]
    shown = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout
    assert shown.split() == ["True", "True", "True"]
