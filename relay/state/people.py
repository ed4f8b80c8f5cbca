"""The people who may sign in, their passkeys, and the one-time links by which they make these.

| action | members besides ``ts_ms`` |
|---|---|
| `person` | `person`: an id; `name`, `role`, `tenant` |
| `admit` | `person`; `issuer`, `subject`: who that is at a provider; `role`, `tenant`: what it says since |
| `invite` | `person`, `invitation`: the digest of the link's secret; `expires_at_ms` |
| `passkey` | `person`, `invitation`: the link that it was made by; `credential`: its public part |
| `reset` | `person`: all passkeys and links of that person end, and what a provider has said |
| `revoke` | `person` |
| `key` | `key`: what registrations of clients are authenticated with |

The secret of a link is in the link alone. Relays of a fleet share who there is, and who is revoked; passkeys,
links and what a provider says are on the relay with the CA's key. Must not know WebAuthn, nor what a person
may give to a client.
"""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

from relay.state.ledger import Entry, Ledger, LedgerState
from relay.state.merging import LazyEntries, SharedForm
from schemas.addresses import is_loopback
from schemas.error_roots import OperatorError
from schemas.identity import TENANT_PATTERN
from schemas.keys import base64url, from_base64url
from schemas.text import quoted
from schemas.times import SystemClock
from schemas.ulids import UlidSource

ALL_TENANTS = "*"
INVITATION_MS = 3_600_000
INVITATION_PATH = "/invitation"
KEY_BYTES = 32
_UNIQUE = 12
"""Of a person's id, of which the last 16 characters are random."""
MAX_PASSKEYS = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_AT_PROVIDER = "signs in at the provider of people.oidc, and has no passkeys: choose another name"


def can_have_passkeys(public_url: str) -> bool:
    """Return whether a browser makes passkeys for the relay at ``public_url``: of a name, over TLS.

    >>> can_have_passkeys("https://hub.example"), can_have_passkeys("http://localhost:8700")
    (True, True)
    >>> can_have_passkeys("https://192.0.2.1"), can_have_passkeys("http://hub.example")
    (False, False)
    """
    parts = urlsplit(public_url)
    host = parts.hostname or ""
    if host == "localhost":
        return True
    is_address = ":" in host or host.rpartition(".")[2].isdigit() or is_loopback(host)
    return parts.scheme == "https" and not is_address


class PeopleError(OperatorError):
    """A person is not invited, or not known; the text says why."""


class InvitationError(OperatorError):
    """A one-time link is not known, used or expired."""


class PersonRole(StrEnum):
    """What a person may give to clients: an operator everything, a member to look at what is not private."""

    OPERATOR = "operator"
    MEMBER = "member"


@dataclass(frozen=True, slots=True)
class Person:
    """One person.

    Attributes:
        tenant: the one that the person belongs to; of an operator it may be ``ALL_TENANTS``.
        passkeys: the public part of each, as the library of WebAuthn has it, by when it was made in ms.
        invitations: until when each link is good, in ms, by the digest of its secret.
        provider: issuer and subject of one who signs in at an OpenID Connect provider, and has no passkeys.
        admitted: whether what that provider said at the last sign-in allows one.
        resets: how often all that the person had was ended.
    """

    id: str
    name: str
    role: PersonRole
    tenant: str
    passkeys: tuple[tuple[int, bytes], ...] = ()
    invitations: tuple[tuple[str, int], ...] = ()
    revoked: bool = False
    provider: tuple[str, str] | None = None
    admitted: bool = False
    resets: int = 0

    @property
    def proofs(self) -> Sequence[bytes]:
        """What a session may have begun with: it ends with that, also if the same is said again later."""
        passkeys = [known for _, known in self.passkeys]
        if self.provider is None or not self.admitted:
            return passkeys
        return [*passkeys, "\0".join((*self.provider, str(self.resets))).encode()]

    def state(self, now_ms: int, issuer: str | None) -> str:
        """Return ``active``, ``invited``, ``expired`` if not used in time, ``ended``, or ``revoked``.

        ``issuer``: the provider whose people may sign in.
        """
        if self.revoked:
            return "revoked"
        if self.provider is not None:
            return "active" if self.admitted and self.provider[0] == issuer else "ended"
        if self.passkeys:
            return "active"
        return "invited" if any(now_ms < until for _, until in self.invitations) else "expired"


