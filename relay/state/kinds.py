"""The one table of what the operator and the relay decide, and keep: a row for each kind, and for each file.

From it follow the files' paths, the backup and what another relay's copy has of it, what relays of a fleet
share and how that is merged, what a running relay watches, and `relay state show`. A new kind is a row, and a
document ``cluster.<kind>@1.0.0`` if it is shared. Must not read a file, nor apply what it says.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from relay.state.certificates import LEAVES, REVOCATIONS, CaRecords
from relay.state.grants import GrantState
from relay.state.join_tokens import JOIN_TOKEN_REVOCATIONS, JOIN_TOKEN_USES, JoinGrants
from relay.state.ledger import Keyed, Ledger
from relay.state.merging import SINCE_SEALED, Merging, Rule, SharedLedger, StateFile, StateKind
from relay.state.names import NAMES, Names
from relay.state.people import PEOPLE as SHARED_PEOPLE
from relay.state.people import PERSON_REVOCATIONS, People
from relay.state.redemptions import REDEMPTIONS, RedemptionState
from relay.state.seal import SEALS, read_seal
from relay.state.tokens import (
    TOKEN_KEYS,
    TOKEN_REVOCATIONS,
    read_endorsement,
    read_issued_token,
    read_revocation,
)

CERTIFICATES = StateFile(
    "leaves", "ca/ledger.jsonl", "the certificates that were issued and revoked", CaRecords, copied=True
)
REVOKED_TOKENS = StateFile(
    "tokens",
    "revoked_tokens.jsonl",
    "the agent tokens that were revoked",
    partial(Keyed, read_revocation),
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
    partial(Keyed, read_endorsement),
    copied=True,
)
NODE_NAMES = StateFile("names", "node_names.jsonl", "the labels and tags of nodes", Names, copied=True)
ISSUED_TOKENS = StateFile(
    "issued tokens",
    "issued_tokens.jsonl",
    "what the agent tokens that were issued allow, without the tokens",
    partial(Keyed, read_issued_token),
    watched=False,
)

PEOPLE = StateFile(
    "people",
    "people.jsonl",
    "the people who may sign in, and their passkeys",
    People,
    secret=frozenset({"key"}),
)
GRANTS = StateFile(
    "grants",
    "grants.jsonl",
    "what people have given to clients, and until when",
    GrantState,
    watched=False,
    lasting=GrantState.lasting,
)
REDEEMED = StateFile(
    "redemptions",
    "redemptions.jsonl",
    "which codes and refresh tokens were redeemed, by their digests",
    RedemptionState,
    watched=False,
    lasting=RedemptionState.lasting,
)
FLEET_SEAL = StateFile(
    "seal",
    "cluster_seal.jsonl",
    "that relays of the fleet seal what they say to each other, as the CA endorses it",
    partial(Keyed, read_seal),
    copied=True,
)

NAME = StateKind("name", NODE_NAMES, Rule.ORDERED, NAMES)
PERSON = StateKind("person", PEOPLE, Rule.ISSUED, SHARED_PEOPLE, SINCE_SEALED, ("person",))
KINDS = (
    # Revocations first: there are thousands of leaves.
    StateKind("token_revocation", REVOKED_TOKENS, Rule.FINAL, TOKEN_REVOCATIONS),
    StateKind("token_key", VERIFYING_KEYS, Rule.ENDORSED, TOKEN_KEYS),
    # The command that decides it sees that every relay knows it: each has a certificate.
    StateKind("seal", FLEET_SEAL, Rule.ENDORSED, SEALS),
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
    StateKind("person_revocation", PEOPLE, Rule.FINAL, PERSON_REVOCATIONS, SINCE_SEALED, ("revoke",)),
    PERSON,
    StateKind("redemption", REDEEMED, Rule.ISSUED, REDEMPTIONS, SINCE_SEALED, ("claim", "count")),
    StateKind("invitation", PEOPLE, Rule.LOCAL, actions=("invite",)),
    StateKind("passkey", PEOPLE, Rule.LOCAL, actions=("passkey", "reset")),
    StateKind("registration_key", PEOPLE, Rule.LOCAL, actions=("key",)),
    StateKind("grant", GRANTS, Rule.LOCAL, actions=("grant", "end")),
)


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
    return [SharedLedger(kind, ledgers[kind.file], merging) for kind in kinds if kind.form is not None]
