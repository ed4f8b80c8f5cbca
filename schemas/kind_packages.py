"""Reads the kinds that an operator named, which ship or are a package's: a local amendment of RFC-0001.

Both have the same form and are held to the same rules. A package has an entry point in the group
``edge_kubelet.kinds``: the kind's name, and the handler as ``package.module:attribute``. Beside that module
lie ``kind.json``, its row, and ``documents/``, the schemas that the row cites. Both are found by the
metadata of the installation and read as data: a relay has no use for the handler, and must not run it. A
package that another user can change is refused, since a node runs it. Must not import a package, and must
not read one that was not named.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jsonschema_rs

from schemas.error_roots import ConfigError, OperatorError
from schemas.files import check_unchangeable, read_named
from schemas.kinds import (
    DOCUMENTS,
    RFC_0001,
    ROW,
    SHIPPED,
    KindRegistry,
    NamedKind,
    images_of,
    kind_of,
    member_at,
    rfc_kinds,
    shipped_names,
)
from schemas.projection import NODE_ID_PATTERN
from schemas.registry import SCHEME, SchemaRegistry
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable
from schemas.times import moments_of
from schemas.violations import ViolationError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "edge_kubelet.kinds"

_RULES = Path(__file__).with_name("kind_rules")
_ROW_REF = "kind_row@1.3.0"
_SCHEMA_REF = "kind_schema@1.1.0"
_KINDS_VIEW_REFS = ("kind_call.input@1.0.0", "kind_call.output@1.0.0")
_MAX_BYTES = 64 * 1024
_HANDLER = re.compile(r"(?a:[A-Za-z_]\w*\.)+(?a:[A-Za-z_]\w*):(?a:[A-Za-z_]\w*)")
_NODE_ID = f"^{NODE_ID_PATTERN}$"
_ANY_TEXT = r"^[\x20-\x7E]*$"
_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_MAX_COUNTS = 1024
"""A pattern with several counts takes steps of their sum for each character."""
_RESERVED = "system."


class KindPackageError(OperatorError):
    """A package's kind cannot be used. The text names the file and the rule."""


def sites_in(directory: Path | None) -> list[Path]:
    """Return the directories of the packages that are installed in ``directory``, for their kinds alone."""
    if directory is None or not directory.is_dir():
        return []
    return sorted(each for each in directory.iterdir() if not each.name.startswith("."))


def read_named_kinds(names: Sequence[str], directory: Path | None = None) -> tuple[NamedKind, ...]:
    """Return the kinds ``names``, which ship, or which installed packages bring, also those in ``directory``.

    Raises:
        ConfigError: one of them is not installed, is installed twice, breaks a rule, or has the name or the
            short name of another kind.
    """
    found: list[NamedKind] = []
    problems: list[str] = []
    for name in names:
        try:
            known = KindRegistry([*rfc_kinds(), *(each.kind for each in found)])
            found.append(_read_beside(known, name, sites_in(directory)))
        except KindPackageError as error:
            problems.append(f"kinds: {name}: {error}")
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def _read_beside(known: KindRegistry, name: str, sites: Sequence[Path]) -> NamedKind:
    if known.get(name) is not None:
        raise KindPackageError("a kind of this name exists already")
    read = read_shipped(name) if name in shipped_names() else _read_package(name, sites)
    if (other := known.by_short(read.kind.short)) is not None:
        raise KindPackageError(f"its kind_short {read.kind.short} is that of {other.name}")
    return read


def shipped_beside(known: KindRegistry) -> tuple[NamedKind, ...]:
    """Return each shipped kind whose name and ``kind_short`` no kind of ``known`` has."""
    others = (name for name in shipped_names() if known.get(name) is None)
    return tuple(kind for kind in map(read_shipped, others) if known.by_short(kind.kind.short) is None)


