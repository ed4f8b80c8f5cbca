"""The verbs of a handler, with the documents of their arguments and results: for whatever runs it.

The relay judges whether its caller gets a result. Here the author of the handler finds what is wrong with it,
in the node's log. Must not refuse a result, nor log a value of it.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from structlog.typing import FilteringBoundLogger

from kubelet.handlers.base import Handler
from schemas.images import NoImageError, apart
from schemas.kinds import Kind, KindRegistry
from schemas.registry import SchemaRegistry
from schemas.text import changed_at
from schemas.violations import ViolationError

_SHORT, _HINTS = 20, frozenset(":= ")
"""No form of a secret is shorter, and has none of these characters."""
_MOST_IN_LOOP = 16 * 1024
"""So many characters take some milliseconds to search; more are searched on a thread."""


class HandlerVerb:
    """The verb ``name`` of what ``handler`` announces, which is of ``kind``.

    Its documents are compiled at its first call: those of a board's kinds take most of a mebibyte.
    """

    def __init__(
        self, handler: Handler, kind: Kind, name: str, registry: SchemaRegistry, log: FilteringBoundLogger
    ) -> None:
        self.handler = handler
        self.kind = kind
        self.verb = kind.verbs[name]
        self._registry = registry
        self._log = log

    def accepts(self, arguments: Mapping[str, Any]) -> bool:
        return self._registry.load(self.verb.input_ref).is_valid(arguments)

    async def invoke(self, arguments: Mapping[str, Any], **facts: str) -> dict[str, Any]:
        """Run it, and return the result with texts of third parties redacted and escaped.

        What does not fit the output document is logged, with ``facts``.

        Raises:
            Exception: what the handler raises.
        """
        result = await self.handler.invoke(self.verb.name, arguments)
        if self._searched(result) > _MOST_IN_LOOP:
            result = await asyncio.to_thread(self._without_secrets, result)
        else:
            result = self._without_secrets(result)
        shown: dict[str, Any] = self.verb.shown(result)
        try:
            self._registry.load(self.verb.output_ref).check(shown)
            apart(shown, self.verb.images)
        except ViolationError as error:
            self._log.error("result does not fit", **facts, reason=error.sentence, rule=error.rule)
        except NoImageError as error:
            self._log.error("result does not fit", **facts, reason=str(error), rule="contentMediaType")
        return shown

    def _searched(self, result: dict[str, Any]) -> int:
        """Return how many characters of ``result`` are searched for secrets."""
        lengths: list[int] = []

        def note(text: str) -> str:
            lengths.append(len(text))
            return text

        for text in self.verb.foreign_texts:
            changed_at(result, text.path, note)
        return sum(lengths)

    def _without_secrets(self, result: dict[str, Any]) -> dict[str, Any]:
        for text in self.verb.foreign_texts:
            result = changed_at(result, text.path, _redacted)
        return result


def _redacted(text: str) -> str:
    """Return ``text`` without secrets of known forms.

    A node that shows nothing but names of mount points does without the table.
    """
    if len(text) < _SHORT and _HINTS.isdisjoint(text):
        return text
    from kubelet.handlers.redaction import redacted  # noqa: PLC0415 - memory that few nodes need

    return redacted(text)


def verbs_of(
    handler: Handler, kinds: KindRegistry, registry: SchemaRegistry, log: FilteringBoundLogger
) -> list[HandlerVerb]:
    """Return the verbs that ``handler`` announces.

    Raises:
        ValueError: its kind is not registered.
    """
    capability = handler.capability
    kind = kinds.get(capability["kind"])
    if kind is None:
        raise ValueError(f"{capability['kind']} is not a registered kind")
    return [HandlerVerb(handler, kind, name, registry, log) for name in capability["verbs"]]


def commands_per_s(handlers: Iterable[Handler]) -> float:
    """Return how many commands a second ``handlers`` announce together: at least one of each capability."""
    rates: Iterable[float] = (handler.capability["constraints"]["rate_limit_rps"] for handler in handlers)
    return sum(max(1.0, rate) for rate in rates)
