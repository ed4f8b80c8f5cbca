"""A tool's entry in ``tools/list``, as a document and as JSON text.

The entries of all tools of one kind, verb and safety class differ in four short strings only. Such tools
share one template of about two kilobytes, from which the text of an entry is put together without encoding.
A label is the operator's text for the node, in front of the title. Must not know nodes.
"""

from collections.abc import Mapping
from typing import Any

from relay.ascii_json import encoded
from schemas.kinds import Verb
from schemas.projection import META_CANONICAL_NAME, META_CAPABILITY_ETAG, META_SAFETY_CLASS, META_SCHEMA_REF
from schemas.registry import SCHEME


def hints(safety_class: str, *, idempotent: bool) -> dict[str, Any]:
    """Return the annotations of a tool, but for its title."""
    return {
        "readOnlyHint": safety_class == "read_only",
        "destructiveHint": safety_class == "physical_actuation",
        "idempotentHint": idempotent,
        "openWorldHint": False,
        "x-safety-class": safety_class,
    }


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
        self._title = verb.title
        self._shared = {
            "description": verb.description,
            "inputSchema": input_schema,
            "outputSchema": output_schema,
        }
        self._hints = hints(safety_class, idempotent=verb.idempotent)
        self._safety_class = safety_class
        self._schema_ref = SCHEME + verb.input_ref
        pieces = encoded(self._document(_GAP, _GAP, _GAP, _GAP)).split(encoded(_GAP)[1:-1])
        self._head, self._to_title, self._to_hints, self._to_etag, self._to_canonical, self._tail = pieces

    def document(self, name: str, label: str, etag: str, canonical: str) -> dict[str, Any]:
        """Return the entry of one tool of the node that the operator calls ``label``, if not empty."""
        return self._document(name, _before_title(label), etag, canonical)

    def text(self, name: str, label: str, etag: str, canonical: str) -> str:
        """Return the same entry as JSON. Letters of a label beyond ASCII are all that needs an escape."""
        before_title = encoded(_before_title(label))[1:-1]
        return (
            f"{self._head}{name}{self._to_title}{before_title}{self._to_hints}{before_title}"
            f"{self._to_etag}{etag}{self._to_canonical}{canonical}{self._tail}"
        )

    def _document(self, name: str, before_title: str, etag: str, canonical: str) -> dict[str, Any]:
        title = before_title + self._title
        return {
            "name": name,
            "title": title,
            **self._shared,
            "annotations": {"title": title, **self._hints},
            "_meta": {
                META_SAFETY_CLASS: self._safety_class,
                META_CAPABILITY_ETAG: etag,
                META_CANONICAL_NAME: canonical,
                META_SCHEMA_REF: self._schema_ref,
            },
        }


def _before_title(label: str) -> str:
    return f"{label}: " if label else ""