class People(LedgerState):
    """The people by id, and the key of registrations once there is one.

    Attributes:
        issuer: the provider whose people may sign in; what another one said counts for nothing.
        revoked: when each was revoked, in ms since 1970, by id. It may come before the person does.
    """

    def __init__(self, issuer: str | None = None) -> None:
        self.issuer = issuer
        self.by_id: dict[str, Person] = {}
        self.revoked: dict[str, int] = {}
        self.key: bytes | None = None

    def named(self, name: str) -> Person | None:
        """Return the person of that name who is not revoked: there is at most one."""
        return next((each for each in self.by_id.values() if each.name == name and not each.revoked), None)

    def active(self, person_id: str) -> Person | None:
        """Return the person who has that id and may sign in."""
        person = self.by_id.get(person_id)
        if person is None or person.revoked or not person.proofs:
            return None
        return person if person.provider is None or person.provider[0] == self.issuer else None

    def giver(self, person_id: str) -> Person | None:
        """Return the person who has that id, and for whom clients may go on with what they were given.

        Also one whose passkeys were ended, and who has made no other yet: that ends none of it.
        """
        person = self.by_id.get(person_id)
        if person is not None and person.provider is None and not person.revoked:
            return person
        return self.active(person_id)

    def of_provider(self, subject: str) -> Person | None:
        """Return who is ``subject`` at the provider, revoked or not."""
        return next((each for each in self.by_id.values() if each.provider == (self.issuer, subject)), None)

    def invited_by(self, secret: str, now_ms: int) -> Person:
        """Return who may make a passkey with the link of that secret.

        Raises:
            InvitationError: it admits no person.
        """
        digest = digest_of(secret)
        for person in self.by_id.values():
            for invitation, until in person.invitations:
                if invitation == digest and now_ms < until and not person.revoked:
                    return person
        raise InvitationError("this link was used, or has expired: ask the operator for another")

    def apply(self, entry: Entry) -> None:
        if entry["action"] == "key":
            if len(key := from_base64url(entry["key"])) != KEY_BYTES:
                raise ValueError("not a key")
            self.key = self.key or key
            return
        if entry["action"] == "person":
            person = Person(
                str(entry["person"]), str(entry["name"]), PersonRole(entry["role"]), str(entry["tenant"])
            )
            self.by_id[person.id] = replace(person, revoked=person.id in self.revoked)
            return
        if entry["action"] == "revoke":
            self.revoked.setdefault(entry["person"], int(entry["ts_ms"]))
            if entry["person"] not in self.by_id:
                return
        person = self.by_id[entry["person"]]
        self.by_id[person.id] = _changed(person, entry)


def _changed(person: Person, entry: Entry) -> Person:
    match entry["action"]:
        case "invite":
            digest = entry["invitation"]
            if not _DIGEST.fullmatch(digest):
                raise ValueError(digest)
            return replace(person, invitations=(*person.invitations, (digest, int(entry["expires_at_ms"]))))
        case "passkey":
            made = (int(entry["ts_ms"]), from_base64url(entry["credential"]))
            left = tuple(each for each in person.invitations if each[0] != entry["invitation"])
            return replace(person, passkeys=(*person.passkeys, made), invitations=left)
        case "admit":
            return replace(
                person,
                role=PersonRole(entry["role"]),
                tenant=str(entry["tenant"]),
                provider=(str(entry["issuer"]), str(entry["subject"])),
                admitted=True,
            )
        case "reset":
            return replace(person, passkeys=(), invitations=(), admitted=False, resets=person.resets + 1)
        case "revoke":
            return replace(person, passkeys=(), invitations=(), admitted=False, revoked=True)
        case other:
            raise ValueError(other)


