"""A tool as its caller sees it: the contract that a call is checked against.

What a server lists is a claim. Its schemas are used, for they restrict; its risk, and whether a call may be
repeated, count only if the operator's rules, a verified manifest, or ``trust_annotations`` support them.

A pin remembers what a tool was when it was first used: a server that changes it after a review (a rug pull)
would otherwise change what a model reads and what a call does. Must not call the server.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

from mcp_types import Tool

from schemas.error_roots import OperatorError, StateError
from schemas.files import PRIVATE, read_state, write_atomic
from schemas.projection import META_CANONICAL_NAME, META_SAFETY_CLASS, META_SCHEMA_REF
from schemas.text import printable

DEFAULT_DEADLINE_S = 30.0
MAX_PINS_BYTES = 32 * 1024 * 1024
_SHOWN = 160

Surface = Mapping[str, Any]
_CLAIMS = (META_SAFETY_CLASS, META_CANONICAL_NAME, META_SCHEMA_REF)


class Risk(StrEnum):
    """What a call can do, from the least to the most."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    @property
    def level(self) -> int:
        """The position: a ceiling admits its own level and those below."""
        return (Risk.READ, Risk.WRITE, Risk.ADMIN).index(self)


class RiskSource(StrEnum):
    """What a contract's risk is based on."""

    RULE = "rule"
    MANIFEST = "manifest"
    ANNOTATIONS = "annotations"
    DEFAULT = "default"


RISK_OF_SAFETY_CLASS: Mapping[str, Risk] = {
    "read_only": Risk.READ,
    "reversible": Risk.WRITE,
    "physical_actuation": Risk.ADMIN,
}


@dataclass(frozen=True, slots=True)
class ToolRule:
    """What the operator states of the tools whose name ``pattern`` (a glob) matches; None leaves it open.

    Of several rules that match, the first that states a thing decides it.
    """

    pattern: str
    risk: Risk | None = None
    idempotent: bool | None = None
    deadline_s: float | None = None
    scopes: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """What is known of a tool that a server cannot change: its node has signed it, or it is of its kind.

    Attributes:
        kind: the short token of the kind, if the tool reaches any node of it: then the manifests of the
            nodes that a call names, and of those that have answered it, are verified with the call.
    """

    safety_class: str
    idempotent: bool
    good_until_ms: int
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class ToolContract:
    """What is known of a tool before it is called (SPEC-0004 section 3.1).

    Attributes:
        name: as the server lists it, and as it is called.
        version: of the schema that the server names; else the first digits of ``digest``.
        description: the server's text: untrusted, and meant for a model.
        digest: SHA-256 over all that a model or a validator reads of the tool.
        risk, risk_source: what a call can do, and what that is based on.
        required_scopes: the scopes that the caller must have been granted.
        idempotent: whether a call may be repeated after a transient failure.
        deadline_s: the longest that a call may take.
        canonical_name: the name by which this project's relay records it; else ``name``.
    """

    name: str
    version: str
    title: str
    description: str
    input_schema: Mapping[str, Any]
    output_schema: Mapping[str, Any] | None
    digest: str
    risk: Risk
    risk_source: RiskSource
    required_scopes: frozenset[str]
    idempotent: bool
    deadline_s: float
    canonical_name: str


@dataclass(frozen=True, slots=True)
class Claims:
    """What the server states of a tool, as far as it is used."""

    safety_class: str | None
    canonical_name: str | None
    schema_ref: str | None

    @classmethod
    def of(cls, tool: Tool) -> "Claims":
        """Return what ``tool`` states in its ``_meta``: the SDK's types drop unknown annotations."""
        meta = tool.meta or {}

        def text(key: str) -> str | None:
            value = meta.get(key)
            return value if isinstance(value, str) and len(value) <= 256 else None  # noqa: PLR2004 - a name

        return cls(text(META_SAFETY_CLASS), text(META_CANONICAL_NAME), text(META_SCHEMA_REF))


def is_deadline(seconds: float | None) -> bool:
    """Return whether ``seconds`` are a time, or left open: what is not a number would mix up timers."""
    return seconds is None or seconds >= 0


