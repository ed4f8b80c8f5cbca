"""The closed registry of kinds: what a node can offer, and how each verb is presented to an agent.

RFC-0001 sections 2, 3.2 and 5, RFC-0005 sections 2 and 9. A kind that ships is a directory of
``schemas/kinds``: its row, the documents that the row cites, and nothing that runs. RFC-0001's own two are
known to every process; any other only where the operator names it, as one of a package is
(``schemas.kind_packages``). Such a kind is admitted by an amendment of the manifest's rules, which is not
served: the document keeps its bytes, and its meaning for those who read it elsewhere. Must not read a
directory when it is imported.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from schemas.error_roots import CommandLineError
from schemas.images import ImageMember
from schemas.text import changed_at, free_text, inert, quoted

MANIFEST_REF = "manifest@1.1.0"

RFC_0001 = ("system.metrics", "system.echo")
"""The kinds in the enum of the manifest's document. Their own documents are the RFC's, not of our dialect."""
SHIPPED = Path(__file__).with_name("kinds")
ROW = "kind.json"
DOCUMENTS = "documents"

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*){1,3}")
_MAX_NAME = 64
_USUAL_NAME = re.compile(r"[A-Za-z0-9._/:@+-]*")
_MOST_RPS, _MOST_DEADLINE_MS = 1000.0, 30_000  # by the manifest's document

Notes = Mapping[str, str]
"""Descriptions by the path of member names, as ``/disk/*/mount``; ``*`` is what a list contains."""


@dataclass(frozen=True, slots=True)
class ForeignText:
    r"""A text of a result that a third party may have chosen, and that a model reads.

    ``path`` is the path of member names to it, through every element of lists. A name of at most ``longest``
    characters, as the document allows, that ``usual`` matches completely is passed on unchanged. In any
    other, every character but letters, digits and ``._-/:@+\`` is escaped, spaces too, and it is cut to
    ``limit`` characters: enough to recognise it, not a sentence.

    Where ``usual`` is None it is a free text, such as a line of a log: a sentence that stays readable. Node
    and relay both escape, and what has been escaped stays as it is.
    """

    path: tuple[str, ...]
    usual: re.Pattern[str] | None
    limit: int
    longest: int

    def shown(self, text: str) -> str:
        """Return ``text`` as a model may read it."""
        if self.usual is None:
            return free_text(text, self.limit)
        is_usual = len(text) <= self.longest and self.usual.fullmatch(text)
        return text if is_usual else inert(text, self.limit)


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb of a kind. ``title`` and ``description`` are static: a node cannot change them.

    Attributes:
        verbatim: the members of the result that must equal the argument of the same name.
        foreign_texts: the texts of the result that are escaped: names that do not match their usual pattern,
            and free texts.
        images: the members of the result that are images, which leave it for content blocks of their own.
        untrusted: the paths of the free texts of the result, with dots.
        guarded: the members of the result that only a caller gets whose token names the kind beside them.
        asks: the paths of members that name a kind and a verb to ask next: the relay adds the tool's name.
        streams: the call starts telemetry, of which its result is the first sample.
    """

    name: str
    input_ref: str
    output_ref: str
    title: str
    description: str
    idempotent: bool
    verbatim: tuple[str, ...] = ()
    foreign_texts: tuple[ForeignText, ...] = ()
    streams: bool = False
    images: tuple[ImageMember, ...] = ()
    untrusted: tuple[str, ...] = ()
    asks: tuple[tuple[str, ...], ...] = ()
    guarded: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def shown(self, result: Any) -> Any:
        """Return ``result`` with the texts that a third party may have chosen as a model may read them."""
        for text in self.foreign_texts:
            result = changed_at(result, text.path, text.shown)
        return result


@dataclass(frozen=True, slots=True)
class Fault:
    """What an agent reads when a handler fails for a reason that its kind states: as static as a title."""

    message: str
    suggested_fix: str


@dataclass(frozen=True, slots=True)
class Kind:
    """One row: a kind, the token that its tool names start with, and its verbs.

    A verb that the RFC defines but that has no row is not listed and cannot be called.

    Attributes:
        schema_ref: what a capability of this kind cites in the manifest.
        faults: the reasons, by code, that its handler can state for a failure.
        sensitive: whether what it shows is private, so that only a token that names the kind reaches it.
        most_rate_rps, most_deadline_ms: the most that a capability may state in its constraints.
        capability: what a node announces; None if the handler of a package says it.
        about: for the operator of a node: what it reads, needs and exposes.
        notes: the only descriptions of a document that a model reads, by its reference. Documents without
            an entry are described for models already.
    """

    name: str
    short: str
    safety_class: str
    schema_ref: str
    verbs: Mapping[str, Verb]
    faults: Mapping[str, Fault] = field(default_factory=lambda: MappingProxyType({}))
    sensitive: bool = False
    most_rate_rps: float = _MOST_RPS
    most_deadline_ms: int = _MOST_DEADLINE_MS
    capability: Mapping[str, Any] | None = None
    about: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    notes: Mapping[str, Notes] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class NamedKind:
    """A kind that a process knows because the operator has named it.

    Attributes:
        documents: what its row cites, by reference; as bytes, since parsed they take a mebibyte of a board.
        load_handler: imports the code of its package, returns what its entry point names. For the node alone.
            None if the kind ships.
    """

    kind: Kind
    documents: Mapping[str, bytes]
    load_handler: Callable[[], object] | None = None


def kind_name(text: str) -> str:
    """Return ``text``, the name of a kind, which may be one that does not ship.

    Raises:
        CommandLineError: it is no such name.
    """
    if len(text) > _MAX_NAME or not _NAME.fullmatch(text):
        raise CommandLineError(
            f"{quoted(text, _MAX_NAME)} is not the name of a kind, such as acme.relay_board"
        )
    return text


def kind_of(row: Mapping[str, Any], documents: Mapping[str, Mapping[str, Any]]) -> Kind:
    """Return the kind of ``row``, whose verbs have ``documents``. Both must have been checked."""
    capability = None
    if (own := row.get("capability")) is not None:
        capability = {
            "cap_id": own["cap_id"],
            "kind": row["kind"],
            "schema_ref": row["schema_ref"],
            "verbs": list(row["verbs"]),
            "safety_class": row["safety_class"],
            "constraints": own["constraints"],
        }
    return Kind(
        name=row["kind"],
        short=row["kind_short"],
        safety_class=row["safety_class"],
        schema_ref=row["schema_ref"],
        verbs=MappingProxyType(
            {name: _verb(name, facts, documents[facts["output"]]) for name, facts in row["verbs"].items()}
        ),
        faults=MappingProxyType({code: Fault(**texts) for code, texts in row.get("faults", {}).items()}),
        sensitive=row.get("sensitive", False),
        most_rate_rps=row["limits"]["rate_limit_rps"],
        most_deadline_ms=row["limits"]["deadline_ms_default"],
        capability=capability,
        about=MappingProxyType(row.get("about", {})),
        notes=MappingProxyType(row.get("notes", {})),
    )


def _verb(name: str, facts: Mapping[str, Any], answered: Mapping[str, Any]) -> Verb:
    return Verb(
        name=name,
        input_ref=facts["input"],
        output_ref=facts["output"],
        title=facts["title"],
        description=facts["description"],
        idempotent=facts["idempotent"],
        verbatim=tuple(facts.get("verbatim", ())),
        foreign_texts=(
            *(_foreign_name(each, answered) for each in facts.get("foreign_texts", ())),
            *(_text(path, None, answered) for path in facts.get("free_texts", ())),
        ),
        streams=facts.get("streams", False),
        images=tuple(images_of(answered)),
        untrusted=tuple(map(".".join, facts.get("free_texts", ()))),
        guarded=MappingProxyType(facts.get("guarded", {})),
        asks=tuple(map(tuple, facts.get("asks", ()))),
    )


def _foreign_name(entry: Any, answered: Mapping[str, Any]) -> ForeignText:
    if isinstance(entry, Mapping):
        usual, longest = re.compile(entry["usual"]), _longest(entry["path"], answered)
        return ForeignText(tuple(entry["path"]), usual, entry["limit"], longest)
    return _text(entry, _USUAL_NAME, answered)


def _text(path: Sequence[str], usual: re.Pattern[str] | None, answered: Mapping[str, Any]) -> ForeignText:
    longest = _longest(path, answered)
    return ForeignText(tuple(path), usual, longest, longest)


def _longest(path: Sequence[str], answered: Mapping[str, Any]) -> int:
    return int(member_at(answered, path).get("maxLength", 0))


def member_at(document: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any]:
    """Return the schema of the member that ``path`` leads to, through the items of arrays."""
    found = document
    for member in path:
        found = found.get("items", found).get("properties", {}).get(member, {})
    return found


def images_of(document: Mapping[str, Any]) -> Iterator[ImageMember]:
    """Yield the members of ``document`` that are images."""
    for name, schema in document["properties"].items():
        if "contentMediaType" in schema:
            yield ImageMember(name, schema["contentMediaType"])


def shipped_names() -> list[str]:
    """Return the names of the kinds that ship, sorted."""
    return sorted(entry.name for entry in SHIPPED.iterdir())


def rfc_kinds() -> tuple[Kind, ...]:
    """Read RFC-0001's own kinds, which every process knows."""
    return tuple(_read_own(SHIPPED / name) for name in RFC_0001)


def _read_own(directory: Path) -> Kind:
    row = json.loads((directory / ROW).read_bytes())
    refs = {verb["output"] for verb in row["verbs"].values()}
    return kind_of(
        row, {ref: json.loads((directory / DOCUMENTS / f"{ref}.json").read_bytes()) for ref in refs}
    )


class KindRegistry:
    """The kinds that a process knows (default: RFC-0001's), by name and by short token.

    Raises:
        ValueError: two kinds share a name or a short token.
    """

    def __init__(self, kinds: Iterable[Kind] | None = None) -> None:
        self._kinds = rfc_kinds() if kinds is None else tuple(kinds)
        self._by_name = {kind.name: kind for kind in self._kinds}
        self._by_short = {kind.short: kind for kind in self._kinds}
        if not len(self._kinds) == len(self._by_name) == len(self._by_short):
            raise ValueError("two kinds share a name or a short token")

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._kinds)

    def get(self, name: str) -> Kind | None:
        return self._by_name.get(name)

    def by_short(self, short: str) -> Kind | None:
        return self._by_short.get(short)

    def notes(self, ref: str) -> Notes | None:
        """Return what a model reads of the document ``ref`` in place of its descriptions, if that differs."""
        return next((kind.notes[ref] for kind in self._kinds if ref in kind.notes), None)


def amended(manifest: Mapping[str, Any], kinds: Iterable[Kind]) -> dict[str, Any]:
    """Return rules like those of the document ``manifest`` that admit ``kinds`` too (RFC-0001 section 2).

    They have an entry of the enum of kinds, the verbs that are their own, and a clamp for each.
    """
    rules, added = deepcopy(dict(manifest)), list(kinds)
    capability = rules["$defs"]["Capability"]
    capability["properties"]["kind"]["enum"] += [kind.name for kind in added]
    verbs = capability["properties"]["verbs"]["items"]["enum"]
    verbs += sorted({verb for kind in added for verb in kind.verbs} - {*verbs})
    capability["allOf"] += [_clamp(kind) for kind in added]
    return rules


def _clamp(kind: Kind) -> dict[str, Any]:
    return {
        "if": {"properties": {"kind": {"const": kind.name}}},
        "then": {
            "properties": {
                "safety_class": {"const": kind.safety_class},
                "verbs": {"items": {"enum": sorted(kind.verbs)}},
                "constraints": {
                    "properties": {
                        "deadline_ms_default": {"maximum": kind.most_deadline_ms},
                        "rate_limit_rps": {"maximum": kind.most_rate_rps},
                    }
                },
            }
        },
    }
