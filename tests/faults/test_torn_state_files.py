"""A file of the state directory ends early, at any byte, as after a crash of a file system or a bad copy.

It is refused with an error, or what it held counts as lost. It is never taken for something else. What the
programs write themselves is there whole or as it was. Ledgers: ``tests/relay/state/test_every_kind.py``.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kubelet.announce.signer import LastIssued
from kubelet.caller_tools.sessions import CallerNames
from kubelet.config import NodeConfig, caller_ids_file, last_issued_file, read_stored, store, stored_file
from kubelet.session.tls import NodeTls
from kubelet.settings import LOG_LEVEL
from relay.audit.verify import keep_verified_head, read_verified_head
from relay.pki.authority import CertificateAuthority
from relay.settings.config import StateFiles
from relay.settings.kept import KeptSettings, read_kept, write_kept
from relay.state.key_files import load_or_create_key, read_key
from schemas.addresses import BrokerAddress
from schemas.error_roots import EdgeError
from schemas.identity_files import IdentityFiles
from schemas.process.logs import make_logger
from schemas.settings import RunOptions, Settings, read_run_options
from schemas.strict_json import MAX_SAFE_INTEGER
from tests.fakes.clock import FakeClock
from tests.fakes.disk import full_disk
from tests.fakes.lines import LogLines
from tests.fakes.signer import NOW_MS, TENANT

LOG = make_logger("relay", LogLines())
CLOCK = FakeClock(NOW_MS)


@dataclass(frozen=True)
class State:
    """The state of a relay and of a node, as the programs write it."""

    relay: StateFiles
    node: Path


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> State:
    relay = StateFiles(tmp_path_factory.mktemp("relay"))
    ca = authority(relay)
    ca.create()
    (node_id,) = ca.issue_mock(1, relay.root / "nodes", TENANT)
    node = relay.root / "nodes" / node_id
    store(NodeConfig(BrokerAddress("127.0.0.1", 1883), "http://127.0.0.1:8700"), node)
    told(node).keep({LOG_LEVEL.name}, Settings((LOG_LEVEL,), ()), Path("/etc/edge-kubelet/kubelet.toml"))
    names = CallerNames(caller_ids_file(node), LOG)
    assert all(names.claim(caller, f"{TENANT}/agent") for caller in ("one", "two"))
    last_issued(node).advance(NOW_MS, NOW_MS)
    load_or_create_key(relay.token_key, os.urandom)
    write_kept(relay.settings, KeptSettings(public_url="https://hub.example", tenant=TENANT))
    keep_verified_head(relay.audit_verified, "ab" * 32, NOW_MS)
    return State(relay, node)


def told(node: Path) -> RunOptions:
    return read_run_options(node, frozenset({LOG_LEVEL.name}))


def authority(relay: StateFiles) -> CertificateAuthority:
    return CertificateAuthority(relay.ca, CLOCK, os.urandom)


def last_issued(node: Path) -> LastIssued:
    return LastIssued(last_issued_file(node), MAX_SAFE_INTEGER, CLOCK.ticks_ms, LOG)


def identity(state: State) -> object:
    read = IdentityFiles(state.node).read()
    return read.node_id, read.kid, bytes(read.key), (read.root_pem or "").strip()


def trusted_servers(state: State) -> object:
    context = NodeTls(IdentityFiles(state.node), own_root=True).to_relay("https://hub.example")
    assert context is not None
    return context.get_ca_certs()


def owners(state: State) -> object:
    names = CallerNames(caller_ids_file(state.node), LOG)
    return tuple(names.claim(caller, f"{TENANT}/agent") for caller in ("one", "two"))


WHOLE_OR_NOTHING: Sequence[tuple[str, Callable[[State], Path], Callable[[State], object], object]] = [
    ("node_id", lambda state: IdentityFiles(state.node).node_id, identity, None),
    ("node.key", lambda state: IdentityFiles(state.node).key, identity, None),
    ("leaf.pem", lambda state: IdentityFiles(state.node).leaf, identity, None),
    ("root.pem", lambda state: IdentityFiles(state.node).root_certificate, identity, None),
    (
        "server-roots.pem",
        lambda state: IdentityFiles(state.node).server_roots,
        trusted_servers,
        None,
    ),
    ("run.json", lambda state: state.node / "run.json", lambda state: told(state.node).texts, None),
    ("kubelet.json", lambda state: stored_file(state.node), lambda state: read_stored(state.node), None),
    ("caller_ids.json", lambda state: caller_ids_file(state.node), owners, None),
    (
        "last_issued_ms",
        lambda state: last_issued_file(state.node),
        lambda state: last_issued(state.node).ms,
        0,
    ),
    (
        "token.key",
        lambda state: state.relay.token_key,
        lambda state: bytes(read_key(state.relay.token_key)),
        None,
    ),
    (
        "settings.json",
        lambda state: state.relay.settings,
        lambda state: read_kept(state.relay.settings),
        None,
    ),
    (
        "audit-verified.json",
        lambda state: state.relay.audit_verified,
        lambda state: read_verified_head(state.relay.audit_verified),
        None,
    ),
    (
        "ca/root.pem",
        lambda state: state.relay.ca / "root.pem",
        lambda state: authority(state.relay).root_pem().strip(),
        None,
    ),
]


def torn(path: Path, read: Callable[[], object]) -> list[object]:
    """Return what is read of ``path`` when it ends at each of its bytes; an expected error reads as None."""
    data, found = path.read_bytes(), list[object]()
    try:
        for length in range(len(data)):
            path.write_bytes(data[:length])
            try:
                found.append(read())
            except (EdgeError, OSError):
                found.append(None)
    finally:
        path.write_bytes(data)
    return found


@pytest.mark.parametrize(
    ("file_of", "read", "lost"),
    [pytest.param(*columns, id=name) for name, *columns in WHOLE_OR_NOTHING],
)
def test_a_torn_file_is_refused_or_lost_as_a_whole(
    state: State, file_of: Callable[[State], Path], read: Callable[[State], object], lost: object
) -> None:
    whole = read(state)
    assert whole not in (None, 0)
    found = torn(file_of(state), lambda: read(state))
    assert found[0] == lost
    # Whole without the end of its last line, at most.
    assert all(each in (lost, None) for each in found[:-1])
    assert found[-1] in (whole, lost, None)
    assert read(state) == whole


def test_a_disk_that_fills_up_in_the_middle_of_a_file_leaves_what_was_there(state: State) -> None:
    before = read_kept(state.relay.settings)
    size = len(state.relay.settings.read_bytes())
    for room in range(size):
        with full_disk(room), pytest.raises(OSError, match="too large"):
            write_kept(state.relay.settings, KeptSettings(public_url="https://other.example", tenant=TENANT))
        assert read_kept(state.relay.settings) == before
    assert [path.name for path in state.relay.root.glob(".*")] == []
