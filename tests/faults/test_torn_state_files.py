"""A file of the state directory ends early, at any byte, as after a crash of a file system or a bad copy.

It is refused with an error, or what it held counts as lost; of a ledger the whole entries count. It is never
taken for something else. What the programs write themselves is there whole or as it was.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kubelet.announce.signer import LastIssued
from kubelet.caller_tools.sessions import CallerNames
from kubelet.config import NodeConfig, read_stored, store, stored_file
from kubelet.daemon.composition import caller_ids_file, last_issued_file
from kubelet.session.tls import NodeTls
from kubelet.settings import LOG_LEVEL
from relay.audit.verify import keep_verified_head, read_verified_head
from relay.pki.authority import CertificateAuthority
from relay.settings.config import StateFiles
from relay.settings.kept import KeptSettings, read_kept, write_kept
from relay.state.join_tokens import JoinTokens
from relay.state.key_files import load_or_create_key, read_key
from relay.state.names import NameLedger
from relay.state.tokens import IssuedToken, IssuedTokens, RevokedTokens, TokenKeys
from schemas.addresses import BrokerAddress
from schemas.error_roots import EdgeError
from schemas.identity_files import IdentityFiles
from schemas.process.logs import make_logger
from schemas.settings import Settings
from schemas.strict_json import MAX_SAFE_INTEGER
from schemas.told_settings import ToldSettings, read_told
from tests.fakes.clock import FakeClock
from tests.fakes.disk import full_disk
from tests.fakes.lines import LogLines
from tests.fakes.signer import NODE_ID, NOW_MS, TENANT, key_named

LOG = make_logger("relay", LogLines())
CLOCK = FakeClock(NOW_MS)
JTI = "01HZX9K3M4P7Q8R9S0T1V2W3X4"
OTHER_JTI = "01HZX9K3M4P7Q8R9S0T1V2W3X5"


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
    node_id, other = ca.issue_mock(2, relay.root / "nodes", TENANT)
    ca.revoke(other)
    node = relay.root / "nodes" / node_id
    store(NodeConfig(BrokerAddress("127.0.0.1", 1883), "http://127.0.0.1:8700"), node)
    told(node).keep({LOG_LEVEL.name}, Settings((LOG_LEVEL,), ()), Path("/etc/edge-kubelet/kubelet.toml"))
    names = CallerNames(caller_ids_file(node), LOG)
    assert all(names.claim(caller, f"{TENANT}/agent") for caller in ("one", "two"))
    last_issued(node).advance(NOW_MS, NOW_MS)
    load_or_create_key(relay.token_key, os.urandom)
    for name in ("one", "other"):
        token_keys(relay).add(bytes(key_named(name).verify_key), NOW_MS)
    write_kept(relay.settings, KeptSettings(public_url="https://hub.example", tenant=TENANT))
    keep_verified_head(relay.audit_verified, "ab" * 32, NOW_MS)
    for jti in (JTI, OTHER_JTI):
        RevokedTokens(relay.revoked_tokens).revoke(jti, NOW_MS)
        IssuedTokens(relay.issued_tokens).add(IssuedToken(jti, TENANT, "agent", (), "a", NOW_MS, NOW_MS + 1))
    for label in ("pump", "greenhouse"):
        NameLedger(relay.node_names, CLOCK).label(NODE_ID, TENANT, label)
    for _ in range(2):
        join_tokens(relay).create(TENANT, 60, 1, ca.root_pem())
    return State(relay, node)


def told(node: Path) -> ToldSettings:
    return read_told(node, frozenset({LOG_LEVEL.name}))


def authority(relay: StateFiles) -> CertificateAuthority:
    return CertificateAuthority(relay.ca, CLOCK, os.urandom)


def join_tokens(relay: StateFiles) -> JoinTokens:
    return JoinTokens(relay.join_tokens, CLOCK, os.urandom)


def token_keys(relay: StateFiles) -> TokenKeys:
    return TokenKeys(relay.token_keys, authority(relay), CLOCK)


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


LEDGERS: Sequence[tuple[str, Callable[[State], Path], Callable[[State], Sequence[object]]]] = [
    (
        "ca/ledger.jsonl",
        lambda state: state.relay.ca / "ledger.jsonl",
        lambda state: [*authority(state.relay).records().issued, *authority(state.relay).revoked_kids()],
    ),
    (
        "join_tokens.jsonl",
        lambda state: state.relay.join_tokens,
        lambda state: [grant.facts(NOW_MS)["id"] for grant in join_tokens(state.relay).all()],
    ),
    (
        "revoked_tokens.jsonl",
        lambda state: state.relay.revoked_tokens,
        lambda state: sorted(RevokedTokens(state.relay.revoked_tokens).jtis()),
    ),
    (
        "token_keys.jsonl",
        lambda state: state.relay.token_keys,
        lambda state: list(token_keys(state.relay).entries()),
    ),
    (
        "issued_tokens.jsonl",
        lambda state: state.relay.issued_tokens,
        lambda state: list(IssuedTokens(state.relay.issued_tokens).all()),
    ),
    (
        "node_names.jsonl",
        lambda state: state.relay.node_names,
        lambda state: [
            name.label for name in NameLedger(state.relay.node_names, CLOCK).read().by_node.values()
        ],
    ),
]


@pytest.mark.parametrize(("file_of", "read"), [pytest.param(*columns, id=name) for name, *columns in LEDGERS])
def test_of_a_torn_ledger_the_whole_entries_count(
    state: State, file_of: Callable[[State], Path], read: Callable[[State], Sequence[object]]
) -> None:
    file = file_of(state)
    lines = file.read_bytes().splitlines(keepends=True)
    by_entries: list[object] = []
    data = file.read_bytes()
    try:
        for count in range(len(lines) + 1):
            file.write_bytes(b"".join(lines[:count]))
            by_entries.append(list(read(state)))
    finally:
        file.write_bytes(data)
    whole_lines = [data[:length].count(b"\n") for length in range(len(data))]
    expected = [by_entries[count] for count in whole_lines]
    assert torn(file, lambda: list(read(state))) == expected
    assert list(read(state)) == by_entries[-1]


def test_a_disk_that_fills_up_in_the_middle_of_a_file_leaves_what_was_there(state: State) -> None:
    before = read_kept(state.relay.settings)
    size = len(state.relay.settings.read_bytes())
    for room in range(size):
        with full_disk(room), pytest.raises(OSError, match="too large"):
            write_kept(state.relay.settings, KeptSettings(public_url="https://other.example", tenant=TENANT))
        assert read_kept(state.relay.settings) == before
    assert [path.name for path in state.relay.root.glob(".*")] == []
