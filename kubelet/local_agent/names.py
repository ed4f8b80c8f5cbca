"""The names under which a local agent sees lent tools: ``{caller_id}_{tool}``.

Must not prefer one of two tools that would get the same name: neither gets it.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from hashlib import sha256

from schemas.projection import MAX_NAME

_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9_-]")
_DIGEST_LENGTH = 8


def public_name(caller_id: str, tool: str) -> str:
    """Return the name of a lent tool, in the characters and the length that every client accepts.

    >>> public_name("ant", "send_response")
    'ant_send_response'
    """
    name = _NOT_ALLOWED.sub("_", f"{caller_id}_{tool}")
    if len(name) <= MAX_NAME:
        return name
    # Long names differ at their end, which is cut off: a digest replaces it.
    digest = sha256(f"{caller_id}\n{tool}".encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{name[: MAX_NAME - _DIGEST_LENGTH - 1]}_{digest}"


def unambiguous(caller_id: str, tools: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """Return the tools by their public names, without those whose name another has or that is ``taken``."""
    named = [(public_name(caller_id, tool), tool) for tool in tools]
    counts = Counter(name for name, _ in named)
    return {name: tool for name, tool in named if counts[name] == 1 and name not in taken}
