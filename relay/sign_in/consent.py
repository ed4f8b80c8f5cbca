"""What a person can let a client do, and what was chosen in the form: never more than the person may.

Must not know HTTP, nor how a choice becomes a token.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from attrs import frozen

from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS, SCOPES, SESSION_SCOPE, TAG
from relay.state.grants import Choice
from relay.state.people import ALL_TENANTS, Person, PersonRole
from schemas.error_roots import PeerError
from schemas.kinds import Kind
from schemas.times import duration_text

LOOK, LOOK_WITHOUT_LOGS, CHOSEN = "look", "look_without_logs", "chosen"
_READ_ONLY = SCOPE_OF_SAFETY_CLASS["read_only"]
_HOUR_MS = 3_600_000
ACCESS_MS = _HOUR_MS
LONGEST_MS = 90 * 24 * _HOUR_MS
LIFETIMES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "hour": ("1 hour", _HOUR_MS),
        "day": ("1 day", 24 * _HOUR_MS),
        "month": ("30 days", 30 * 24 * _HOUR_MS),
        "quarter": ("90 days", LONGEST_MS),
    }
)
USUAL_LIFETIME = "month"
MAX_PATTERNS = 32
"""As the claims have it."""
_MAX_TEXT = 1536
"""Of patterns as JSON: what a token has room for beside the longest names of person, client and tenant."""
_MAX_BOARDS = 200
Tags = Callable[[str], Iterable[str]]
"""Returns the tags of the nodes of a tenant."""

WORDS = {
    _READ_ONLY: "look: read what boards show",
    SCOPE_OF_SAFETY_CLASS["reversible"]: "change what can be changed back",
    SCOPE_OF_SAFETY_CLASS["physical_actuation"]: "move or switch something physical",
    SESSION_SCOPE: "exchange messages with agents on the boards",
}


class ChoiceError(PeerError):
    """What was chosen is not to be had; the text says what to do."""


@frozen
class Offer:
    """What one person can choose from.

    Attributes:
        scopes: what the person may give.
        kinds: the kinds by name, and whether each is private; those that the person may give.
        tenants: of which one is chosen, if there are several.
        boards: patterns of nodes, one for each tag; none of them chosen is all boards.
        lifetimes: for how long, by name: the words, and the milliseconds.
    """

    scopes: tuple[str, ...]
    kinds: tuple[tuple[str, bool], ...]
    tenants: tuple[str, ...]
    boards: tuple[str, ...] = ()
    lifetimes: Mapping[str, tuple[str, int]] = LIFETIMES

    @property
    def private_kinds(self) -> tuple[str, ...]:
        return tuple(name for name, is_private in self.kinds if is_private)

    def presets(self) -> Sequence[tuple[str, str]]:
        """Return the ready-made choices, each with its words."""
        if self.private_kinds:
            return (
                (LOOK, "Look, all boards"),
                (LOOK_WITHOUT_LOGS, "Look, without logs and other private data"),
            )
        return ((LOOK_WITHOUT_LOGS, "Look, all boards"),)


def offer_to(
    person: Person,
    kinds: Iterable[Kind],
    tenants: Iterable[str],
    tags: Tags,
    longest_ms: int = LONGEST_MS,
) -> Offer:
    """Return what ``person`` can choose from; ``kinds`` are those that the relay knows.

    ``longest_ms``: for how long a person of a provider may.
    """
    is_operator = person.role is PersonRole.OPERATOR
    scopes = tuple(SCOPES) if is_operator else (_READ_ONLY,)
    shown = tuple(sorted((kind.name, kind.sensitive) for kind in kinds if is_operator or not kind.sensitive))
    of_all = person.tenant == ALL_TENANTS
    among = tuple(sorted({*tenants})) if of_all else (person.tenant,)
    known = sorted({tag if "=" in tag else f"{TAG}{tag}" for tenant in among for tag in tags(tenant)})
    lifetimes = {name: each for name, each in LIFETIMES.items() if each[1] <= longest_ms}
    if longest_ms not in {ms for _, ms in lifetimes.values()}:
        lifetimes["longest"] = (duration_text(longest_ms), longest_ms)
    is_bounded = person.provider is not None
    return Offer(scopes, shown, among, tuple(known[:_MAX_BOARDS]), lifetimes if is_bounded else LIFETIMES)


def chosen(offer: Offer, form: "FormValues", now_ms: int) -> Choice:
    """Return what was chosen.

    Raises:
        ChoiceError: it is not offered.
    """
    preset = form.one("choice")
    if preset not in {name for name, _ in offer.presets()} | {CHOSEN}:
        raise ChoiceError("Choose what the client may do.")
    if not offer.tenants:
        raise ChoiceError("No board has enrolled yet, so there is no tenant to choose: enrol one first.")
    tenant = form.one("tenant") or (offer.tenants[0] if len(offer.tenants) == 1 else "")
    if tenant not in offer.tenants:
        raise ChoiceError("Choose the tenant.")
    lifetime = offer.lifetimes.get(form.one("lifetime"))
    if lifetime is None:
        raise ChoiceError("Choose until when.")
    scopes: tuple[str, ...] = (_READ_ONLY,)
    kinds: tuple[str, ...] | None = None
    nodes: tuple[str, ...] | None = None
    if preset == LOOK:
        kinds = ("*", *offer.private_kinds)
    elif preset == CHOSEN:
        scopes = _among(form.all("scope"), offer.scopes)
        kinds = _among(form.all("kind"), [name for name, _ in offer.kinds])
        if not scopes or not kinds:
            raise ChoiceError("Choose at least one thing that the client may do, and one kind.")
        nodes = _among(form.all("board"), offer.boards) or None
    if max(len(kinds or ()), len(nodes or ())) > MAX_PATTERNS:
        raise ChoiceError(f"Choose {MAX_PATTERNS} kinds, and as many tags, at most.")
    if sum(len(each) + 3 for each in (*(kinds or ()), *(nodes or ()))) > _MAX_TEXT:
        raise ChoiceError("Choose fewer kinds or tags: together they are too long for a token.")
    return Choice(tenant, scopes, kinds, nodes, now_ms + lifetime[1])


def _among(asked: Sequence[str], offered: Collection[str]) -> tuple[str, ...]:
    """Return what was ``asked`` in the order in which it is ``offered``.

    Raises:
        ChoiceError: some of it is not.
    """
    if not {*asked} <= {*offered}:
        raise ChoiceError("You cannot give that: choose from what the page shows.")
    return tuple(each for each in offered if each in asked)


def may_still_give(person: Person, kinds: Iterable[Kind], choice: Choice) -> bool:
    """Return whether ``person`` may still give what was chosen."""
    offer = offer_to(person, kinds, [choice.tenant], lambda _tenant: ())
    private = {*offer.private_kinds}
    return (
        choice.tenant in offer.tenants
        and {*choice.scopes} <= {*offer.scopes}
        and all(
            name == "*" or name in private or name in {each for each, _ in offer.kinds}
            for name in choice.kinds or ()
        )
    )


class FormValues:
    """The values of a form or a query: each name with what was sent for it."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name, []).append(value)

    def one(self, name: str) -> str:
        """Return the value of ``name``; empty if it was not sent, or several times."""
        values = self._values.get(name, ())
        return values[0] if len(values) == 1 else ""

    def all(self, name: str) -> Sequence[str]:
        return self._values.get(name, ())

    def repeated(self, names: Iterable[str]) -> str | None:
        """Return one of ``names`` that was sent several times."""
        return next((name for name in names if len(self._values.get(name, ())) > 1), None)
