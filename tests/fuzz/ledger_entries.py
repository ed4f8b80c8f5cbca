"""Target: the stream of the fleet's ledgers, whose entries a relay adds to its own files."""

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, cast

from nats.aio.msg import Msg

from relay.cluster.ledger_stream import LedgerStream
from relay.pki.authority import CaLedger
from relay.state.join_tokens import JoinTokens, digest_of
from relay.state.merging import SharedLedger
from relay.state.names import NameLedger
from relay.state.sharer import NotUnderstoodError
from relay.state.tokens import RevokedTokens, TokenKey, TokenKeys, key_of
from schemas.canonical import jcs
from schemas.certificates import endorse_token_key
from schemas.files import PRIVATE
from schemas.identity import first_certificate_in, kid_of
from schemas.registry import SchemaRegistry
from schemas.times import SystemMs
from schemas.ulids import UlidSource
from tests.fakes.hostile_texts import is_clean
from tests.fakes.lines import LogLines
from tests.fakes.relay_keys import unsigned
from tests.fakes.shared import shared
from tests.fakes.signer import NODE_ID, NOW_MS, TENANT, SimulatedCa, key_named
from tests.fuzz.live import check_log
from tests.fuzz.scratch import directory
from tests.fuzz.target import Target, text_of

if TYPE_CHECKING:
    from nats.aio.client import Client


class _Ca(SimulatedCa):
    """A CA that endorses keys of tokens."""

    def roots(self) -> Sequence[str]:
        return [self.root_pem]

    def endorse_token_key(self, statement: bytes) -> Mapping[str, str]:
        return {kid_of(first_certificate_in(self.root_pem)): endorse_token_key(self.key, statement)}


_CA: Final = _Ca()
_USES: Final = 2
_FIRST: Final = "edge.f.ledger."
_METADATA: Final = "$JS.ACK.edge_f_ledger.reader.1.7.7.1700000000000000000.0"


def ledger_entry(data: bytes) -> None:
    """An entry is refused in words, or is in a file once, which is read again."""
    subject, _, value = data.partition(b" ")
    lines, path = LogLines(), directory() / "shared"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    (path / "ledger.jsonl").touch(PRIVATE)
    join = _join_tokens().create(TENANT, 3600, _USES, _CA.root_pem)
    assert join.id == _JOIN_ID
    stream = LedgerStream("f", _ledgers(lines), _registry(), _now_ms, unsigned())
    message = Msg(cast("Client", None), f"{_FIRST}{text_of(subject)}", _METADATA, value)
    try:
        read = stream.read(message)
    except NotUnderstoodError as error:
        text = str(error)
        assert is_clean(text)
        return
    arrived, known = {read.key: read.entry}, frozenset({read.key})
    (ledger,) = [each for each in _ledgers(lines) if each.kind == read.kind]
    ledger.settle(arrived, known)
    written = _files()
    ledger.settle(arrived, known)
    assert _files() == written
    again = {ledger.kind: ledger.settle({}, frozenset()) for ledger in _ledgers(lines)}  # as after a restart
    if read.kind == "token_key":
        assert again[read.kind].keys() == (known if read.entry == _TOKEN_KEY else set())
    if read.kind == "join_token_use":
        counts = read.entry["token"] == _JOIN_DIGEST and read.entry["use"] <= _USES
        assert again[read.kind].keys() == (known if counts else set())
    if read.kind in {"revocation", "token_revocation", "join_token_revocation"}:
        assert again[read.kind].keys() == known
    check_log(lines)


def _ledgers(lines: LogLines) -> tuple[SharedLedger, ...]:
    path = directory() / "shared"
    issued, keys, joins = CaLedger(path, lambda: None), TokenKeys(path / "keys", _CA, _now_ms), _join_tokens()
    return (
        shared("revocation", issued),
        shared("token_revocation", RevokedTokens(path / "revoked").ledger),
        shared("token_key", keys.ledger, is_endorsed=keys.is_endorsed, lines=lines),
        shared("join_token_revocation", joins.ledger),
        shared("join_token_use", joins.ledger, issues=True),
        shared("leaf", issued),
        shared("name", NameLedger(path / "names", _now_ms).ledger, lines=lines),
    )


def _join_tokens() -> JoinTokens:
    # Without chance, so that the token that is made has one id.
    return JoinTokens(directory() / "shared" / "joins", _now_ms, bytes)


def _now_ms() -> SystemMs:
    return SystemMs(NOW_MS)


def _files() -> Mapping[str, bytes]:
    return {file.name: file.read_bytes() for file in (directory() / "shared").iterdir()}


@cache
def _registry() -> SchemaRegistry:
    return SchemaRegistry()


def _entry(kind: str, key: str, entry: Mapping[str, Any]) -> bytes:
    return f"{kind}.{key} {json.dumps(entry)}".encode()


_KID: Final = "ab" * 32
_KEY: Final = TokenKey(bytes(key_named("the key of tokens").verify_key), 0, 0)
((_ROOT, _SIGNATURE),) = _CA.endorse_token_key(jcs(_KEY.members())).items()
_TOKEN_KEY: Final = _KEY.members() | {"root": _ROOT, "signature": _SIGNATURE}
_JOIN_ID: Final = UlidSource(_now_ms, bytes).new()
_JOIN_DIGEST: Final = digest_of(_JOIN_ID)
_JOIN_USE: Final = {"token": _JOIN_DIGEST, "use": 1, "node_id": NODE_ID, "expires_at_ms": NOW_MS + 3_600_000}
TARGETS: Final = {
    "ledger_entry": Target(
        ledger_entry,
        (
            _entry(
                "revocation",
                _KID,
                {"kid": _KID, "revoked_ms": NOW_MS, "serial": "1f", "not_after_ms": NOW_MS + 1},
            ),
            _entry("token_revocation", sha256(b"a").hexdigest(), {"jti": "a", "revoked_ms": NOW_MS}),
            _entry(
                "leaf",
                _KID,
                {
                    "kid": _KID,
                    "serial": "1f",
                    "node_id": NODE_ID,
                    "tenant": TENANT,
                    "public_key": _KID,
                    "issued_ms": NOW_MS,
                    "not_after_ms": NOW_MS,
                },
            ),
            _entry(
                "name", NODE_ID, {"node_id": NODE_ID, "tenant": TENANT, "label": "den", "tags": ["gateway"]}
            ),
            _entry("name", NODE_ID, {"node_id": NODE_ID, "forgotten": True}),
            _entry("token_key", key_of(_TOKEN_KEY), _TOKEN_KEY),
            _entry("join_token_revocation", _JOIN_DIGEST, {"token": _JOIN_DIGEST, "revoked_ms": NOW_MS}),
            _entry("join_token_use", f"{_JOIN_DIGEST}-1", _JOIN_USE),
        ),
        max_bytes=4096,
    ),
}