class PeopleLedger:
    """The list in ``path``, which is made with the first entry.

    Everything raises LedgerError if the file is damaged, and OSError if it cannot be used.
    """

    def __init__(
        self,
        path: Path,
        now_ms: SystemClock,
        random_bytes: Callable[[int], bytes],
        issuer: str | None = None,
    ) -> None:
        self.ledger = Ledger(path, People(issuer), secret=True)
        self._now_ms = now_ms
        self._random_bytes = random_bytes

    def read(self) -> People:
        return self.ledger.read()

    def invite(self, name: str, role: PersonRole, tenant: str) -> tuple[Person, str]:
        """Return the person ``name``, and the secret of a new link: who is known gets another passkey by it.

        Raises:
            PeopleError: the name or the tenant has not its form; or who is known has another role or tenant.
        """
        if not _NAME.fullmatch(name):
            raise PeopleError(
                f"{quoted(name)} is no name of a person: letters, digits and . _ @ + -, 64 at most"
            )
        if not re.fullmatch(TENANT_PATTERN, tenant) and (role, tenant) != (PersonRole.OPERATOR, ALL_TENANTS):
            raise PeopleError(
                f"{quoted(tenant)} is no tenant: lower-case letters, digits, _ and -; "
                "* for an operator of all"
            )
        with self.ledger.locked() as people:
            person, entries = people.named(name), list[Entry]()
            if person is None:
                person = Person(UlidSource(self._now_ms, self._random_bytes).new(), name, role, tenant)
                entries.append(self._entry("person", person, name=name, role=role.value, tenant=tenant))
            elif person.provider is not None:
                raise PeopleError(f"{name} {_AT_PROVIDER}")
            elif (person.role, person.tenant) != (role, tenant):
                raise PeopleError(
                    f"{name} is {person.role} of tenant {person.tenant}: revoke first to change that"
                )
            secret = self._link(person, entries)
            self.ledger.append(*entries)
        return person, secret

    def reset(self, name: str) -> tuple[Person, str]:
        """End all passkeys of ``name``; return the person, and the secret of a new link.

        Raises:
            PeopleError: there is no such person.
        """
        with self.ledger.locked() as people:
            person = _known(people, name)
            if person.provider is not None:
                raise PeopleError(f"{name} {_AT_PROVIDER}")
            entries = [self._entry("reset", person)]
            secret = self._link(person, entries)
            self.ledger.append(*entries)
        return person, secret

    def revoke(self, name: str) -> Person:
        """Revoke the person.

        Raises:
            PeopleError: there is no such person.
        """
        with self.ledger.locked() as people:
            person = _known(people, name)
            self.ledger.append(self._entry("revoke", person))
        return person

    def admit(self, subject: str, name: str, role: PersonRole, tenant: str) -> Person:
        """Record who is ``subject`` at the provider, as it says now; return the person.

        ``name`` is what the provider calls a new one: it decides nothing, and is never that of another.

        Raises:
            PeopleError: the operator has revoked that person.
        """
        with self.ledger.locked() as people:
            person, issuer, entries = people.of_provider(subject), people.issuer or "", list[Entry]()
            if person is not None and person.revoked:
                raise PeopleError(f"{person.name} is revoked")
            if person is None:
                new_id = UlidSource(self._now_ms, self._random_bytes).new()
                taken = {each.name for each in people.by_id.values()}
                name = _name_of(name, new_id[-_UNIQUE:].lower(), taken)
                person = Person(new_id, name, role, tenant, provider=(issuer, subject))
                entries.append(self._entry("person", person, name=name, role=role.value, tenant=tenant))
            if not person.admitted or (person.role, person.tenant) != (role, tenant):
                person = replace(person, role=role, tenant=tenant, admitted=True)
                said = {"issuer": issuer, "subject": subject, "role": role.value, "tenant": tenant}
                self.ledger.append(*entries, self._entry("admit", person, **said))
            return person

    def withdraw(self, subject: str) -> Person | None:
        """End what the provider has said of ``subject``; return whose that was, if it was anybody's."""
        with self.ledger.locked() as people:
            person = people.of_provider(subject)
            if person is not None and person.admitted:
                self.ledger.append(self._entry("reset", person))
            return person

    def add_passkey(self, secret: str, credential: bytes) -> Person:
        """Record the passkey that was made by a link, which is used from then on; return whose it is.

        Raises:
            InvitationError: the link cannot be used.
        """
        with self.ledger.locked() as people:
            person = people.invited_by(secret, self._now_ms())
            if len(person.passkeys) >= MAX_PASSKEYS:
                raise InvitationError(
                    f"{person.name} has {MAX_PASSKEYS} passkeys: ask the operator for a reset"
                )
            self.ledger.append(
                self._entry("passkey", person, invitation=digest_of(secret), credential=base64url(credential))
            )
            return person

    def registration_key(self) -> bytes:
        """Return the key that registrations are authenticated with, made on first use."""
        if (key := self.read().key) is not None:
            return key
        with self.ledger.locked() as people:
            if (key := people.key) is None:
                key = self._random_bytes(KEY_BYTES)
                self.ledger.append({"action": "key", "ts_ms": self._now_ms(), "key": base64url(key)})
        return key

    def _link(self, person: Person, entries: list[Entry]) -> str:
        secret = base64url(self._random_bytes(KEY_BYTES))
        until = self._now_ms() + INVITATION_MS
        entries.append(self._entry("invite", person, invitation=digest_of(secret), expires_at_ms=until))
        return secret

    def _entry(self, action: str, person: Person, **members: object) -> Entry:
        return {"action": action, "ts_ms": self._now_ms(), "person": person.id, **members}


