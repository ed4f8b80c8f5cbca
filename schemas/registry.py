"""The schema registry: every document by its reference, and the compiled validators.

A reference is the part after ``mcp://schemas/``: ``{kind}@{semver}``. Look-ups are dictionary look-ups,
never paths. A document is read when the process starts and parsed when it is first asked for, since a
process needs a third of them: an update of the package does not change one below a running process. What a
model reads of one has the same rules, with descriptions that were written for models. A contract is the
documents and kinds that one process works by. Must not hand out anything that a caller could change for
others, and must not read a package by itself: a process without named kinds does without what that needs.
"""

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import jsonschema_rs

from schemas.canonical import jcs
from schemas.kinds import (
    DOCUMENTS,
    MANIFEST_REF,
    RFC_0001,
    SHIPPED,
    KindRegistry,
    NamedKind,
    Notes,
    amended,
    rfc_kinds,
)
from schemas.projection import parse
from schemas.text import printable
from schemas.violations import ViolationError, violation_of

_COMBINING = frozenset({"$ref", "oneOf", "anyOf", "allOf", "not", "if", "dependentSchemas"})
_BOUNDS = frozenset(
    {
        *("minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "uniqueItems"),
        *("required", "additionalProperties", "minProperties", "maxProperties", "propertyNames", "title"),
    }
)
"""What of an answer's schema only bounds it."""
_MOST_OF_A_UNIT = 40
"""A longer description says what the name of the member or the tool's description says too."""

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


SCHEME = "mcp://schemas/"

# What makes a document depend on another; a value of one of them that is no text is a property of that name.
_REFERENCES = ("$ref", "$dynamicRef")


class DocumentStore(Mapping[str, bytes]):
    """The canonical bytes of the documents in ``directories``, and of those ``brought``, by reference.

    Kept as bytes: parsed, all of them take a mebibyte of every board.

    Raises:
        ValueError: on taking one that is not JSON, has no ``$id`` of its name, or refers to what is none of
            these documents.
    """

    def __init__(self, directories: Iterable[Path], brought: Mapping[str, bytes]) -> None:
        self._bytes = {file.name.removesuffix(".json"): file.read_bytes() for file in _files(directories)}
        self._bytes |= brought
        self._checked: set[str] = set()

    def __getitem__(self, ref: str) -> bytes:
        # Two threads that ask at once get equal bytes: canonical bytes stay as they are.
        if ref not in self._checked:
            self._bytes[ref] = jcs(_parsed(ref, self._bytes[ref], self._bytes))
            self._checked.add(ref)
        return self._bytes[ref]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bytes)

    def __len__(self) -> int:
        return len(self._bytes)


def referred(ref: str, document: object) -> set[str]:
    """Return the documents that the ``document`` of ``ref`` refers to, itself if by a fragment alone."""
    return {text.removeprefix(SCHEME).partition("#")[0] or ref for text in _references(document)}


def _files(directories: Iterable[Path]) -> list[Path]:
    files = (entry for directory in directories for entry in directory.iterdir() if entry.suffix == ".json")
    return sorted(files, key=lambda file: file.name)


def _parsed(ref: str, text: bytes, documents: Container[str]) -> dict[str, Any]:
    document = json.loads(text)
    # A file's name is unique in its directory, so an id that must equal it is unique too.
    if not isinstance(document, dict) or document.get("$id") != SCHEME + ref:
        raise ValueError(f"{ref}.json: its $id must be {SCHEME}{ref}")
    for target in _references(document):
        other, _, _ = target.removeprefix(SCHEME).partition("#")
        # A relative reference would have to be resolved as a URL to know what it refers to.
        if other and (not target.startswith(SCHEME) or other not in documents):
            named = printable(target)
            raise ValueError(f"{ref}.json: refers to {named}, which is no document here by its $id")
    return document


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item)
    elif isinstance(schema, dict):
        for name, item in schema.items():
            if name in _REFERENCES and isinstance(item, str):
                yield item
            else:
                yield from _references(item)


_ANNOTATIONS = frozenset({"$comment", "title", "description", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "dependentSchemas"})
_SCHEMAS = frozenset(
    {"items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"}
)
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})


def listed_schema(registry: SchemaRegistry, ref: str) -> dict[str, Any]:
    """Return the document ``ref`` as an entry of ``tools/list`` shows it.

    Without ``$id`` and ``$schema``: clients compile all tools' schemas into one validator, which refuses an
    id that it has seen, and some do not know the dialect's URI. ``_meta`` names the schema instead.

    Raises:
        KeyError: there is no such document.
    """
    document = {key: value for key, value in registry.document(ref).items() if key not in {"$id", "$schema"}}
    notes = registry.notes(ref)
    return document if notes is None else with_notes(document, notes)


def outlined(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a client lists of a member of an answer: the names and types in it, and their units.

    What fits ``schema`` fits that. A client loads every tool's schemas before it asks anything, and the relay
    checks each answer by the verb's own document anyway. What combines schemas is left as it is.
    """
    if not _COMBINING.isdisjoint(schema):
        return dict(schema)
    shown = {name: rules for name, rules in schema.items() if name not in _BOUNDS}
    if len(shown.get("description", "")) > _MOST_OF_A_UNIT:
        del shown["description"]
    if "properties" in shown:
        shown["properties"] = {name: outlined(rules) for name, rules in shown["properties"].items()}
    if isinstance(shown.get("items"), Mapping):
        shown["items"] = outlined(shown["items"])
    return shown


def with_notes(document: Any, notes: Notes, path: str = "") -> Any:
    """Return ``document`` with ``notes`` as its only descriptions. ``default`` stays."""
    if not isinstance(document, dict):
        return document
    shown: dict[str, Any] = {}
    for key, value in document.items():
        if key in _BY_NAME:
            shown[key] = {name: with_notes(each, notes, f"{path}/{name}") for name, each in value.items()}
        elif key in _SCHEMAS:
            shown[key] = with_notes(value, notes, f"{path}/*")
        elif key in _LISTS:
            shown[key] = [with_notes(each, notes, path) for each in value]
        elif key not in _ANNOTATIONS:
            shown[key] = value
    if path in notes:
        shown["description"] = notes[path]
    return shown


@dataclass(frozen=True, slots=True)
class Contract:
    """Documents and kinds that belong together.

    Attributes:
        named: the kinds besides RFC-0001's, in the order in which the operator named them.
    """

    registry: SchemaRegistry
    kinds: KindRegistry
    named: tuple[NamedKind, ...] = ()


def read_contract(names: tuple[str, ...], directory: Path | None = None) -> Contract:
    """Return the contract with the kinds ``names``, shipped or of installed packages, beside RFC-0001's.

    ``directory`` has packages that are installed for their kinds alone.

    Raises:
        ConfigError: one of them is not installed, is damaged, or cannot be told from another kind.
    """
    if not names:
        return contract_of(())
    from schemas.kind_packages import read_named_kinds  # noqa: PLC0415 - as in the module's docstring

    return contract_of(read_named_kinds(names, directory))


def contract_of(named: Sequence[NamedKind]) -> Contract:
    """Return the contract with the kinds ``named`` beside RFC-0001's."""
    kinds = KindRegistry([*rfc_kinds(), *(each.kind for each in named)])
    return Contract(SchemaRegistry(kinds=kinds, named=named), kinds, tuple(named))