class ContractTerms:
    """Makes contracts from listed tools, by the operator's rules.

    Raises:
        OperatorError: a deadline is negative or not a number.
    """

    def __init__(
        self,
        rules: Sequence[ToolRule] = (),
        *,
        trust_annotations: bool = False,
        deadline_s: float | None = None,
    ) -> None:
        if not all(map(is_deadline, (deadline_s, *(rule.deadline_s for rule in rules)))):
            raise OperatorError("a deadline is negative or not a number; give it in seconds")
        self._rules = tuple(rules)
        self._trusts = trust_annotations
        self._deadline_s = deadline_s or DEFAULT_DEADLINE_S

    def contract(self, tool: Tool, verified: Verified | None = None) -> ToolContract:
        claims = Claims.of(tool)
        rules = [rule for rule in self._rules if fnmatchcase(tool.name, rule.pattern)]
        risk, source = self._risk(tool, claims, verified, rules)
        digest = digest_of(tool)
        scopes = _first(rule.scopes for rule in rules)
        deadline_s = _first(rule.deadline_s for rule in rules)
        if deadline_s is None:
            deadline_s = self._deadline_s
        return ToolContract(
            name=tool.name,
            version=_version(claims) or digest[:12],
            title=tool.title or "",
            description=tool.description or "",
            input_schema=tool.input_schema,
            output_schema=tool.output_schema,
            digest=digest,
            risk=risk,
            risk_source=source,
            required_scopes=_scopes(claims, verified) if scopes is None else scopes,
            idempotent=self._idempotent(tool, verified, rules),
            deadline_s=deadline_s,
            canonical_name=claims.canonical_name or tool.name,
        )

    def _risk(
        self, tool: Tool, claims: Claims, verified: Verified | None, rules: Sequence[ToolRule]
    ) -> tuple[Risk, RiskSource]:
        stated = _first(rule.risk for rule in rules)
        if stated is not None:
            return stated, RiskSource.RULE
        if verified is not None:
            return RISK_OF_SAFETY_CLASS.get(verified.safety_class, Risk.ADMIN), RiskSource.MANIFEST
        if self._trusts:
            return _annotated_risk(tool, claims), RiskSource.ANNOTATIONS
        return Risk.ADMIN, RiskSource.DEFAULT

    def _idempotent(self, tool: Tool, verified: Verified | None, rules: Sequence[ToolRule]) -> bool:
        stated: bool | None = _first(rule.idempotent for rule in rules)
        if stated is not None:
            return stated
        if verified is not None:
            return verified.idempotent
        return self._trusts and tool.annotations is not None and tool.annotations.idempotent_hint is True


def surface_of(tool: Tool) -> dict[str, Any]:
    """Return all that a model or a validator reads of ``tool``: what a pin remembers."""
    claims = Claims.of(tool)
    annotations = tool.annotations.model_dump(exclude_none=True) if tool.annotations else None
    return {
        "name": tool.name,
        "title": tool.title,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "output_schema": tool.output_schema,
        "annotations": annotations,
        "safety_class": claims.safety_class,
        "canonical_name": claims.canonical_name,
        "schema_ref": claims.schema_ref,
    }


def as_used(tool: Tool) -> Tool:
    """Return ``tool`` with what is used of it alone: the rest may be of any size."""
    claims = {name: value for name, value in (tool.meta or {}).items() if name in _CLAIMS}
    return tool.model_copy(update={"meta": claims, "icons": None, "execution": None})


def size_of(tool: Tool) -> int:
    """Return the bytes of what is used of ``tool``, as JSON."""
    return len(json.dumps(surface_of(tool)))


