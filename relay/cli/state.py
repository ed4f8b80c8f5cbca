"""The parts of the state directory that several commands open. Must not contain what a command does."""

import os
from pathlib import Path

from relay.cli.options import state_files
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms
from relay.state.kinds import NAME, OLDEST, StateKind, is_older
from relay.state.names import NameLedger
from relay.state.tokens import TokenKeys
from schemas.error_roots import OperatorError
from schemas.process.status_socket import NotRunningError, StalledError, read_status
from schemas.text import printable


class OlderRelayError(OperatorError):
    """A relay of the fleet does not know what a command would write; the text names it."""


def check_known(kind: StateKind, state_dir: Path | None) -> None:
    """Return if all relays of the fleet know ``kind``, as far as the relay of that state directory knows.

    A command that writes it calls this first: a relay that does not know an entry refuses every call.

    Raises:
        OlderRelayError: one does not.
    """
    if not is_older(OLDEST, kind.since):
        return
    try:
        others = read_status(state_files(state_dir).root).get("cluster", {}).get("others", [])
    except (NotRunningError, StalledError):
        return  # it keeps its entries back while it is not known whether the others know them
    for other in others:
        if is_older(version := other.get("version", OLDEST), kind.since):
            relay = f"relay {other['relay']} of this fleet has version {printable(version, 16)}"
            raise OlderRelayError(f"{relay}, and {kind.name} needs {kind.since}: upgrade it first")


def authority(state_dir: Path | None) -> CertificateAuthority:
    """Return the CA of that state directory."""
    return CertificateAuthority(state_files(state_dir).ca, now_ms, os.urandom)


def name_ledger(state_dir: Path | None) -> NameLedger:
    """Return the names of the nodes of that state directory."""
    check_known(NAME, state_dir)
    return NameLedger(state_files(state_dir).node_names, now_ms)


def token_keys(state_dir: Path | None) -> TokenKeys:
    """Return the keys of agents' tokens of that state directory."""
    return TokenKeys(state_files(state_dir).token_keys, authority(state_dir), now_ms)
