"""Removes secrets from what is recorded of a call, by the names of members and by patterns.

Applied to the arguments and results in audit records, and to every text of a server that an error contains.
Must not be the only protection of a secret: a pattern misses what it does not describe.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.text import printable

REDACTED = "[redacted]"
DEFAULT_KEYS = (
    "password",
    "passwd",
    "pwd",
    "passphrase",
    "secret",
    "token",
    "credential",
    "api_key",
    "access_key",
    "session_id",
    "authorization",
    "cookie",
    "private",
)
DEFAULT_PATTERNS = (
    re.compile(r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(\.[A-Za-z0-9_-]*)?"),  # a JWT
    re.compile(r"(?i)\b(?:bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL),
    re.compile(r"(?<=://)[^\s/?#:@]*:[^\s/]+(?=@)"),  # user and password in a URL
    re.compile(
        r"""(?i)\b(?:password|passwd|pwd|passphrase)\s?=\s?(?:'[^']*'?|"[^"]*"?|[^\s;&'"]+)"""
    ),  # in a DSN
    re.compile(r"\b(?:ghp|gho|ghs|sk|xoxb|xoxp|AKIA)[-_A-Za-z0-9]{16,}"),
)

_MAX_TEXT = 2048
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Redaction:
    """The rules. A member whose name contains one of ``keys`` has its value replaced.

    Names are compared without their case, ``_`` and ``-``: ``accessKey`` contains ``access_key``.
    """

    keys: Sequence[str] = DEFAULT_KEYS
    patterns: Sequence[re.Pattern[str]] = DEFAULT_PATTERNS

    def text(self, text: str, limit: int = _MAX_TEXT) -> str:
        """Return ``text`` printable, cut to ``limit`` characters, and without what the patterns match."""
        # Cut first, so that a hostile megabyte costs no more than a line; what the cut leaves of a secret at
        # the end is matched by its beginning.
        return printable(self._without_matches(text[: 2 * limit]), limit)

    def lines(self, text: str) -> list[str]:
        """Return the lines of ``text``, each as ``text()`` returns it. A match may have several lines."""
        return [printable(line, _MAX_TEXT) for line in self._without_matches(text).splitlines()]

    def settled(self, text: str) -> int:
        """Return where the last line of ``text`` ends that is in no match which may go on after ``text``."""
        end = text.rfind("\n") + 1
        matches = (match for pattern in self.patterns for match in pattern.finditer(text, 0, end))
        # ``$`` is also before the last line feed.
        open_at = (match.start() for match in matches if match.end() >= end - 1)
        return text.rfind("\n", 0, min(open_at, default=end)) + 1

    def value(self, value: object, depth: int = 0) -> Any:
        """Return the JSON ``value`` redacted."""
        if depth > _MAX_DEPTH:
            return REDACTED
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                printable(str(name), 128): REDACTED
                if self._is_secret(str(name))
                else self.value(item, depth + 1)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(item, depth + 1) for item in value]
        return value if isinstance(value, int | float | bool | None) else REDACTED

    def _without_matches(self, text: str) -> str:
        for pattern in self.patterns:
            text = pattern.sub(REDACTED, text)
        return text

    def _is_secret(self, name: str) -> bool:
        return any(_letters(key) in _letters(name) for key in self.keys)


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
