"""The one table of what the operator and the relay decide, and keep: a row for each kind, and for each file.

From it follow the files' paths, the backup and what another relay's copy has of it, what relays of a fleet
share and how that is merged, what a running relay watches, and `relay state show`. A new kind is a row, and a
document ``cluster.<kind>@1.0.0`` if it is shared. Must not read a file, nor apply what it says.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from relay.state.certificates import LEAVES, REVOCATIONS, CaRecords
from relay.state.join_tokens import JOIN_TOKEN_REVOCATIONS, JOIN_TOKEN_USES, JoinGrants
from relay.state.ledger import Entry, Keyed, Ledger, LedgerState
from relay.state.merging import Merging, Rule, SharedForm, SharedLedger
from relay.state.names import NAMES, Names
from relay.state.tokens import TOKEN_KEYS, TOKEN_REVOCATIONS, endorsed_in, issued_in, revoked_in

OLDEST = "0.2"
"""The version that a relay is taken for which does not say its own; those before cannot be in its fleet."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file of JSON lines.

    Attributes:
        name: names it in the log, and to the operator.
        path: below the state directory.
        holds: what it is for, in a few words.
        empty: makes the state of no entries.
        watched: whether a running relay looks for changes of it.
        applied: whether these take effect by themselves; what uses the file reads it for each use otherwise.
        copied: whether another relay of the fleet starts with a copy.
        secret: the members of its entries that are shown to no one.
    """

    name: str
    path: str
    holds: str
    empty: Callable[[], LedgerState]
    watched: bool = True
    applied: bool = True
    copied: bool = False
    secret: frozenset[str] = frozenset()

    def in_directory(self, root: Path) -> Path:
        return root / self.path

    def ledger(self, root: Path) -> Ledger[Any]:
        """Return what reads and appends to it below ``root``."""
        return Ledger(self.in_directory(root), self.empty(), secret=bool(self.secret))


@dataclass(frozen=True, slots=True)
class StateKind:
    """Entries that are merged by one rule; several kinds may be in one file.

    Attributes:
        form: how they are shared; None if they are *local*.
        since: the version from which relays know it: with an older one in the fleet it is not shared.
        actions: what the member ``action`` of its lines may be; none if all lines of the file are of it.
    """

    name: str
    file: StateFile
    rule: Rule
    form: SharedForm | None = None
    since: str = OLDEST
    actions: tuple[str, ...] = ()

    def entries_in(self, lines: Iterable[Entry]) -> Iterator[Entry]:
        """Yield the entries of this kind among ``lines``, without members that are secret."""
        for line in lines:
            if not self.actions or line.get("action") in self.actions:
                yield {name: value for name, value in line.items() if name not in self.file.secret}


CERTIFICATES = StateFile(
    "leaves", "ca/ledger.jsonl", "the certificates that were issued and revoked", CaRecords, copied=True
)
REVOKED_TOKENS = StateFile(
    "tokens",
    "revoked_tokens.jsonl",
    "the agent tokens that were revoked",
    partial(Keyed, revoked_in),
    copied=True,
)
JOIN_TOKENS = StateFile(
    "join tokens",
    "join_tokens.jsonl",
    "the join tokens, by which nodes may enrol, and their keys",
    JoinGrants,
    applied=False,
    secret=frozenset({"key"}),
)
VERIFYING_KEYS = StateFile(
    "token keys",
    "token_keys.jsonl",
    "the keys that agent tokens are verified with, as the CA endorses them",
    partial(Keyed, endorsed_in),
    copied=True,
)
NODE_NAMES = StateFile("names", "node_names.jsonl", "the labels and tags of nodes", Names, copied=True)
ISSUED_TOKENS = StateFile(
    "issued tokens",
    "issued_tokens.jsonl",
    "what the agent tokens that were issued allow, without the tokens",
    partial(Keyed, issued_in),
    watched=False,
)

NAME = StateKind("name", NODE_NAMES, Rule.ORDERED, NAMES)
KINDS = (
    # Revocations first: there are thousands of leaves.
    StateKind("token_revocation", REVOKED_TOKENS, Rule.FINAL, TOKEN_REVOCATIONS),
    StateKind("token_key", VERIFYING_KEYS, Rule.ENDORSED, TOKEN_KEYS),
    StateKind("revocation", CERTIFICATES, Rule.FINAL, REVOCATIONS, actions=("revoke",)),
    StateKind(
        "join_token_revocation",
        JOIN_TOKENS,
        Rule.FINAL,
        JOIN_TOKEN_REVOCATIONS,
        actions=("revoke", "revoke_other"),
    ),
    StateKind("join_token_use", JOIN_TOKENS, Rule.ISSUED, JOIN_TOKEN_USES, actions=("spend", "count")),
    StateKind("leaf", CERTIFICATES, Rule.ISSUED, LEAVES, actions=("issue",)),
    NAME,
    StateKind("server_certificate", CERTIFICATES, Rule.LOCAL, actions=("serve",)),
    StateKind("root_rotation", CERTIFICATES, Rule.LOCAL, actions=("rotate",)),
    StateKind("join_token", JOIN_TOKENS, Rule.LOCAL, actions=("create",)),
    StateKind("issued_token", ISSUED_TOKENS, Rule.LOCAL),
)


def is_older(version: str, since: str) -> bool:
    """Return whether a relay of ``version`` does not know what relays know from ``since`` on."""
    return _minor(version) < _minor(since)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def files_of(kinds: Iterable[StateKind] = KINDS) -> Sequence[StateFile]:
    """Return the files of ``kinds``, each once."""
    return list(dict.fromkeys(kind.file for kind in kinds))


def watched_names() -> Sequence[str]:
    """Return the names of the files that a running relay watches."""
    return [file.name for file in files_of() if file.watched]


def kinds_in(file: StateFile, kinds: Iterable[StateKind] = KINDS) -> Sequence[str]:
    """Return the names of the kinds in ``file`` that relays share."""
    return [kind.name for kind in kinds if kind.file is file and kind.form is not None]


def shared_ledgers(
    ledgers: Mapping[StateFile, Ledger[Any]], merging: Merging, kinds: Iterable[StateKind] = KINDS
) -> Sequence[SharedLedger]:
    """Return what relays of a fleet have in common of ``kinds``, whose files are ``ledgers``.

    Raises:
        KeyError: a file is missing from ``ledgers``.
        ValueError: nothing says which entries of an *endorsed* kind are endorsed.
    """
    return [
        SharedLedger(kind.name, kind.rule, kind.form, kind.since, ledgers[kind.file], merging)
        for kind in kinds
        if kind.form is not None
    ]
