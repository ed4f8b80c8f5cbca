"""The schema registry: every document by its reference, and the compiled validators.

A reference is the part after ``mcp://schemas/``: ``{kind}@{semver}``. Look-ups are dictionary
look-ups, never paths. Must not hand out anything that a caller could change for others.
"""

import json
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import jsonschema_rs

from schemas.canonical import jcs
from schemas.document_store import SCHEME, DocumentStore, referred
from schemas.kinds import DOCUMENTS, MANIFEST_REF, RFC_0001, SHIPPED, KindRegistry, NamedKind, Notes, amended
from schemas.projection import parse
from schemas.text import printable
from schemas.violations import ViolationError, violation_of

TOOL_PREFIX = "mcp.tool:"
ENVELOPE_REF = "envelope@1.0.0"

_DOCUMENTS = (
    Path(__file__).with_name("documents"),
    *(SHIPPED / kind / DOCUMENTS for kind in RFC_0001),
)


@dataclass(frozen=True, slots=True, eq=False)
class Validator:
    """One compiled document. Frozen, because all users of the document share it."""

    _compiled: jsonschema_rs.Draft202012Validator
    _ref: str
    _document: Callable[[str], Any] = field(repr=False)

    def is_valid(self, value: object) -> bool:
        """Return whether ``value`` fits. A lone surrogate fits no rule that reads it."""
        try:
            return self._compiled.is_valid(value)
        except ValueError:
            return False

    def check(self, value: object) -> None:
        """Return when ``value`` fits.

        Raises:
            ViolationError: it does not; names the first rule that it breaks and where.
        """
        # The plain verdict is the cheaper question, and nearly always the last one.
        if self.is_valid(value):
            return
        try:
            error = next(self._compiled.iter_errors(value))
        except ValueError:
            raise ViolationError("/", "text", "a text in it has a lone surrogate", "Remove it.") from None
        raise violation_of(error, self._schema_at(error.evaluation_path[:-1]))

    def _schema_at(self, path: Sequence[str | int]) -> Mapping[str, Any]:
        """Return the schema at ``path`` of the document, through the references on the way."""
        ref = self._ref
        place: Any = self._document(ref)
        for part in path:
            if part == "$ref":
                document, _, pointer = place["$ref"].removeprefix(SCHEME).partition("#")
                ref = document or ref
                place = _at(self._document(ref), pointer)
            else:
                place = place[part]
        return place if isinstance(place, dict) else {}


@dataclass(frozen=True, slots=True)
class ToolIo:
    """What goes into a tool, and what comes out."""

    input: Validator
    output: Validator


class SchemaRegistry:
    """The documents in ``schema_root`` (default: those of the contract, and of RFC-0001's kinds).

    ``kinds`` defines which documents a tool has (default: RFC-0001's). Registries that are given the
    same ``compiled`` compile what they have in common once; without it each has its own. The documents of the
    kinds ``named`` are there too, and a manifest may contain them: the manifest's document is the only one
    that validates by other rules than those that are served.

    A document is read at the start, and all else is derived from it when it is first asked for.

    Raises:
        ValueError: on taking a document that is not JSON, has no ``$id`` of its name, or refers to what is
            none of these documents.
    """

    def __init__(
        self,
        schema_root: Path | None = None,
        kinds: KindRegistry | None = None,
        compiled: MutableMapping[str, Validator] | None = None,
        named: Sequence[NamedKind] = (),
    ) -> None:
        brought = {ref: document for each in named for ref, document in each.documents.items()}
        self._documents = DocumentStore(_DOCUMENTS if schema_root is None else (schema_root,), brought)
        self._amended = {}
        if named:
            rules = amended(self.document(MANIFEST_REF), (each.kind for each in named))
            self._amended[MANIFEST_REF] = jcs(rules)
        self._kinds = kinds or KindRegistry()
        self._compiled: MutableMapping[str, Validator] = {} if compiled is None else compiled
        self._fingerprints: dict[str, str] = {}

    @property
    def documents(self) -> Mapping[str, bytes]:
        """Every document's canonical bytes by reference."""
        return self._documents

    def document(self, ref: str) -> dict[str, Any]:
        """Return a copy of the document ``ref``, the taker's own.

        Raises:
            KeyError: there is none.
        """
        copy: dict[str, Any] = json.loads(self._documents[ref])
        return copy

    def notes(self, ref: str) -> Notes | None:
        """Return what a model reads of the document ``ref`` in place of its descriptions, if that differs."""
        return self._kinds.notes(ref)

    def load(self, ref: str) -> Validator:
        """Return the compiled validator of the document ``ref``.

        Compiled once per content: the cache is keyed by the SHA-256 of the canonical bytes, those of every
        document that it refers to among them, for they decide as much as its own.

        Raises:
            KeyError: there is no such document.
        """
        if (known := self._compiled.get(self._fingerprints.get(ref, ""))) is not None:
            return known
        reached = self._reached(ref)
        key = self._fingerprints[ref] = _fingerprint(map(self._rules, reached))
        if (known := self._compiled.get(key)) is not None:
            return known  # another registry has compiled it
        resources = [(SCHEME + other, self._rules_of(other)) for other in reached]
        compiled = jsonschema_rs.Draft202012Validator(
            self._rules_of(ref), registry=jsonschema_rs.Registry(resources), validate_formats=True
        )
        validator = self._compiled[key] = Validator(compiled, ref, self._rules_of)
        return validator

    def _reached(self, ref: str) -> list[str]:
        """Return ``ref`` and, sorted, the documents that it refers to, also through others."""
        reached, ahead = {ref}, [ref]
        while ahead:
            each = ahead.pop()
            new = referred(each, self._rules_of(each)) - reached
            reached |= new
            ahead += new
        return [ref, *sorted(reached - {ref})]

    def _rules(self, ref: str) -> bytes:
        return self._amended.get(ref) or self._documents[ref]

    def _rules_of(self, ref: str) -> dict[str, Any]:
        rules: dict[str, Any] = json.loads(self._rules(ref))
        return rules

    def load_envelope(self) -> Validator:
        """Return the validator of the envelope of a call."""
        return self.load(ENVELOPE_REF)

    def load_tool_io(self, tool_id: str) -> ToolIo:
        """Return the validators of the tool ``mcp.tool:{canonical name}``, which its kind and verb decide.

        Whether there is such a node or capability is not looked at.

        Raises:
            KeyError: this is not the canonical name of a tool, or of a kind or verb that is not registered.
        """
        name = parse(tool_id.removeprefix(TOOL_PREFIX))
        if name is None or tool_id != TOOL_PREFIX + name.canonical:
            raise KeyError(printable(tool_id))
        kind = self._kinds.by_short(name.kind_short)
        if kind is None or name.verb not in kind.verbs:
            raise KeyError(tool_id)
        verb = kind.verbs[name.verb]
        return ToolIo(self.load(verb.input_ref), self.load(verb.output_ref))


def _fingerprint(documents: Iterable[bytes]) -> str:
    # Canonical JSON contains no line feed, so what is joined by it can be read in one way only.
    return sha256(b"\n".join(documents)).hexdigest()


def _at(document: Any, pointer: str) -> Any:
    """Return what the JSON pointer ``pointer`` of a reference names in ``document``."""
    place = document
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        place = place[int(key) if isinstance(place, list) else key]
    return place
