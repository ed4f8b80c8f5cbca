"""Remembers what each tool was when it was first used, and refuses it once it is something else.

A server that changes a tool after it was reviewed (a rug pull) would otherwise change what a model reads and
what a call does. The file is read again before every change, so that processes can share it. Must not contact
the server.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from schemas.error_roots import StateError
from schemas.files import PRIVATE, read_state, write_atomic
from schemas.text import printable

MAX_PINS_BYTES = 32 * 1024 * 1024
_SHOWN = 160

Surface = Mapping[str, Any]


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
    """The pins of one server's tools in the file ``path``, which other servers may share.

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
        """Pin ``name`` as it is in ``surface``."""
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
