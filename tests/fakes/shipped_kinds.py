"""The kinds that ship, read once for all tests, and what a node announces of RFC-0001's own."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog

from kubelet.handlers.system_echo import EchoHandler
from schemas.kinds import RFC_0001, ROW, SHIPPED, Kind, rfc_kinds, shipped_names

KINDS: Final = rfc_kinds()
SYSTEM_METRICS, SYSTEM_ECHO = KINDS
LINUX: Final = tuple(name for name in shipped_names() if name not in RFC_0001)


def announced(kind: Kind) -> Mapping[str, Any]:
    """Return the capability of ``kind``, which ships."""
    assert kind.capability is not None
    return kind.capability


ECHO, METRICS = announced(SYSTEM_ECHO), announced(SYSTEM_METRICS)


def examples(*names: str) -> dict[str, dict[str, Any]]:
    """Return a good value of each document of the kinds ``names``, by default of all, by reference."""
    found: dict[str, dict[str, Any]] = {}
    for name in names or shipped_names():
        for verb in json.loads((SHIPPED / name / ROW).read_bytes())["verbs"].values():
            found.setdefault(verb["input"], verb["example"]["arguments"])
            found.setdefault(verb["output"], verb["example"]["result"])
    return found


def echo_handler(node_id: str, now_ms: Callable[[], int], of: type[EchoHandler] = EchoHandler) -> EchoHandler:
    """Return a handler of the class ``of``."""
    return of(ECHO, node_id, now_ms, structlog.get_logger())
