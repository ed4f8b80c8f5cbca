"""``kubelet config``: what the daemon would run with, by the loader of ``kubelet run``.

Must not start anything, nor show a secret.
"""

from kubelet.cli.options import usual_state_dir
from kubelet.settings import KUBELET, LoadedNodeSettings, load_settings
from schemas.process.cli_config import add_commands
from schemas.process.cli_manual import group
from schemas.process.state_owner import act_as_owner_of
from schemas.settings_sources import Sources

app = group("The settings that the daemon runs with.")


def _load(sources: Sources) -> LoadedNodeSettings:
    return load_settings(sources, usual_state_dir(), act_as_owner_of)


add_commands(app, KUBELET, _load)
