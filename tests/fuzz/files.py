"""Targets: what a program finds in its files: state, settings, an audit, a backup.

A torn disk or a hand can have put anything there. Each file is read by the part that reads it in earnest.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from kubelet.announce.signer import LastIssued
from kubelet.caller_tools.sessions import CallerNames, CallerNamesError
from kubelet.config import StoredConfigError, read_stored, store, stored_file
from kubelet.settings import KUBELET
from relay.audit.files import end_of_chain
from relay.audit.verify import VerifiedHeadError, read_verified_head, verify
from relay.cli.backup.archive import ArchiveError, pack, unpack
from relay.client.connect import UnreadableConfigError, edit_json, edit_toml
from relay.client.remote_tools.contracts import Pins, PinsError
from relay.settings.kept import KeptSettingsError, read_kept, write_kept
from relay.settings.table import RELAY
from relay.state.certificates import CaRecords
from relay.state.join_tokens import JoinTokens
from relay.state.ledger import Ledger, LedgerError
from relay.state.names import NameLedger
from relay.state.tokens import RevokedTokens
from schemas.error_roots import ConfigError
from schemas.kind_packages import KindPackageError, read_kind
from schemas.process.cli_config import as_document
from schemas.process.logs import make_logger
from schemas.settings import Program, RunOptionsError, Settings, read_run_options, read_sources
from tests.fakes.kind_package import INPUT_REF, KIND, OUTPUT_REF
from tests.fakes.lines import LogLines
from tests.fakes.signer import NOW_MS
from tests.fuzz import file_samples as samples
from tests.fuzz.scratch import directory, scratch
from tests.fuzz.target import REFUSED, Target, plain_json, text_of, tried

_AUDIT: Final = "audit/audit.jsonl"


def ledgers(data: bytes) -> None:
    """A ledger is read whole, in one reading or in two, or refused; an unfinished line is no entry."""
    half = data.find(b"\n", len(data) // 2) + 1
    for name, (read, errors) in _ledgers().items():
        path = scratch(name, b"")
        path.unlink()  # another file, so that nothing of the one before is continued
        scratch(name, data[:half])
        first = tried(read, *errors)
        scratch(name, data)
        second = tried(read, *errors)
        path.unlink()
        scratch(name, data)
        assert tried(read, *errors) == second
        assert first is not REFUSED or second is REFUSED


@cache
def _ledgers() -> Mapping[str, tuple[Callable[[], object], tuple[type[Exception], ...]]]:
    records = Ledger(directory() / "records", CaRecords())
    tokens = JoinTokens(directory() / "joins", lambda: NOW_MS, bytes)
    revoked = RevokedTokens(directory() / "revoked")
    names = NameLedger(directory() / "names", lambda: NOW_MS)
    errors = (LedgerError,)
    return {
        "records": (lambda: records.read().tenants(), errors),
        "joins": (lambda: [grant.facts(NOW_MS) for grant in tokens.all()], errors),
        "revoked": (revoked.jtis, errors),
        "names": (lambda: dict(names.read().by_node), errors),
    }


def audit(data: bytes) -> None:
    """A chain that holds with a hash that was noted begins as it did then; its end is found from the end."""
    path = scratch(_AUDIT, data)
    report, end = verify(path, expect=samples.AUDIT_HEAD), end_of_chain([path])
    assert report.lines == data.count(b"\n")
    assert report.unfinished is bool(end.unfinished)
    assert not report.holds or data.startswith(samples.AUDIT)
    if report.breaks == report.torn == 0 and end.linked:
        assert end.head == report.head


def verified_head(data: bytes) -> None:
    """What is kept of the last verification is a hash and a time, or damaged."""
    kept = tried(lambda: read_verified_head(scratch("audit-verified.json", data)), VerifiedHeadError, OSError)
    assert kept is REFUSED or (kept is not None and isinstance(kept.verified_at_ms, int))


def kept_settings(data: bytes) -> None:
    """What is kept is read again as it is written."""
    path = scratch("kept.json", data)
    kept = tried(lambda: read_kept(path), KeptSettingsError, OSError)
    if kept is not REFUSED:
        write_kept(path, kept)
        assert read_kept(path) == kept


def told_settings(data: bytes) -> None:
    """What a start was told is names of options alone, each with its text."""
    path, names = scratch("told/run.json", data), frozenset({"log_level", "kinds"})
    told = tried(lambda: read_run_options(path.parent, names), RunOptionsError, OSError)
    if told is not REFUSED:
        assert told.texts.keys() <= names | {"config"}
        assert all(isinstance(text, str) for text in told.texts.values())
        tried(lambda: Settings(KUBELET.table, [told.source()]), ConfigError)


def stored_config(data: bytes) -> None:
    """A node's own settings are read again as they are written."""
    state = scratch(f"node/{stored_file(Path()).name}", data).parent
    config = tried(lambda: read_stored(state), StoredConfigError, OSError)
    if config is not REFUSED and config is not None:
        store(config, state)
        assert read_stored(state) == config


