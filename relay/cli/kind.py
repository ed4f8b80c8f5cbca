"""``relay kind``: packages of kinds, whose documents the relay reads. Must not hold how one is installed."""

from relay.cli.options import AsJson, StateDir, state_files
from relay.settings.config import SERVICE_KINDS, kinds_directory
from relay.settings.table import KINDS, RELAY
from schemas.process.cli_kinds import KindCommands, KindName, WheelFile
from schemas.process.cli_manual import example, group
from schemas.process.cli_service import DryRun

app = group("Kinds of an operator's own, in packages.")
_COMMANDS = KindCommands(RELAY, KINDS, SERVICE_KINDS, run_here=False)


@app.command(epilog=example("relay kind install acme_uptime-1.0.0-py3-none-any.whl"))
def install(
    wheel: WheelFile, state_dir: StateDir = None, dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """Put the package of a kind where the relay finds its documents. Its code does not run here.

    So it may be for another machine, and what it needs is left out: that is for the nodes.
    """
    place = kinds_directory(state_files(state_dir).root)
    _COMMANDS.install(place, wheel, dry_run=dry_run, as_json=as_json)


@app.command(epilog=example("relay kind uninstall acme.uptime"))
def uninstall(
    name: KindName, state_dir: StateDir = None, dry_run: DryRun = False, as_json: AsJson = False
) -> None:
    """Remove the package that brings a kind."""
    place = kinds_directory(state_files(state_dir).root)
    _COMMANDS.uninstall(place, name, dry_run=dry_run, as_json=as_json)


@app.command("list", epilog=example("relay kind list"))
def list_installed(state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """List the packages that `relay kind install` has installed, and their kinds."""
    _COMMANDS.show(kinds_directory(state_files(state_dir).root), as_json=as_json)
