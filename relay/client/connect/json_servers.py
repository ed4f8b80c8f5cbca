"""The servers in a client's JSON configuration: one is put in or taken out, the rest keeps its place.

Lines of comments above the document are kept: the files of some clients begin with them. Must not touch a
file, and must not rewrite what it could not keep: other comments, a member that is there twice, a number that
is not finite, half a character.
"""

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from relay.client.connect.errors import UnreadableConfigError
from schemas.strict_json import JsonReason, StrictJsonError, loads

_INDENT = re.compile(r"^([ \t]+)\"", re.MULTILINE)
_USUAL_INDENT = "  "
_COMMENTS_ABOVE = re.compile(r"(?:[ \t]*(?://[^\n]*)?\n)*")


def with_server(text: str, section: str, name: str, entry: Mapping[str, Any]) -> str:
    """Return the configuration ``text`` with ``entry`` as the server ``name`` of ``section``.

    An empty ``text`` is an empty configuration.

    Raises:
        UnreadableConfigError: it is not JSON, or has no object where the servers are.
    """
    document = _read(text)
    _servers(document, section)[name] = dict(entry)
    return _written(document, text)


def without_server(text: str, section: str, name: str) -> str:
    """Return the configuration ``text`` without the server ``name`` of ``section``.

    Raises:
        UnreadableConfigError: as ``with_server``.
    """
    document = _read(text)
    servers = _servers(document, section)
    if name not in servers:
        return text
    del servers[name]
    if not servers:
        del document[section]
    return _written(document, text)


def _read(text: str) -> dict[str, Any]:
    text = _COMMENTS_ABOVE.sub("", text, count=1)
    try:
        document = loads(text, max_bytes=sys.maxsize) if text.strip() else {}
    except StrictJsonError as error:
        if error.reason is JsonReason.NOT_JSON:
            raise UnreadableConfigError("is not JSON; comments cannot be kept") from None
        raise UnreadableConfigError(f"cannot be rewritten without loss: {error.reason}") from None
    if not isinstance(document, dict):
        raise UnreadableConfigError("holds no object")
    return document


def _servers(document: dict[str, Any], section: str) -> dict[str, Any]:
    servers = document.setdefault(section, {})
    if not isinstance(servers, dict):
        raise UnreadableConfigError(f"holds no object under {section!r}")
    return servers


def _written(document: Mapping[str, Any], before: str) -> str:
    found, above = _INDENT.search(before), _COMMENTS_ABOVE.match(before)
    return (
        (above[0] if above else "")
        + json.dumps(document, indent=found[1] if found else _USUAL_INDENT, ensure_ascii=False)
        + "\n"
    )
