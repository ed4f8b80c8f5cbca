"""``relay config``: what the relay would run with, by the loader of ``relay run``.

Must not start anything, nor show a secret.
"""

from relay.cli.options import usual_state_dir
from relay.settings.table import RELAY, LoadedRelaySettings, load_settings
from schemas.process.cli_config import add_commands
from schemas.process.cli_manual import group
from schemas.process.state_owner import act_as_owner_of
from schemas.settings_sources import Sources

app = group("The settings that the relay runs with.")


def _load(sources: Sources) -> LoadedRelaySettings:
    return load_settings(sources, usual_state_dir(), act_as_owner_of)


add_commands(app, RELAY, _load)
