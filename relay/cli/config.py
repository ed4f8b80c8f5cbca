"""``relay config``: what the relay would run with, by the loader of ``relay run``."""

from relay.cli.options import usual_state_dir
from relay.settings import RELAY, LoadedSettings, load_settings
from schemas.process.cli_config import add_commands
from schemas.process.cli_manual import group
from schemas.settings_sources import Sources

app = group("The settings that the relay runs with.")


def _load(sources: Sources) -> LoadedSettings:
    return load_settings(sources, usual_state_dir())


add_commands(app, RELAY, _load)
