"""The parts of the state directory that several commands open. Must not contain what a command does."""

import os
from pathlib import Path

from relay.cli.options import state_files
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms
from relay.state.names import NameLedger
from relay.state.token_keys import TokenKeys


def authority(state_dir: Path | None) -> CertificateAuthority:
    """Return the CA of that state directory."""
    return CertificateAuthority(state_files(state_dir).ca, now_ms, os.urandom)


def name_ledger(state_dir: Path | None) -> NameLedger:
    """Return the names of the nodes of that state directory."""
    return NameLedger(state_files(state_dir).node_names, now_ms)


def token_keys(state_dir: Path | None) -> TokenKeys:
    """Return the keys of agents' tokens of that state directory."""
    return TokenKeys(state_files(state_dir).token_keys, authority(state_dir), now_ms)