def _name_of(wanted: str, unique: str, taken: Container[str]) -> str:
    """Return a name for a new person of a provider, where people choose their names: never another's.

    >>> _name_of("Ada L\u00f6we", "k3", ()), _name_of("ada", "k3", {"ada"})
    ('Ada-L-we', 'ada-k3')
    """
    plain = re.sub(r"[^A-Za-z0-9._@+-]+", "-", wanted[:48]).lstrip("._@+-") or "person"
    return plain if plain not in taken else f"{plain}-{unique}"


def _known(people: People, name: str) -> Person:
    if (person := people.named(name)) is None:
        raise PeopleError(f"there is no {quoted(name)}: see `relay people list`")
    return person


def digest_of(secret: str) -> str:
    """Return what is kept of a secret."""
    return sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def by_credential(people: Mapping[str, Person]) -> Mapping[bytes, Person]:
    """Return whose each passkey is, by its public part."""
    return {
        credential: person
        for person in people.values()
        if not person.revoked
        for _, credential in person.passkeys
    }


# --- as the relays of a fleet have them in common ------------------------------------------------------


def _shown(person: Person) -> Entry:
    return {"person": person.id, "name": person.name, "role": person.role.value, "tenant": person.tenant}


PEOPLE = SharedForm(
    key_of=lambda entry: str(entry["person"]),
    entries=lambda people: LazyEntries(people.by_id, lambda one: _shown(people.by_id[one])),
    has=lambda people, entry: entry["person"] in people.by_id,
    line=lambda _people, entry, now_ms: {"action": "person", "ts_ms": now_ms, **entry},
)
PERSON_REVOCATIONS = SharedForm(
    key_of=lambda entry: str(entry["person"]),
    entries=lambda people: LazyEntries(
        people.revoked, lambda one: {"person": one, "revoked_ms": people.revoked[one]}
    ),
    has=lambda people, entry: entry["person"] in people.revoked,
    line=lambda _people, entry, _now_ms: {
        "action": "revoke",
        "ts_ms": entry["revoked_ms"],
        "person": entry["person"],
    },
)
