"""``kubelet doctor``: what keeps calls from reaching this node, and what to do.

Must not change anything, nor need a daemon that runs.
"""

from typing import Annotated

import typer

from kubelet.cli.checks import NodeChecks
from kubelet.cli.options import AsJson, usual_state_dir
from kubelet.clock import now_ms
from kubelet.settings import BROKER, KUBELET, PLAIN, RELAY, STATE_DIR, load_settings
from schemas.identity_files import IdentityFiles
from schemas.process.cli_manual import example, group
from schemas.process.cli_settings import takes_settings
from schemas.process.doctor_command import run_doctor
from schemas.settings_sources import Sources

app = group("What keeps calls from reaching this node.")


@app.command(epilog=example("sudo -u edge-kubelet kubelet doctor", "kubelet doctor --explain broker"))
@takes_settings(KUBELET, STATE_DIR, RELAY, BROKER, PLAIN)
def doctor(
    sources: Sources,
    explain: Annotated[str | None, typer.Option(metavar="CHECK", help="Explain one check.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check what calls to this node need, one line each. Run it as the daemon's user.

    Exit code 0: all is well; 1: something will fail, or is not safe; 3: calls cannot flow.
    """
    loaded = load_settings(sources, usual_state_dir())
    checks = NodeChecks(loaded.config(), IdentityFiles(loaded.state_dir), now_ms).all()
    raise SystemExit(run_doctor(checks, explain, as_json=as_json))
