"""What people have given to clients: what a client may do, until when, and by which refresh token.

| action | members besides ``ts_ms`` |
|---|---|
| `grant` | all of a ``Grant``; of two with one id the later counts |
| `end` | `grant`: its id |

A refresh token is rotated: each use begins a generation, and the tokens of the one before are accepted for a
minute more, for a client that has lost the answer. One that is used after that was copied, and ends the
grant. The file has digests of tokens, and no token. Must not sign tokens, nor know HTTP.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from relay.state.ledger import Entry, Ledger, LedgerState
from relay.state.tokens import RevokedTokens
from schemas.error_roots import PeerError
from schemas.keys import base64url, from_base64url
from schemas.times import SystemClock

GRACE_MS = 60_000
_MAX_OF_A_GENERATION = 8
MAX_ACCESS = 64
"""How many access tokens a grant has at once: an hour's of a client that refreshes each minute."""
MAX_LIVE = 64
"""How many grants a person has at once. Each sign-in of a client makes one, which may last for 90 days."""
_HANDLE_BYTES, _SECRET_BYTES = 16, 32
_PREFIX = "ekr1_"
_LISTS = ("scopes", "kinds", "nodes")


class RefreshError(PeerError):
    """A refresh token is not accepted.

    ``ended``: what has ended by that, as it was used before. ``retry_after_ms``: when it will be accepted.
    """

    def __init__(
        self, text: str, *, ended: "Sequence[Grant]" = (), retry_after_ms: int | None = None
    ) -> None:
        super().__init__(text)
        self.ended, self.retry_after_ms = ended, retry_after_ms


@dataclass(frozen=True, slots=True)
class Choice:
    """What a person lets a client do.

    Attributes:
        kinds, nodes: as in the claims of a token; None if nothing is said of them.
        until_ms: when it ends, however often it is refreshed.
    """

    tenant: str
    scopes: tuple[str, ...]
    kinds: tuple[str, ...] | None
    nodes: tuple[str, ...] | None
    until_ms: int


@dataclass(frozen=True, slots=True)
class Grant:
    """One choice of one person for one client.

    Attributes:
        id: names it to people; ``handle`` is the digest of what names it in a refresh token.
        client_name: as it was shown; ``origin``: the host whose document describes it, empty if none does.
        redirect: where its codes were sent.
        sub: the name of the agent in tokens.
        asserts: whether the client proves itself by a key, and not by its refresh token alone.
        remember: whether the same client at the same place need not ask again.
        asked: the scopes that it asked for.
        tokens: the generation of each refresh token that is accepted, by the token's digest.
        rotated_at_ms: when the newest generation began.
        access: the access tokens that have not ended, by ``jti``, and when they do.
    """

    id: str
    handle: str
    person: str
    client_id: str
    client_name: str
    origin: str
    redirect: str
    sub: str
    asserts: bool
    remember: bool
    asked: tuple[str, ...]
    tenant: str
    scopes: tuple[str, ...]
    kinds: tuple[str, ...] | None
    nodes: tuple[str, ...] | None
    until_ms: int
    made_ms: int
    tokens: tuple[tuple[str, int], ...] = ()
    generation: int = 0
    rotated_at_ms: int = 0
    access: tuple[tuple[str, int], ...] = ()

    @property
    def choice(self) -> Choice:
        return Choice(self.tenant, self.scopes, self.kinds, self.nodes, self.until_ms)

    def entry(self, now_ms: int) -> Entry:
        return {"action": "grant", "ts_ms": now_ms, **asdict(self)}

    @classmethod
    def of(cls, entry: Entry) -> "Grant":
        members = {name: value for name, value in entry.items() if name not in {"action", "ts_ms"}}
        lists = {
            name: None if (value := members[name]) is None else tuple(map(str, value)) for name in _LISTS
        }
        pairs = {
            name: tuple((str(key), int(value)) for key, value in members[name])
            for name in ("tokens", "access")
        }
        return cls(**members | lists | pairs | {"asked": tuple(members["asked"])})