def digest_of(tool: Tool) -> str:
    """Return the SHA-256 of ``surface_of(tool)`` in hex."""
    return sha256(json.dumps(surface_of(tool), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _annotated_risk(tool: Tool, claims: Claims) -> Risk:
    if claims.safety_class is not None:
        return RISK_OF_SAFETY_CLASS.get(claims.safety_class, Risk.ADMIN)
    hints = tool.annotations
    if hints is not None and hints.read_only_hint is True:
        return Risk.READ
    # Absent means destructive, by MCP's own default.
    if hints is not None and hints.destructive_hint is False:
        return Risk.WRITE
    return Risk.ADMIN


def _scopes(claims: Claims, verified: Verified | None) -> frozenset[str]:
    """Return the scope that this project's relay requires for the tool's safety class."""
    safety_class = verified.safety_class if verified else claims.safety_class
    return frozenset({f"tools:call:{printable(safety_class, 64)}"} if safety_class else ())


def _version(claims: Claims) -> str | None:
    _, at, version = (claims.schema_ref or "").rpartition("@")
    return printable(version, 32) if at and version else None


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


class PinsError(StateError):
    """The file of pins cannot be used; no tool is, until it can."""


@dataclass(frozen=True, slots=True)
class Change:
    """One member of a tool that differs from its pin. ``before`` and ``after`` are printable and cut."""

    member: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.member}: from {self.before} to {self.after}"


class Pins:
    """The pins of one server's tools in the file ``path``, which other servers and processes may share.

    Raises:
        PinsError: the file is damaged.
        OSError: it cannot be read, or others could have changed it.
    """

    def __init__(self, path: Path, server: str) -> None:
        self._path = path
        self._server = server
        self._pins = self._read().get(server, {})

    def changes(self, name: str, surface: Surface) -> tuple[Change, ...]:
        """Return how ``surface`` differs from the pin of ``name``; nothing if it is equal or has none."""
        pinned = self._pins.get(name)
        if pinned is None or pinned == _plain(surface):
            return ()
        members = sorted({*pinned, *surface})
        plain = _plain(surface)
        return tuple(
            Change(printable(member, _SHOWN), *_shown(pinned.get(member), plain.get(member)))
            for member in members
            if pinned.get(member) != plain.get(member)
        )

    def remember(self, surfaces: Mapping[str, Surface]) -> None:
        """Pin every tool of ``surfaces`` that has no pin yet."""
        new = {name: _plain(surface) for name, surface in surfaces.items() if name not in self._pins}
        if new:
            # A pin that another process wrote in the meantime is older, so it counts.
            self._store(lambda pins: {**new, **pins})

    def accept(self, name: str, surface: Surface) -> None:
        self._store(lambda pins: {**pins, name: _plain(surface)})

    def _store(self, change: Any) -> None:
        servers = self._read()
        self._pins = servers[self._server] = change(servers.get(self._server, {}))
        document = {"version": 1, "servers": servers}
        write_atomic(self._path, json.dumps(document, sort_keys=True, indent=1) + "\n", PRIVATE)

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            document = json.loads(read_state(self._path, MAX_PINS_BYTES))
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            raise PinsError(f"{self._path} is damaged: restore it, or remove it to pin anew") from None
        servers = document.get("servers") if isinstance(document, dict) else None
        if not isinstance(servers, dict) or not all(map(_are_pins, servers.values())):
            raise PinsError(f"{self._path} holds no pins: restore it, or remove it to pin anew")
        return servers


def _are_pins(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(pin, dict) for pin in value.values())


def _plain(surface: Surface) -> dict[str, Any]:
    """Return ``surface`` as JSON has it, so that it can be compared with what was read."""
    plain: dict[str, Any] = json.loads(json.dumps(surface))
    return plain


def _shown(before: object, after: object) -> tuple[str, str]:
    """Return both as short texts, from where they begin to differ; of long ones also the digests."""
    texts = [json.dumps(value, sort_keys=True) for value in (before, after)]
    if max(len(text) for text in texts) <= _SHOWN:
        return printable(texts[0], _SHOWN), printable(texts[1], _SHOWN)
    pairs = zip(*texts, strict=False)
    start = next((at for at, (one, other) in enumerate(pairs) if one != other), min(map(len, texts)))
    start = max(0, start - 20)
    cut = [f"...{text[start : start + _SHOWN // 2]}... ({_digest(text)})" for text in texts]
    return printable(cut[0], _SHOWN), printable(cut[1], _SHOWN)


def _digest(text: str) -> str:
    return f"sha256 {sha256(text.encode()).hexdigest()[:16]}"
