"""``kubelet doctor``: what keeps calls from reaching this node, and what to do.

Must not change anything, nor need a daemon that runs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from kubelet.cli.checks import EXPLAINED, NodeChecks
from kubelet.cli.options import AsJson, usual_state_dir
from kubelet.clock import now_ms
from kubelet.settings import KUBELET, load_settings
from schemas.identity_files import IdentityFiles
from schemas.process.cli_config import takes_settings
from schemas.process.cli_manual import example, group
from schemas.process.doctor import Check, run_doctor
from schemas.process.state_owner import act_as_owner_of
from schemas.process.status_view import AskedProcess
from schemas.settings_sources import Sources

app = group("What keeps calls from reaching this node.")


@app.command(epilog=example("edge-kubelet doctor", "edge-kubelet doctor --explain broker"))
@takes_settings(KUBELET)
def doctor(
    sources: Sources,
    explain: Annotated[str | None, typer.Option(metavar="CHECK", help="Explain one check.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check what calls to this node need, one line each.

    The settings are those that the running daemon has. The options are those of `edge-kubelet run`: what a
    restart would give it.

    Exit code 0: all is well; 1: something will fail, or is not safe; 3: calls cannot flow.
    """
    raise SystemExit(run_doctor(EXPLAINED, partial(_checks, sources), explain, as_json=as_json))


def _checks(sources: Sources) -> Sequence[Check]:
    """Return the checks of the daemon that runs, or that ``sources`` would start."""
    expected = load_settings(sources, usual_state_dir(), act_as_owner_of)
    files, process = IdentityFiles(expected.state_dir), AskedProcess.ask(KUBELET, expected.state_dir)
    running = process.sources()
    config = (expected if running is None else load_settings(running, expected.state_dir)).config()
    return NodeChecks(config, process, expected.settings, files, now_ms).all()