class GrantState(LedgerState):
    """The grants that have not been ended, by id, and by their handle."""

    def __init__(self) -> None:
        self.by_id: dict[str, Grant] = {}
        self.by_handle: dict[str, str] = {}
        self.last_ms = 0

    def apply(self, entry: Entry) -> None:
        # Not the newest: one entry of a clock that was ahead would end all that lasts less long.
        self.last_ms = int(entry["ts_ms"])
        match entry["action"]:
            case "grant":
                grant = Grant.of(entry)
                self.by_id[grant.id] = grant
                self.by_handle[grant.handle] = grant.id
            case "end":
                if (ended := self.by_id.pop(entry["grant"], None)) is not None:
                    del self.by_handle[ended.handle]
            case other:
                raise ValueError(other)

    def lasting(self) -> Sequence[Entry]:
        """Return what must stay in the file: what has ended says nothing more."""
        return [grant.entry(grant.made_ms) for grant in self.by_id.values() if grant.until_ms > self.last_ms]

    def live_of(self, person: str, now_ms: int) -> Sequence[Grant]:
        return [each for each in self.by_id.values() if each.person == person and each.until_ms > now_ms]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What a client gets besides its access token: ``refresh`` is empty if the grant ends with that token.

    ``ended``: grants of the person that have made room for it.
    """

    grant: Grant
    refresh: str
    ended: Sequence[Grant] = ()


Sign = Callable[[Grant], tuple[str, int]]
"""Signs and records an access token for a grant; returns its ``jti``, and when it ends in ms."""


class Grants:
    """The list in ``path``, which is made with the first entry.

    Everything raises LedgerError if the file is damaged, and OSError if it cannot be used. What waits for a
    lock belongs on a thread.
    """

    def __init__(
        self,
        path: Path,
        revoked: RevokedTokens,
        now_ms: SystemClock,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.ledger = Ledger(path, GrantState(), lasting=GrantState.lasting)
        self._revoked = revoked
        self._now_ms = now_ms
        self._random_bytes = random_bytes

    def read(self) -> GrantState:
        return self.ledger.read()

    def begin(self, grant: Grant, sign: Sign, *, may: Callable[[], bool], refreshes: bool) -> NewTokens:
        """Record ``grant`` with its first tokens, and end others of that person beyond ``MAX_LIVE``.

        ``may`` is asked while no other process can end it.

        Raises:
            RefreshError: it may not.
        """
        with self.ledger.locked() as state:
            if not may():
                raise RefreshError("the person may not sign in any more")
            handle = self._random_bytes(_HANDLE_BYTES)
            grant = replace(grant, handle=sha256(handle).hexdigest())
            others = state.live_of(grant.person, self._now_ms())
            new = self._extended(grant, handle, sign, refreshes=refreshes, rotates=True)
            # Those of the same client first: one that signs in without end must not end what others have.
            others = sorted(others, key=lambda each: (each.client_id != grant.client_id, each.rotated_at_ms))
            ended = others[: max(0, len(others) + 1 - MAX_LIVE)]
            self._end(ended)
            return replace(new, ended=ended)

    def presented(self, token: str, client_id: str) -> tuple[Grant, str] | None:
        """Return the grant of a refresh token of that client that is accepted, and what names its generation.

        None: ``refresh`` says why not.

        Raises:
            RefreshError: it is no refresh token.
        """
        handle, digest = _parts(token)
        state = self.read()
        grant = state.by_id.get(state.by_handle.get(sha256(handle).hexdigest(), ""))
        generation = None if grant is None else dict(grant.tokens).get(digest)
        if grant is None or generation is None or grant.client_id != client_id:
            return None
        if grant.until_ms <= self._now_ms():
            return None  # relays do not share a redemption that has ended
        return grant, sha256(f"{grant.handle}-{generation}".encode("ascii")).hexdigest()

    def refresh(
        self, token: str, client_id: str, sign: Sign, *, asserted: bool, may: Callable[[Grant], bool]
    ) -> NewTokens:
        """Return new tokens for ``token``.

        Raises:
            RefreshError: it is not accepted.
        """
        handle, digest = _parts(token)
        with self.ledger.locked() as state:
            now = self._now_ms()
            grant = state.by_id.get(state.by_handle.get(sha256(handle).hexdigest(), ""))
            if grant is None or grant.client_id != client_id or (grant.asserts and not asserted):
                raise RefreshError("the refresh token is not known")
            if grant.until_ms <= now or not may(grant):
                raise RefreshError("what was allowed has ended")
            generation = dict(grant.tokens).get(digest)
            rotates = generation == grant.generation
            in_grace = generation is not None and now < grant.rotated_at_ms + GRACE_MS
            of_newest = sum(1 for _, each in grant.tokens if each == grant.generation)
            if not rotates and not in_grace:
                self._end([grant])
                raise RefreshError("the refresh token was used before", ended=[grant])
            if not rotates and of_newest >= _MAX_OF_A_GENERATION:
                raise RefreshError("the refresh token was used too often")
            ends = sorted(end_ms for _, end_ms in grant.access if end_ms > now)
            if len(ends) >= MAX_ACCESS:
                raise RefreshError("the client refreshes too often", retry_after_ms=ends[0] - now)
            return self._extended(grant, handle, sign, refreshes=True, rotates=rotates)

    def _extended(
        self, grant: Grant, handle: bytes, sign: Sign, *, refreshes: bool, rotates: bool
    ) -> NewTokens:
        now = self._now_ms()
        jti, end_ms = sign(grant)
        secret = self._random_bytes(_SECRET_BYTES)
        if rotates:
            kept = tuple(each for each in grant.tokens if each[1] == grant.generation)
            grant = replace(grant, tokens=kept, generation=grant.generation + 1, rotated_at_ms=now)
        if refreshes:
            new = (sha256(secret).hexdigest(), grant.generation)
            grant = replace(grant, tokens=(*grant.tokens, new))
        access = (*(each for each in grant.access if each[1] > now), (jti, end_ms))
        grant = replace(grant, access=access)
        self.ledger.append(grant.entry(now))
        return NewTokens(grant, f"{_PREFIX}{base64url(handle + secret)}" if refreshes else "")

    def end(self, chosen: Callable[[Grant], bool]) -> Sequence[Grant]:
        """End the grants that are ``chosen``, with their access tokens, and return them.

        Waits for one that is being made: it is found here, or ``may`` refuses it.
        """
        if not self.ledger.path.exists():
            return ()
        with self.ledger.locked() as state:
            grants = [grant for grant in state.by_id.values() if chosen(grant)]
            self._end(grants)
            return grants

    def end_by_token(self, token: str, jti: str, client_id: str) -> Sequence[Grant]:
        """End the grant of that client's ``token``, if there is one.

        A refresh token, in whichever generation; or an access token, which is proven to have that ``jti``.
        """
        try:
            handle = sha256(_parts(token)[0]).hexdigest()
        except RefreshError:
            handle = ""

        def is_of_token(grant: Grant) -> bool:
            return grant.client_id == client_id and (grant.handle == handle or jti in dict(grant.access))

        return self.end(is_of_token)

    def _end(self, grants: Sequence[Grant]) -> None:
        """End ``grants``, while the file is locked. The tokens first: an error must not leave them alone."""
        if grants:
            now = self._now_ms()
            live = [jti for grant in grants for jti, end_ms in grant.access if end_ms > now]
            self._revoked.revoke(*live, now_ms=now)
            self.ledger.append(*({"action": "end", "ts_ms": now, "grant": grant.id} for grant in grants))


def _parts(token: str) -> tuple[bytes, str]:
    """Return what names the grant, and the digest of the secret.

    Raises:
        RefreshError: it is no refresh token.
    """
    try:
        data = from_base64url(token.removeprefix(_PREFIX)) if token.startswith(_PREFIX) else b""
    except ValueError:
        data = b""
    if len(data) != _HANDLE_BYTES + _SECRET_BYTES:
        raise RefreshError("the refresh token is not known")
    return data[:_HANDLE_BYTES], sha256(data[_HANDLE_BYTES:]).hexdigest()


def grant_of(members: dict[str, Any], choice: Choice) -> Grant:
    """Return a grant of ``choice`` that has no tokens yet; ``members`` are its others."""
    return Grant(handle="", **members, **asdict(choice))
