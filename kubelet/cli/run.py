"""``kubelet run``: reads the settings, and becomes the daemon. Must not hold what the daemon does."""

import os
import sys
from functools import partial
from importlib.metadata import version

import typer

from kubelet.cli.options import socket_group, socket_of, usual_state_dir
from kubelet.config import DaemonPlan
from kubelet.lock import held_alone
from kubelet.settings import KUBELET, LOOPBACK_PORT, SOCKET, load_settings
from schemas.identity_files import IdentityFiles
from schemas.process.cli_config import takes_settings
from schemas.process.state_owner import act_as_owner_of
from schemas.settings_sources import Sources


@takes_settings(KUBELET)
def run(sources: Sources) -> None:
    """Run the daemon. Broker and relay are those of the enrolment unless given.

    Each option is also a setting: --ttl is ttl in kubelet.toml, and the variable KUBELET_TTL.
    `edge-kubelet config show` prints which value holds, and where it stands.
    """
    loaded = load_settings(sources, usual_state_dir(), partial(act_as_owner_of, for_good=True))
    config, directory, settings = loaded.config(), loaded.state_dir, loaded.settings
    if not IdentityFiles(directory).are_absent():
        with held_alone(directory):  # not while another daemon runs by what is kept
            replaced = loaded.keep_told(sources)
        if replaced:
            typer.echo(f"kubelet: not as it was told before: {', '.join(replaced)}", err=True)
    place = socket_of(settings.get(SOCKET), directory)
    if place is None:
        typer.echo(
            "local agents cannot connect: the state directory's path is too long; name a --socket", err=True
        )
    plan = DaemonPlan(
        config,
        directory,
        settings[LOOPBACK_PORT],
        place,
        socket_group(),
        settings=settings.serialized(),
        flags=sources.flags,
        config_file=sources.named_file,
        version=version("edge-kubelet"),
    )
    # The same process goes on as the daemon, without what only a command line needs. -P: else Python would
    # run a json.py of the working directory, and run it as root. no_debug_ranges: a traceback names the line
    # without the column, and each loaded module takes less memory.
    command = [sys.executable, "-P", "-X", "no_debug_ranges", "-m", "kubelet.daemon", plan.to_json()]
    # One arena: glibc would give each thread of the daemon one of its own, for memory that few of them need.
    environment = {"MALLOC_ARENA_MAX": "1", **os.environ}
    os.execve(command[0], command, environment)  # noqa: S606 - our own interpreter, with what was just checked
