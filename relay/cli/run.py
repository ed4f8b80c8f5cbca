"""``relay run``: reads the settings, and serves. Must not hold what the relay does."""

import os
from functools import partial

import typer

from relay.broker.nats_server import first_free
from relay.cli.options import usual_state_dir
from relay.settings.kept import write_kept
from relay.settings.table import RELAY, LoadedRelaySettings, load_settings
from schemas.process.cli_config import takes_settings
from schemas.process.cli_manual import example, group
from schemas.process.state_owner import act_as_owner_of
from schemas.settings_sources import Sources, read_sources

app = group("Run the relay.")


@app.command(epilog=example("relay run --broker mqtts://mqtt.example --listen 0.0.0.0:443 --tls-own"))
@takes_settings(RELAY)
def run(sources: Sources) -> None:
    """Run the relay.

    Each option is also a setting: --listen is listen in relay.toml, and the variable RELAY_LISTEN.
    `relay config show` prints which value holds, and where it stands.
    """
    from relay.audit.log import held_alone  # noqa: PLC0415 - as below
    from relay.cli.serve import serve  # noqa: PLC0415 - the server's parts, for this command alone
    from relay.server.serving import ReloadSource  # noqa: PLC0415 - as above

    def load() -> LoadedRelaySettings:
        again = read_sources(RELAY, sources.flags, sources.named_file, os.environ)
        return load_settings(again, usual_state_dir())

    loaded = load_settings(sources, usual_state_dir(), partial(act_as_owner_of, for_good=True))
    broker = loaded.broker(first_free)
    config, notes = loaded.config(broker), list(broker.notes)
    loaded.told.check_file(sources.named_file, sources.file)
    if config.state.ca.exists():
        # Not in a directory that is named by mistake: the next start would use what was kept there.
        with held_alone(config.state.audit):  # nor while another relay runs by it
            write_kept(config.state.settings, loaded.to_keep(broker))
            replaced = loaded.keep_told(sources)
        notes += [f"not as it was told before: {', '.join(replaced)}"] if replaced else []
    for note in notes:
        typer.echo(f"relay: {note}", err=True)
    # Read again with what is kept now: a reload must find no difference by it.
    serve(config, ReloadSource(load_settings(sources, usual_state_dir()).settings, load))
