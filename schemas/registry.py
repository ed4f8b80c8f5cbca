"""The schema registry: every document by its reference, and the compiled validators.

A reference is the part after ``mcp://schemas/``: ``{kind}@{semver}``. Look-ups are dictionary
look-ups, never paths. Must not hand out anything that a caller could change for others.
"""

import json
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jsonschema_rs

from schemas.canonical import jcs
from schemas.kinds import MANIFEST_REF, KindRegistry, NamedKind
from schemas.manifest_amendment import amended
from schemas.projection import parse
from schemas.text import printable
from schemas.violations import ViolationError, violation_of

SCHEME = "mcp://schemas/"
TOOL_PREFIX = "mcp.tool:"
ENVELOPE_REF = "envelope@1.0.0"

_DOCUMENTS = Path(__file__).with_name("documents")

# What makes a document depend on another; a value of one of them that is no text is a property of that name.
_REFERENCES = ("$ref", "$dynamicRef")


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
    """The documents below ``schema_root`` (default: those that ship with this package).

    ``kinds`` defines which documents a tool has (default: the kinds that ship). Registries that are given the
    same ``compiled`` compile what they have in common once; without it each has its own. The documents of the
    kinds ``named`` are there too, and a manifest may contain them: the manifest's document is the only one
    that validates by other rules than those that are served.

    Raises:
        ValueError: a document is not JSON, has no ``$id`` of ours, or one that another has; or it refers to
            what is none of these documents.
    """

    def __init__(
        self,
        schema_root: Path | None = None,
        kinds: KindRegistry | None = None,
        compiled: MutableMapping[str, Validator] | None = None,
        named: Sequence[NamedKind] = (),
    ) -> None:
        files = _files(schema_root or _DOCUMENTS)
        canonical: dict[str, bytes] = {}
        direct: dict[str, set[str]] = {}
        # One by one, and kept as bytes: parsed, all of them take a mebibyte of every board.
        for ref, file in files.items():
            document = _read(ref, file)
            canonical[ref] = jcs(document)
            direct[ref] = _referred(ref, document, files)
        for ref, brought in ((ref, brought) for each in named for ref, brought in each.documents.items()):
            canonical[ref] = jcs(brought)
            direct[ref] = _referred(ref, brought, files)
        self._bytes = MappingProxyType(canonical)
        self._rules = self._bytes
        if named:
            rules = jcs(amended(self.document(MANIFEST_REF), named))
            self._rules = MappingProxyType({**canonical, MANIFEST_REF: rules})
        referred = {other for ref, others in direct.items() for other in others - {ref}}
        self._resources = jsonschema_rs.Registry([(SCHEME + ref, self._rules_of(ref)) for ref in referred])
        self._fingerprints = {ref: _fingerprint(ref, direct, self._rules) for ref in canonical}
        self._kinds = kinds or KindRegistry()
        self._compiled: MutableMapping[str, Validator] = {} if compiled is None else compiled

    @property
    def documents(self) -> Mapping[str, bytes]:
        """Every document's canonical bytes by reference."""
        return self._bytes

    def document(self, ref: str) -> dict[str, Any]:
        """Return a copy of the document ``ref``, the taker's own.

        Raises:
            KeyError: there is none.
        """
        copy: dict[str, Any] = json.loads(self._bytes[ref])
        return copy

    def load(self, ref: str) -> Validator:
        """Return the compiled validator of the document ``ref``.

        Compiled once per content: the cache is keyed by the SHA-256 of the canonical bytes, those of every
        document that it refers to among them, for they decide as much as its own.

        Raises:
            KeyError: there is no such document.
        """
        key = self._fingerprints[ref]
        if (known := self._compiled.get(key)) is not None:
            return known
        compiled = jsonschema_rs.Draft202012Validator(self._rules_of(ref), registry=self._resources)
        validator = self._compiled[key] = Validator(compiled, ref, self._rules_of)
        return validator

    def _rules_of(self, ref: str) -> dict[str, Any]:
        rules: dict[str, Any] = json.loads(self._rules[ref])
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


def _at(document: Any, pointer: str) -> Any:
    """Return what the JSON pointer ``pointer`` of a reference names in ``document``."""
    place = document
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        place = place[int(key) if isinstance(place, list) else key]
    return place


def _files(directory: Path) -> dict[str, Path]:
    """Return the files of documents by reference, sorted."""
    entries = sorted(entry for entry in directory.iterdir() if entry.suffix == ".json")
    return {entry.name.removesuffix(".json"): entry for entry in entries}


def _read(ref: str, file: Path) -> dict[str, Any]:
    document = json.loads(file.read_text(encoding="utf-8"))
    # A file's name is unique in its directory, so an id that must equal it is unique too.
    if not isinstance(document, dict) or document.get("$id") != SCHEME + ref:
        raise ValueError(f"{file.name}: its $id must be {SCHEME}{ref}")
    return document


def _referred(ref: str, document: Mapping[str, Any], documents: Container[str]) -> set[str]:
    """Return which of ``documents`` the ``document`` of ``ref`` itself refers to."""
    found = set()
    for text in _references(document):
        other, _, _ = text.removeprefix(SCHEME).partition("#")
        # A relative reference would have to be resolved as a URL to know what it refers to.
        if other and (not text.startswith(SCHEME) or other not in documents):
            raise ValueError(f"{ref}.json: refers to {printable(text)}, which is no document here by its $id")
        found.add(other or ref)
    return found


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


def _fingerprint(ref: str, direct: Mapping[str, set[str]], documents: Mapping[str, bytes]) -> str:
    reached, ahead = {ref}, [ref]
    while ahead:
        new = direct[ahead.pop()] - reached
        reached |= new
        ahead += new
    # Canonical JSON contains no line feed, so what is joined by it can be read in one way only.
    parts = [documents[ref], *(documents[other] for other in sorted(reached - {ref}))]
    return sha256(b"\n".join(parts)).hexdigest()