def read_shipped(name: str) -> NamedKind:
    """Return the kind ``name``, which ships: its files are the program's, and a test holds them to the rules.

    To check them at each start takes a node 3 MiB.
    """
    directory = SHIPPED / name
    row = json.loads((directory / ROW).read_bytes())
    cited = {row["schema_ref"].removeprefix(SCHEME)}
    refs = cited.union(*({verb["input"], verb["output"]} for verb in row["verbs"].values()))
    documents = {
        ref: json.loads((directory / DOCUMENTS / f"{ref}.json").read_bytes()) for ref in sorted(refs)
    }
    return NamedKind(kind_of(row, documents), _as_bytes(documents))


def _read_package(name: str, sites: Sequence[Path]) -> NamedKind:
    entry = _entry_point(name, sites)
    directory = _directory(entry, sites)
    read = read_kind(directory, name, partial(_load, entry))
    if name.startswith(_RESERVED):
        raise KindPackageError(f"{directory / ROW}: /kind must not begin with {_RESERVED}: RFC-0001's")
    if read.kind.capability is not None:
        raise KindPackageError(f"{directory / ROW}: /capability is what its handler says: leave it out")
    return read


def read_kind(directory: Path, name: str, load_handler: Callable[[], object] | None = None) -> NamedKind:
    """Return the kind ``name``, whose row and documents lie in ``directory``.

    The documents of RFC-0001's kinds are not held to the dialect.

    Raises:
        KindPackageError: a file is missing, or breaks a rule.
    """
    rules, file = SchemaRegistry(_RULES), directory / ROW
    row = _checked(file, rules, _ROW_REF)
    if row["kind"] != name:
        raise KindPackageError(f"{file}: /kind must be {name}, the name of the entry point")
    documents: dict[str, Mapping[str, Any]] = {}
    for ref in sorted({verb[end] for verb in row["verbs"].values() for end in ("input", "output")}):
        documents[ref] = _document(directory, name, ref, rules)
    cited = row["schema_ref"].removeprefix(SCHEME)
    if cited not in documents:
        documents[cited] = _bundle(directory, name, cited, documents)
    shipped = SchemaRegistry()
    reserved = {member for ref in _KINDS_VIEW_REFS for member in shipped.document(ref)["properties"]}
    for verb, facts in row["verbs"].items():
        ends = documents[facts["input"]], documents[facts["output"]]
        problems = (
            *_document_problems(facts, *ends, reserved),
            *_row_problems(facts, *ends),
            *(() if name in RFC_0001 else _text_problems(facts, ends[1], rules)),
            *_example_problems(facts, *ends),
        )
        for problem in problems:
            raise KindPackageError(f"{file}: /verbs/{verb}: {problem}")
    return NamedKind(kind_of(row, documents), _as_bytes(documents), load_handler)


def _as_bytes(documents: Mapping[str, Mapping[str, Any]]) -> Mapping[str, bytes]:
    return MappingProxyType({ref: json.dumps(each).encode("ascii") for ref, each in documents.items()})


def _load(entry: "EntryPoint") -> object:
    site = str(entry.dist.locate_file("")) if entry.dist is not None else ""
    if site not in sys.path:
        sys.path.append(site)  # last, so that it replaces no module
    return entry.load()


def _entry_point(name: str, sites: Sequence[Path]) -> "EntryPoint":
    found = list(metadata.entry_points(group=GROUP, name=name))
    for package in metadata.distributions(path=[str(site) for site in sites]):
        found += package.entry_points.select(group=GROUP, name=name)
    if not found:
        raise KindPackageError(f"no installed package has an entry point of this name in {GROUP}")
    if len(found) > 1:
        packages = sorted(printable(each.dist.name, 64) for each in found if each.dist is not None)
        raise KindPackageError(f"several packages bring it: {', '.join(packages)}; uninstall all but one")
    return found[0]


