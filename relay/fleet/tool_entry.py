"""A tool's entry in ``tools/list``, as a document and as JSON text.

The entries of all tools of one kind, verb and safety class differ in three short strings only. Such tools
share one template of about two kilobytes, from which the text of an entry is put together without encoding.
Must not know nodes.
"""

from collections.abc import Mapping
from typing import Any

from relay.ascii_json import encoded
from schemas.kinds import Verb
from schemas.registry import SCHEME

META_SAFETY_CLASS = "edge-kubelet/safety-class"
META_CAPABILITY_ETAG = "edge-kubelet/capability-etag"
META_CANONICAL_NAME = "edge-kubelet/canonical-name"
META_SCHEMA_REF = "edge-kubelet/schema-ref"

# A character that none of our documents contains: marks in the template where a string goes.
_GAP = "\0"


class EntryTemplate:
    """What the entries of one kind, verb and safety class have in common.

    Raises:
        ValueError: a document contains a NUL character.
    """

    def __init__(
        self,
        verb: Verb,
        input_schema: Mapping[str, Any],
        output_schema: Mapping[str, Any],
        safety_class: str,
    ) -> None:
        self._shared = {
            "title": verb.title,
            "description": verb.description,
            "inputSchema": input_schema,
            "outputSchema": output_schema,
            "annotations": {
                "title": verb.title,
                "readOnlyHint": safety_class == "read_only",
                "destructiveHint": safety_class == "physical_actuation",
                "idempotentHint": verb.idempotent,
                "openWorldHint": False,
                "x-safety-class": safety_class,
            },
        }
        self._safety_class = safety_class
        self._schema_ref = SCHEME + verb.input_ref
        text = encoded(self.document(_GAP, _GAP, _GAP))
        self._head, self._before_etag, self._before_canonical, self._tail = text.split(encoded(_GAP)[1:-1])

    def document(self, name: str, etag: str, canonical: str) -> dict[str, Any]:
        """Return the entry of one tool."""
        return {
            "name": name,
            **self._shared,
            "_meta": {
                META_SAFETY_CLASS: self._safety_class,
                META_CAPABILITY_ETAG: etag,
                META_CANONICAL_NAME: canonical,
                META_SCHEMA_REF: self._schema_ref,
            },
        }

    def text(self, name: str, etag: str, canonical: str) -> str:
        """Return the same entry as JSON. The strings are tokens: no character of theirs needs an escape."""
        return f"{self._head}{name}{self._before_etag}{etag}{self._before_canonical}{canonical}{self._tail}"
