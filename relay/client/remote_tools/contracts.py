"""A tool as its caller sees it: the contract that a call is checked against.

What a server lists is a claim. Its schemas are used, for they restrict; its risk, and whether a call may be
repeated, count only if the operator's rules, a verified manifest, or ``trust_annotations`` support them.

A pin remembers what a tool was when it was first used: a server that changes it after a review (a rug pull)
would otherwise change what a model reads and what a call does. Must not call the server.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

from mcp_types import Tool

from schemas.error_roots import OperatorError, StateError
from schemas.files import PRIVATE, open_state, read_state, write_atomic
from schemas.projection import META_CANONICAL_NAME, META_SAFETY_CLASS, META_SCHEMA_REF
from schemas.text import printable

DEFAULT_DEADLINE_S = 30.0
MAX_PINS_BYTES = 32 * 1024 * 1024
_VERSION = 1
_LOCK_WAIT_S = 3.0
_LOCK_POLL_S = 0.005
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
        safety_class: of the signed manifest where ``risk_source`` is that, else what the server states; None
            if it states none of the classes.
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
    safety_class: str | None
    required_scopes: frozenset[str]
    idempotent: bool
    deadline_s: float
    canonical_name: str


def _claim(tool: Tool, key: str) -> str | None:
    """Return what ``tool`` states under ``key`` in ``_meta``: the SDK's types drop unknown annotations."""
    value = (tool.meta or {}).get(key)
    return value if isinstance(value, str) and len(value) <= 256 else None  # noqa: PLR2004 - a name


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
        self._deadline_s = DEFAULT_DEADLINE_S if deadline_s is None else deadline_s

    def contract(self, tool: Tool, verified: Verified | None = None) -> ToolContract:
        rules = self._rules_of(tool.name)
        risk, source = self._risk(tool, verified, rules)
        digest = digest_of(tool)
        _, at, version = (_claim(tool, META_SCHEMA_REF) or "").rpartition("@")
        scopes = _first(rule.scopes for rule in rules)
        safety_class = verified.safety_class if verified else _claim(tool, META_SAFETY_CLASS)
        if scopes is None:
            # What this project's relay requires for the safety class.
            scopes = frozenset({f"tools:call:{printable(safety_class, 64)}"} if safety_class else ())
        return ToolContract(
            name=tool.name,
            version=printable(version, 32) if at and version else digest[:12],
            title=tool.title or "",
            description=tool.description or "",
            input_schema=tool.input_schema,
            output_schema=tool.output_schema,
            digest=digest,
            risk=risk,
            risk_source=source,
            safety_class=safety_class if safety_class in RISK_OF_SAFETY_CLASS else None,
            required_scopes=scopes,
            idempotent=self._idempotent(tool, verified, rules),
            deadline_s=self.deadline_s_of(tool.name),
            canonical_name=_claim(tool, META_CANONICAL_NAME) or tool.name,
        )

    def deadline_s_of(self, name: str) -> float:
        """Return the longest that a call of ``name`` may take, which holds before the tool is listed too."""
        deadline_s: float | None = _first(rule.deadline_s for rule in self._rules_of(name))
        return self._deadline_s if deadline_s is None else deadline_s

    def _rules_of(self, name: str) -> list[ToolRule]:
        return [rule for rule in self._rules if fnmatchcase(name, rule.pattern)]

    def _risk(
        self, tool: Tool, verified: Verified | None, rules: Sequence[ToolRule]
    ) -> tuple[Risk, RiskSource]:
        stated = _first(rule.risk for rule in rules)
        if stated is not None:
            return stated, RiskSource.RULE
        if verified is not None:
            return RISK_OF_SAFETY_CLASS.get(verified.safety_class, Risk.ADMIN), RiskSource.MANIFEST
        if self._trusts:
            return _annotated_risk(tool), RiskSource.ANNOTATIONS
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
    annotations = tool.annotations.model_dump(exclude_none=True) if tool.annotations else None
    return {
        "name": tool.name,
        "title": tool.title,
        "description": tool.description,
        "input_schema": tool.input_schema,
        "output_schema": tool.output_schema,
        "annotations": annotations,
        "safety_class": _claim(tool, META_SAFETY_CLASS),
        "canonical_name": _claim(tool, META_CANONICAL_NAME),
        "schema_ref": _claim(tool, META_SCHEMA_REF),
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


def _annotated_risk(tool: Tool) -> Risk:
    if (safety_class := _claim(tool, META_SAFETY_CLASS)) is not None:
        return RISK_OF_SAFETY_CLASS.get(safety_class, Risk.ADMIN)
    hints = tool.annotations
    if hints is not None and hints.read_only_hint is True:
        return Risk.READ
    # Absent means destructive, by MCP's own default.
    if hints is not None and hints.destructive_hint is False:
        return Risk.WRITE
    return Risk.ADMIN


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


class PinsError(StateError):
    """The file of pins cannot be used; no tool is, until it can."""


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

    def changes(self, name: str, surface: Surface) -> list[str]:
        """Return how ``surface`` differs from the pin of ``name``, printable; nothing if it has none."""
        plain = _plain(surface)
        pinned = self._pins.get(name, plain)
        return [
            f"{printable(member, _SHOWN)}: {_difference(pinned.get(member), plain.get(member))}"
            for member in sorted({*pinned, *plain})
            # As text: to Python True is 1, and to a schema it is not.
            if json.dumps(pinned.get(member), sort_keys=True) != json.dumps(plain.get(member), sort_keys=True)
        ]

    def remember(self, surfaces: Mapping[str, Surface]) -> None:
        """Pin every tool of ``surfaces`` that has no pin yet."""
        new = {name: _plain(surface) for name, surface in surfaces.items() if name not in self._pins}
        if new:
            # A pin that another process wrote in the meantime is older, so it counts.
            self._store(lambda pins: {**new, **pins})

    def accept(self, name: str, surface: Surface) -> None:
        self._store(lambda pins: {**pins, name: _plain(surface)})

    def _store(self, change: Any) -> None:
        with self._locked():
            servers = self._read()
            pins = servers[self._server] = change(servers.get(self._server, {}))
            document = {"version": _VERSION, "servers": servers}
            text = json.dumps(document, sort_keys=True, indent=1) + "\n"
            if len(text) > MAX_PINS_BYTES:
                # It could not be read again, and other servers' tools could not be used either.
                raise PinsError(
                    f"{self._path} would have more than {MAX_PINS_BYTES} bytes: "
                    "keep the pins of this server in a file of its own"
                )
            write_atomic(self._path, text, PRIVATE)
        self._pins = pins

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let no other process write meanwhile: a pin that is lost is taken anew, when the tool has changed.

        The file itself is replaced, so the lock is that of another beside it, which stays.
        """
        import fcntl  # noqa: PLC0415 - Unix alone has it, and the client's commands run elsewhere too

        lock = self._path.with_name(f"{self._path.name}.lock")
        descriptor = open_state(lock, os.O_RDWR | os.O_CREAT)
        try:
            until_s = time.monotonic() + _LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise PinsError(f"{self._path} is written by another process: try again") from None
                    time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            document = json.loads(read_state(self._path, MAX_PINS_BYTES))
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            raise PinsError(f"{self._path} is damaged: restore it, or remove it to pin anew") from None
        servers = document.get("servers") if isinstance(document, dict) else None
        if isinstance(document, dict) and document.get("version", _VERSION) != _VERSION:
            raise PinsError(f"{self._path} is of another version of this program: name another file")
        if not isinstance(servers, dict) or not all(map(_are_pins, servers.values())):
            raise PinsError(f"{self._path} holds no pins: restore it, or remove it to pin anew")
        return servers


def _are_pins(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(pin, dict) for pin in value.values())


def _plain(surface: Surface) -> dict[str, Any]:
    """Return ``surface`` as JSON has it, so that it can be compared with what was read."""
    plain: dict[str, Any] = json.loads(json.dumps(surface))
    return plain


def _difference(before: object, after: object) -> str:
    """Return both in short, from where they begin to differ; of long ones also the digests."""
    texts = [json.dumps(value, sort_keys=True) for value in (before, after)]
    if max(len(text) for text in texts) > _SHOWN:
        pairs = zip(*texts, strict=False)
        start = next((at for at, (one, other) in enumerate(pairs) if one != other), min(map(len, texts)))
        start = max(0, start - 20)
        texts = [
            f"...{text[start : start + _SHOWN // 2]}... (sha256 {sha256(text.encode()).hexdigest()[:16]})"
            for text in texts
        ]
    return f"from {printable(texts[0], _SHOWN)} to {printable(texts[1], _SHOWN)}"