def node_files(data: bytes) -> None:
    """Owners of names are kept in whole or refused; a time that cannot be is none."""
    log = make_logger("kubelet", LogLines())
    path = scratch("callers.json", data)
    names = tried(lambda: CallerNames(path, log), CallerNamesError)
    if names is not REFUSED:
        assert all(names.claim(name, owner) for name, owner in plain_json(data).items())
    last = LastIssued(scratch("last_issued_ms", data), NOW_MS, lambda: 0, log)
    assert 0 <= last.ms <= NOW_MS


def _settings(program: Program, data: bytes) -> None:
    file = scratch(f"{program.name}.toml", data)
    sources = read_sources(program, {}, file, {})
    assert all(problem.isprintable() for problem in sources.problems)
    settings = tried(sources.settings, ConfigError)
    if settings is not REFUSED:
        json.dumps(as_document(settings))
        assert sources.problems == ()


def relay_settings(data: bytes) -> None:
    """Every mistake in the settings is told in a printable line, and none is passed over."""
    _settings(RELAY, data)


def node_settings(data: bytes) -> None:
    """As above."""
    _settings(KUBELET, data)


def pins(data: bytes) -> None:
    """Pins that are damaged are refused; a tool that has changed is told from one that has not."""
    path = scratch("pins.json", data)
    read = tried(lambda: Pins(path, "server"), PinsError)
    if read is not REFUSED:
        for change in read.changes("tool", samples.SURFACE):
            assert str(change).isprintable()
        path.unlink()
        fresh = Pins(path, "server")
        fresh.accept("tool", samples.SURFACE)
        assert Pins(path, "server").changes("tool", samples.SURFACE) == []


def archive(data: bytes) -> None:
    """An archive holds the expected files alone, and packing them again loses nothing."""
    files = tried(lambda: unpack(data, samples.BACKUP.keys()), ArchiveError)
    if files is not REFUSED:
        assert files.keys() <= samples.BACKUP.keys()
        assert unpack(pack(files, NOW_MS), samples.BACKUP.keys()) == files


def client_configuration(data: bytes) -> None:
    """Putting a server in and taking it out leaves everything else of a client's configuration."""
    text = text_of(data)
    for edit, read in ((edit_json, _json), (edit_toml, _toml)):
        put_in = partial(edit, text, "servers", "edge", samples.SERVER)
        added = tried(put_in, UnreadableConfigError)
        if added is REFUSED:
            continue
        before, after = read(text), read(added)
        assert after["servers"].pop("edge") == samples.SERVER
        before.get("servers", {}).pop("edge", None)
        assert _filled(after) == _filled(before)
        assert "edge" not in read(edit(added, "servers", "edge", None)).get("servers", {})


def _filled(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if value != {}}


def _json(text: str) -> Any:
    return json.loads(text) if text.strip() else {}


def _toml(text: str) -> Any:
    return tomllib.loads(text)


def kind_package(data: bytes) -> None:
    """A kind of an installed package keeps every rule, or is refused with the file and the rule."""
    row, sent, answered, *_ = [*data.split(b"\0", 2), b"", b""]
    package = scratch("kind/kind.json", row).parent
    scratch(f"kind/documents/{INPUT_REF}.json", sent)
    scratch(f"kind/documents/{OUTPUT_REF}.json", answered)
    kind = tried(lambda: read_kind(package, KIND, dict), KindPackageError)
    if kind is not REFUSED:
        assert kind.kind.name == KIND
        assert set(kind.kind.short) <= {*"abcdefghijklmnopqrstuvwxyz0123456789_"}
        assert all(json.loads(document)["$id"].endswith(ref) for ref, document in kind.documents.items())


TARGETS: Final = {
    "ledgers": Target(ledgers, samples.LEDGERS),
    "audit": Target(audit, (samples.AUDIT,)),
    "verified_head": Target(verified_head, samples.VERIFIED_HEADS, max_bytes=1024),
    "kept_settings": Target(kept_settings, samples.KEPT_SETTINGS),
    "told_settings": Target(told_settings, samples.TOLD_SETTINGS),
    "stored_config": Target(stored_config, samples.STORED_CONFIGS),
    "node_files": Target(node_files, samples.NODE_FILES),
    "relay_settings": Target(relay_settings, samples.RELAY_SETTINGS),
    "node_settings": Target(node_settings, samples.NODE_SETTINGS),
    "pins": Target(pins, samples.PINS),
    "archive": Target(archive, (pack(samples.BACKUP, NOW_MS),), max_bytes=1 << 14),
    "client_configuration": Target(client_configuration, samples.CLIENT_CONFIGURATIONS),
    "kind_package": Target(kind_package, (samples.KIND_PACKAGE,)),
}
