"""``relay doctor``: what keeps calls from passing this relay, and what to do.

Must not change anything, nor need a relay that runs.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from relay.cli.checks import EXPLAINED, RelayChecks
from relay.cli.options import AsJson, usual_state_dir
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms
from relay.settings.table import RELAY, load_settings
from schemas.process.asked_process import AskedProcess
from schemas.process.cli_manual import example, group
from schemas.process.cli_settings import takes_settings
from schemas.process.doctor import Check
from schemas.process.doctor_command import run_doctor
from schemas.process.state_owner import act_as_owner_of
from schemas.settings_sources import Sources
from schemas.ulids import UlidSource

app = group("What keeps calls from passing this relay.")


@app.command(epilog=example("relay doctor", "relay doctor --explain broker"))
@takes_settings(RELAY)
def doctor(
    sources: Sources,
    explain: Annotated[str | None, typer.Option(metavar="CHECK", help="Explain one check.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check what calls through this relay need, one line each.

    The settings are those that the running relay has. The options are those of `relay run`: what a restart
    would give it. Exit code 0: all is well; 1: something will fail, or is not safe; 3: calls cannot be made.
    """
    raise SystemExit(run_doctor(EXPLAINED, partial(_checks, sources), explain, as_json=as_json))


def _checks(sources: Sources) -> Sequence[Check]:
    """Return the checks of the relay that runs, or that ``sources`` would start."""
    expected = load_settings(sources, usual_state_dir(), act_as_owner_of)
    process = AskedProcess.ask(RELAY, expected.state.root)
    running = process.sources()
    config = (expected if running is None else load_settings(running, expected.state.root)).config()
    authority = CertificateAuthority(config.state.ca, now_ms, os.urandom)
    ulids = UlidSource(now_ms, os.urandom)

    def new_id() -> str:
        return ulids.new().lower()

    return RelayChecks(config, process, expected.settings, authority, now_ms, new_id).all()
