"""What a handler returned for one verb: made safe to read, and compared with the verb's output document.

The relay judges whether its caller gets it. Here the author of the handler finds what is wrong with it, in
the node's log. Must not refuse a result, nor log a value of it.
"""

from typing import Any

from structlog.typing import FilteringBoundLogger

from schemas.images import NoImageError, apart
from schemas.kinds import Verb
from schemas.registry import SchemaRegistry
from schemas.violations import ViolationError


class VerbResults:
    """The results of ``verb``."""

    def __init__(self, verb: Verb, registry: SchemaRegistry, log: FilteringBoundLogger) -> None:
        self._verb = verb
        self._document = registry.load(verb.output_ref)
        self._log = log

    def shown(self, result: dict[str, Any], **facts: str) -> dict[str, Any]:
        """Return ``result`` with texts of third parties escaped; log, with ``facts``, what does not fit."""
        shown: dict[str, Any] = self._verb.shown(result)
        try:
            self._document.check(shown)
            apart(shown, self._verb.images)
        except ViolationError as error:
            self._log.error("result does not fit", **facts, reason=error.sentence, rule=error.rule)
        except NoImageError as error:
            self._log.error("result does not fit", **facts, reason=str(error), rule="contentMediaType")
        return shown
