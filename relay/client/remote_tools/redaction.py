"""Removes secrets from what is recorded of a call, by the names of members and by patterns.

Applied to the arguments and results in audit records, to every text of a server that an error contains, and
to what a server makes this process print: its standard error, and what the SDK logs of it. Must not be the
only protection of a secret: a pattern misses what it does not describe. Must not change a record of the SDK
that another user of it caused.
"""

import asyncio
import logging
import os
import re
import sys
import threading
import traceback
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from relay.client.remote_tools.servers import ATTEMPT
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

# The packages whose loggers contain what a server sent. ``client`` is the name that the SDK's session uses.
_LOGGING = {"mcp", "client", "httpx2", "httpcore2"}
_CHUNK_BYTES = 8192
_MAX_HELD = 2 * _CHUNK_BYTES
_LAST_LINES_S = 0.5
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
        if depth > _MAX_DEPTH:
            return REDACTED
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                printable(str(name), 128): REDACTED
                if any(_letters(key) in _letters(str(name)) for key in self.keys)
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


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


@contextmanager
def redacted_log(redaction: Redaction) -> Iterator[None]:
    """Redact what the SDK logs in the tasks of a connection, which have an ``ATTEMPT``.

    Below WARNING it logs whole messages, URLs and session ids: such records are dropped.
    """

    def redact(record: logging.LogRecord) -> bool:
        if ATTEMPT.get() is None:
            return True
        if record.levelno < logging.WARNING:
            return False
        text = redaction.text(record.getMessage())
        if record.exc_info and (error := record.exc_info[1]) is not None:
            # Where it was raised, without its text: that can contain the message.
            text = f"{text}: {type(error).__name__}"
            record.exc_text = "".join(traceback.format_tb(error.__traceback__)).rstrip()
        record.msg, record.args, record.exc_info = text, (), None
        return True

    loggers = [
        logging.getLogger(name)
        for name in tuple(logging.root.manager.loggerDict)
        if name.partition(".")[0] in _LOGGING
    ]
    for logger in loggers:
        logger.addFilter(redact)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(redact)


@asynccontextmanager
async def redacted_errors(redaction: Redaction) -> AsyncIterator[TextIO]:
    """Hold a file for the standard error of a program, whose lines are passed on to this process's.

    It has to be closed when the program has it. A thread reads it: some event loops read no pipes.
    """
    reading, writing = os.pipe()
    thread = threading.Thread(target=_pass_on, args=(reading, redaction), daemon=True)
    thread.start()
    try:
        with os.fdopen(writing, "w") as errors:
            yield errors
    finally:
        # A process that the program left behind may hold the other end for longer.
        await asyncio.to_thread(thread.join, _LAST_LINES_S)


def _pass_on(reading: int, redaction: Redaction) -> None:
    decoder, rest, is_cut = getincrementaldecoder("utf-8")("replace"), "", False
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while chunk := pipe.read(_CHUNK_BYTES):
            text = rest + decoder.decode(chunk)
            if is_cut:  # the rest of a line that was too long
                _, newline, text = text.partition("\n")
                is_cut = not newline
            # A secret can have several lines, and begin in this piece and end in another.
            end = redaction.settled(text)
            if len(text) - end > _MAX_HELD:
                end, is_cut = len(text), not text.endswith("\n")
            _show(text[:end], redaction)
            rest = text[end:]
    _show(rest, redaction)


def _show(text: str, redaction: Redaction) -> None:
    # Standard error can be closed; the program goes on.
    with suppress(OSError, ValueError):
        for line in redaction.lines(text):
            sys.stderr.write(f"{line}\n")
