"""``relay run``, which keeps the settings and becomes the server, and ``relay config``, which shows them.

Must not contain what the relay does, nor show a secret.
"""

import os
import sys

import typer

from relay.cli.options import settings_of_start, usual_state_dir
from relay.cli.server_process import ServerPlan
from relay.settings.kept import write_kept
from relay.settings.table import READ_AT_START, RELAY
from schemas.process import cli_config
from schemas.process.cli_config import takes_settings
from schemas.process.cli_manual import example, group
from schemas.settings import Sources

app = group("Run the relay.")
config_app = group("The settings that the relay runs with.")
cli_config.add_commands(config_app, RELAY, settings_of_start, READ_AT_START)


@app.command(epilog=example("relay run --listen 0.0.0.0:443 --tls-own --public-url https://hub.example"))
@takes_settings(RELAY)
def run(sources: Sources) -> None:
    """Run the relay.

    Each option is also a setting: --listen is listen in relay.toml, and the variable RELAY_LISTEN.
    `relay config show` prints which value holds, and where it stands.
    """
    # Of the extra alone, without which there is no server: this is said before all else, and nothing is kept.
    import httptools  # noqa: F401, PLC0415

    from relay.audit.log import held_alone  # noqa: PLC0415 - for this command alone
    from relay.broker.nats_server import first_free  # noqa: PLC0415 - as above

    loaded = settings_of_start(sources, for_good=True)
    broker = loaded.broker(first_free)
    config, notes = loaded.config(broker), list(broker.notes)
    if config.state.ca.exists():
        # Not in a directory that is named by mistake: the next start would use what was kept there.
        with held_alone(config.state.audit):  # nor while another relay runs by it
            write_kept(config.state.settings, loaded.to_keep(broker))
            replaced = loaded.keep_told(sources)
        notes += [f"not as it was told before: {', '.join(replaced)}"] if replaced else []
    for note in notes:
        typer.echo(f"relay: {note}", err=True)
    plan = ServerPlan(sources.flags, sources.named_file, usual_state_dir())
    # The same process goes on as the server, without what only a command line needs. -P: else Python runs
    # a json.py of the working directory, as root.
    command = [sys.executable, "-P", "-m", "relay.cli.server_process", plan.to_json()]
    os.execv(command[0], command)  # noqa: S606 - our own interpreter, with what was just checked