def _directory(entry: "EntryPoint", sites: Sequence[Path]) -> Path:
    """Return where the module of the handler lies, by the files that the installation has recorded."""
    if not _HANDLER.fullmatch(entry.value):
        raise KindPackageError(f"its entry point must be package.module:attribute in {GROUP}")
    row = metadata.PackagePath(*entry.module.split(".")[:-1], ROW)
    if entry.dist is None or row not in (entry.dist.files or ()):
        raise KindPackageError(f"its package is installed without {row}; an editable installation has none")
    site = Path(str(entry.dist.locate_file("")))
    try:
        # With what it needs, where all that is there is the kind's.
        _check_owners(site, site if site in sites else site / row.parts[0])
    except OSError as error:
        raise KindPackageError(str(error)) from None
    return Path(str(entry.dist.locate_file(row))).parent


def _check_owners(site: Path, package: Path) -> None:
    """See that no other user can change ``package``, or put another in its place in ``site``.

    Raises:
        OSError: one can, or it cannot be read.
    """
    check_unchangeable(site)
    for directory, _, files in os.walk(package, onerror=_raised):
        for path in (Path(directory), *(Path(directory, name) for name in files)):
            check_unchangeable(path)


def _raised(error: OSError) -> None:
    raise error


def _bundle(
    directory: Path, name: str, ref: str, documents: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the document ``ref``, which holds those of the verbs as they are, and nothing else."""
    file = directory / DOCUMENTS / f"{ref}.json"
    if not ref.startswith(f"{name}@") or not file.is_file():
        raise KindPackageError(
            f"{directory / ROW}: /schema_ref must be {SCHEME} and a document of one of the verbs,"
            " or a bundle of them all"
        )
    bundle = _loaded(file)
    held = bundle.get("$defs")
    if (
        set(bundle) - {"title", "description"} != {"$schema", "$id", "$defs"}
        or bundle["$id"] != SCHEME + ref
        or not isinstance(held, dict)
        or {each.get("$id"): each for each in held.values()}
        != {document["$id"]: document for document in documents.values()}
        or len(held) != len(documents)
    ):
        raise KindPackageError(f"{file}: a bundle has the documents of all verbs in $defs, each as it is")
    return bundle


def _document(directory: Path, name: str, ref: str, rules: SchemaRegistry) -> Mapping[str, Any]:
    if not ref.startswith((f"{name}.", f"{name}@")):
        raise KindPackageError(f"{directory / ROW}: the name of the document {ref} must begin with {name}")
    file = directory / DOCUMENTS / f"{ref}.json"
    document = _loaded(file) if name in RFC_0001 else _checked(file, rules, _SCHEMA_REF)
    if document["$id"] != SCHEME + ref:
        raise KindPackageError(f"{file}: /$id must be {SCHEME}{ref}")
    for problem in _pattern_problems(document):
        raise KindPackageError(f"{file}: {problem}")
    return document


def _pattern_problems(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the patterns of ``document`` that the schema of documents cannot express."""
    if any(_counts_too_far(pattern) for pattern in _patterns(document)):
        yield f"the counts of a pattern must not add up to more than {_MAX_COUNTS}"
    try:
        jsonschema_rs.Draft202012Validator(dict(document))
    except ValueError:
        yield "one of its patterns is no regular expression"


def _counts_too_far(pattern: str) -> bool:
    counts = [int(most or least) for least, most in _COUNT.findall(pattern)]
    return len(counts) > 1 and sum(counts) > _MAX_COUNTS


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    if "pattern" in schema:
        yield schema["pattern"]
    for inner in (*schema.get("properties", {}).values(), *filter(None, [schema.get("items")])):
        yield from _patterns(inner)


def _loaded(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``."""
    try:
        value = loads(read_named(file, _MAX_BYTES), max_bytes=_MAX_BYTES)
    except OSError as error:
        raise KindPackageError(f"{file}: {error.strerror}" if error.strerror else str(error)) from None
    except StrictJsonError as error:
        raise KindPackageError(f"{file}: not JSON: {printable(str(error))}") from None
    return value if isinstance(value, dict) else {}


def _checked(file: Path, rules: SchemaRegistry, ref: str) -> dict[str, Any]:
    """Return the JSON in ``file``, which fits the document ``ref`` of ``rules``."""
    value = _loaded(file)
    try:
        rules.load(ref).check(value)
    except ViolationError as error:
        raise KindPackageError(f"{file}: {error.sentence} ({error.rule})") from None
    return value


def _document_problems(
    facts: Mapping[str, Any], sent: Mapping[str, Any], answered: Mapping[str, Any], reserved: set[str]
) -> Iterator[str]:
    """Yield what is wrong with the two documents of a verb that the schema of documents cannot express."""
    ours = ("node_id", "ts_ms") if facts.get("streams") else ("node_id",)
    needed = {"input": ("interval_ms",) if facts.get("streams") else (), "output": ours}
    for end, document in (("input", sent), ("output", answered)):
        members, required = document["properties"].keys(), set(document.get("required", ()))
        if missing := sorted(set(needed[end]) - required):
            yield f"its {end} must require {', '.join(missing)}"
        if missing := sorted(required - members):
            yield f"its {end} requires what it does not define: {', '.join(missing)}"
        images = {member.name for member in images_of(document)}
        if images and (end == "input" or facts.get("streams")):
            yield f"members of its {end} are images, which only the output of a call has"
        if wrong := sorted(images & required):
            yield f"images leave the result, so its {end} must not require {', '.join(wrong)}"
        # The kinds view shows the ISO form of the output's moments beside them.
        moments = moments_of(document) if end == "output" else {}
        if taken := sorted(name for name in members if reserved & {name, moments.get(name)}):
            yield f"members of its {end} have a meaning in the kinds view: {', '.join(taken)}"
    if answered["properties"]["node_id"].get("pattern") != _NODE_ID:
        yield f"node_id of its output must have the pattern {_NODE_ID}"


def _row_problems(
    facts: Mapping[str, Any], sent: Mapping[str, Any], answered: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what the row states of the documents and is not so."""
    for member in facts.get("verbatim", ()):
        if member not in sent["properties"] or member not in answered["properties"]:
            yield f"verbatim names {member}, which is not a member of both documents"
    for member in facts.get("guarded", ()):
        if member not in answered["properties"] or member in answered.get("required", ()):
            yield f"guarded names {member}, which must be a member of the output that is not required"


def _text_problems(
    facts: Mapping[str, Any], answered: Mapping[str, Any], rules: SchemaRegistry
) -> Iterator[str]:
    """Yield what is wrong with the texts of third parties that the row names, by the dialect."""
    for member in ("foreign_texts", "free_texts"):
        for entry in facts.get(member, ()):
            own = entry if isinstance(entry, dict) else {"path": entry}
            text, place = member_at(answered, own["path"]), "/".join(own["path"])
            if text.get("pattern") != _ANY_TEXT:
                yield f"{member} names {place}, which is no string with the pattern {_ANY_TEXT}"
            elif own.get("limit", 0) > text["maxLength"]:
                yield f"{member} cuts {place} at {own['limit']}, above its maxLength"
            elif "usual" in own:
                of_text = {**answered, "properties": {"text": {**text, "pattern": own["usual"]}}}
                fits = rules.load(_SCHEMA_REF).is_valid(of_text)
                if not fits or any(_pattern_problems(of_text)):
                    yield f"the usual {place} has a pattern that a document cannot have"


def _example_problems(
    facts: Mapping[str, Any], sent: Mapping[str, Any], answered: Mapping[str, Any]
) -> Iterator[str]:
    for member, document in (("arguments", sent), ("result", answered)):
        example = facts.get("example", {}).get(member)
        if example is not None and not jsonschema_rs.Draft202012Validator(dict(document)).is_valid(example):
            yield f"its example has {member} that do not fit their document"
