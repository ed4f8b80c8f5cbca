"""What holds of every file and kind of the table: torn, damaged, linked, exposed, ended, and documented.

A row that has no lines in ``LINES`` fails here: they are what these tests write.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.state.kinds import KINDS, files_of
from relay.state.ledger import Entry, Keyed, Ledger, LedgerError
from relay.state.merging import Merging, Rule, SharedLedger, StateFile, StateKind
from schemas.keys import base64url
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.shared import shared
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT
from tests.fakes.state_lines import JOIN_ID, LATER_MS, LINE, person_id, token_made

ROOT = Path(__file__).parents[3]
KID, SERVER_KID = "ab" * 32, "ef" * 32
OTHER_JOIN_ID = JOIN_ID[:-1] + "5"

LINES: Mapping[str, Sequence[Entry]] = {
    "leaf": [LINE["leaf"](0), LINE["leaf"](1)],
    "server_certificate": [
        {
            "action": "serve",
            "ts_ms": NOW_MS,
            "name": "relay",
            "kid": SERVER_KID,
            "serial": "3f",
            "not_after_ms": LATER_MS,
        }
    ],
    "revocation": [LINE["revocation"](0)],
    "root_rotation": [
        {
            "action": "rotate",
            "ts_ms": NOW_MS,
            "root": KID,
            "previous": SERVER_KID,
            "previous_until_ms": LATER_MS,
        }
    ],
    "join_token": [token_made(), token_made(OTHER_JOIN_ID)],
    "join_token_use": [
        LINE["join_token_use"](0),
        LINE["join_token_use"](0) | {"action": "count", "use": 1},
    ],
    "join_token_revocation": [
        {"action": "revoke", "ts_ms": NOW_MS, "id": OTHER_JOIN_ID},
        LINE["join_token_revocation"](0),
    ],
    "token_revocation": [LINE["token_revocation"](0), LINE["token_revocation"](1)],
    "token_key": [LINE["token_key"](0)],
    "seal": [LINE["seal"](0)],
    "issued_token": [
        {
            "jti": "one",
            "tenant": TENANT,
            "sub": "ant",
            "scopes": ["read_only"],
            "audience": "https://hub.example",
            "issued_at_ms": NOW_MS,
            "expires_at_ms": LATER_MS,
        }
    ],
    "person": [LINE["person"](0), LINE["person"](1)],
    # One of them is a person of whom another relay has not told yet.
    "person_revocation": [LINE["person_revocation"](0), LINE["person_revocation"](2)],
    "redemption": [LINE["redemption"](0), LINE["redemption"](0) | {"action": "count"}],
    "registration_key": [{"action": "key", "ts_ms": NOW_MS, "key": base64url(bytes(32))}],
    "invitation": [
        {
            "action": "invite",
            "ts_ms": NOW_MS,
            "person": person_id(0),
            "invitation": KID,
            "expires_at_ms": LATER_MS,
        }
    ],
    "passkey": [
        {
            "action": "passkey",
            "ts_ms": NOW_MS,
            "person": person_id(0),
            "invitation": KID,
            "credential": base64url(b"public"),
        }
    ],
    "grant": [
        {
            "action": "grant",
            "ts_ms": NOW_MS,
            "id": JOIN_ID,
            "handle": KID,
            "person": person_id(0),
            "client_id": "https://client.example/it",
            "client_name": "It",
            "origin": "client.example",
            "redirect": "https://client.example/back",
            "sub": "ada/client.example",
            "asserts": False,
            "remember": True,
            "asked": ["read"],
            "tenant": TENANT,
            "scopes": ["read"],
            "kinds": None,
            "nodes": None,
            "until_ms": LATER_MS,
            "made_ms": NOW_MS,
            "tokens": [[KID, 1]],
            "generation": 1,
            "rotated_at_ms": NOW_MS,
            "access": [["one", LATER_MS]],
        }
    ],
    "name": [
        {
            "action": "name",
            "ts_ms": NOW_MS,
            "node_id": NODE_ID,
            "tenant": TENANT,
            "label": "pump",
            "tags": ["gateway", "site=north"],
        },
        {"action": "forget", "ts_ms": NOW_MS, "node_id": OTHER_NODE_ID},
    ],
}


def lines_of(file: StateFile, kinds: Iterable[StateKind] = KINDS) -> Sequence[Entry]:
    """Return the lines of every kind in ``file``: what is made before what is said of it."""
    return [line for kind in sorted(kinds, key=_made_first) if kind.file is file for line in LINES[kind.name]]


def _made_first(kind: StateKind) -> int:
    return list(LINES).index(kind.name)


every_file = pytest.mark.parametrize("file", files_of(), ids=lambda file: file.path)
every_shared = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.form is not None], ids=lambda kind: kind.name
)


def written(path: Path, file: StateFile, lines: Sequence[Entry]) -> Ledger[Any]:
    """Return the ledger of ``file`` in ``path``, with ``lines``."""
    ledger = Ledger(path, file.empty(), secret=bool(file.secret))
    with ledger.locked():
        ledger.append(*lines)
    return ledger


def said(ledger: Ledger[Any]) -> object:
    """Return what the entries add up to, to be compared."""
    state = ledger.read()
    names = ["by_key"] if isinstance(state, Keyed) else [*vars(state)]
    return {name: repr(getattr(state, name)) for name in names}


def sharing(kind: StateKind, ledger: Ledger[Any], now_ms: int = NOW_MS) -> SharedLedger:
    issues = kind.rule is Rule.ISSUED
    return shared(kind.name, ledger, FakeClock(now_ms), issues=issues, is_endorsed=lambda _entry: True)


def test_every_kind_has_lines_that_are_of_it() -> None:
    assert LINES.keys() == {kind.name for kind in KINDS}
    for kind in KINDS:
        shown = [*kind.entries_in(lines_of(kind.file))]
        assert len(shown) == len(LINES[kind.name])
        assert all(kind.file.secret.isdisjoint(entry) for entry in shown)


@every_file
def test_of_a_torn_file_the_whole_lines_count(tmp_path: Path, file: StateFile) -> None:
    path, lines = tmp_path / "file", lines_of(file)
    written(path, file, lines)
    data = path.read_bytes()
    by_lines = []
    for count in range(len(lines) + 1):
        (tmp_path / f"{count}").mkdir()
        by_lines.append(said(written(tmp_path / f"{count}" / "file", file, lines[:count])))
    for length in range(len(data)):
        path.write_bytes(data[:length])
        ledger = Ledger(path, file.empty(), secret=bool(file.secret))
        assert said(ledger) == by_lines[data[:length].count(b"\n")]
    # What is appended next begins a line of its own.
    path.write_bytes(data[:-1])
    assert said(written(path, file, lines[-1:])) == by_lines[-1]


@every_file
@pytest.mark.parametrize("line", ["no entry", "[]", "{}", '{"action":"another"}', '"text"', "1", "null"])
def test_a_line_that_is_not_understood_is_not_skipped(tmp_path: Path, file: StateFile, line: str) -> None:
    path = tmp_path / "file"
    ledger = written(path, file, lines_of(file))
    ledger.read()
    with path.open("a") as opened:
        opened.write(f"{line}\n")
    with pytest.raises(LedgerError, match="is damaged: line"):
        ledger.read()


@every_file
def test_a_link_is_not_followed(tmp_path: Path, file: StateFile) -> None:
    written(tmp_path / "file", file, lines_of(file))
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="link"):
        Ledger(tmp_path / "link", file.empty(), secret=bool(file.secret)).read()


@every_file
@pytest.mark.parametrize("mode", [0o644, 0o666], ids=["read", "write"])
def test_what_others_can_change_or_may_not_read_is_not_used(
    tmp_path: Path, file: StateFile, mode: int
) -> None:
    ledger = written(tmp_path / "file", file, lines_of(file))
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    (tmp_path / "file").chmod(mode)
    if file.secret or mode & 0o022:
        with pytest.raises(OSError, match="file"):
            ledger.read()
    else:
        ledger.read()


@every_file
@given(data=st.data())
def test_a_member_of_any_other_value_is_an_entry_or_damage(
    tmp_path_factory: pytest.TempPathFactory, file: StateFile, data: st.DataObject
) -> None:
    lines = [dict(line) for line in lines_of(file)]
    line = data.draw(st.sampled_from(lines))
    name = data.draw(st.sampled_from([*line]))
    line[name] = data.draw(
        st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=40), st.lists(st.text()))
    )
    path = tmp_path_factory.mktemp("fuzzed") / "file"
    path.touch(0o600)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), "ascii")
    ledger = Ledger(path, file.empty(), secret=bool(file.secret))
    with suppress(LedgerError):
        ledger.read()


@every_shared
def test_what_is_shared_fits_its_document_and_is_the_same_elsewhere(
    tmp_path: Path, kind: StateKind, registry: SchemaRegistry
) -> None:
    lines = lines_of(kind.file)
    one = sharing(kind, written(tmp_path / "one", kind.file, lines))
    entries = one.settle({}, frozenset())
    document = registry.load(f"cluster.{kind.name}@1.0.0")
    assert entries
    for key, entry in entries.items():
        assert document.is_valid(entry)
        assert one.form.key_of(entry) == key
        assert kind.file.secret.isdisjoint(entry)
    if kind.rule is not Rule.ORDERED:  # what was decided here is appended, whatever the stream has
        assert one.settle({}, frozenset(entries)) == {}
    made = [line for line in lines if line.get("action") == "create"]
    ledger = written(tmp_path / "other", kind.file, made)
    other = SharedLedger(kind, ledger, merging(kind))
    other.settle(entries, entries)
    again = {key: one.form.entries(ledger.read())[key] for key in entries}
    assert again == dict(entries)
    before = ledger.path.read_bytes()
    other.settle(entries, entries)
    assert ledger.path.read_bytes() == before


def merging(kind: StateKind) -> Merging:
    """Return how a relay merges that takes entries of ``kind`` from others."""
    assert kind.form is not None
    log = make_logger("relay", LogLines())
    trusted = {kind.name: lambda _entry: True}
    return Merging(FakeClock(NOW_MS), log, issues=kind.form.holder_takes, is_endorsed=trusted)


@every_shared
def test_what_has_ended_is_shared_no_more_and_stays_in_the_file(tmp_path: Path, kind: StateKind) -> None:
    ledger = written(tmp_path / "file", kind.file, lines_of(kind.file))
    one = sharing(kind, ledger)
    before = ledger.path.read_bytes()
    ends = {key: one.form.end_ms_of(entry) for key, entry in one.settle({}, frozenset()).items()}
    last_ms = max((end_ms for end_ms in ends.values() if end_ms is not None), default=NOW_MS)
    in_time = sharing(kind, ledger, last_ms - 1).settle({}, frozenset())
    assert {key for key, end_ms in ends.items() if end_ms in {None, last_ms}} <= in_time.keys()
    later = sharing(kind, ledger, last_ms).settle({}, frozenset())
    assert later.keys() == {key for key, end_ms in ends.items() if end_ms is None}
    assert ledger.path.read_bytes() == before


def test_the_table_in_the_architecture_is_that_of_the_code() -> None:
    rows = [
        f"| `{kind.name}` | `{kind.file.path}` | *{kind.rule}* "
        f"| {', '.join(sorted(kind.file.secret)) or '-'} "
        f"| {'yes' if kind.file.copied else 'no'} | {kind.since if kind.form else '-'} |"
        for kind in KINDS
    ]
    documented = (ROOT / "docs" / "architecture.md").read_text("utf-8").splitlines()
    head = documented.index("| kind | file | rule | secret | in the copy for another relay | since |")
    assert documented[head + 2 : head + 2 + len(rows)] == rows, "\n".join(rows)
    assert documented[head + 2 + len(rows) :][:1] in ([], [""])
