"""What a server makes this process print besides results: its standard error, and what the SDK logs of it.

Both are printable, redacted and cut. Must not change a record of the SDK that another user of it caused.
"""

import asyncio
import logging
import os
import sys
import threading
import traceback
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TextIO

from relay.client.remote_tools.http_client import ATTEMPT
from relay.client.remote_tools.redaction import Redaction

# The packages whose loggers contain what a server sent. ``client`` is the name that the SDK's session uses.
_LOGGING = {"mcp", "client", "httpx2", "httpcore2"}
_CHUNK_BYTES = 8192
_MAX_HELD = 2 * _CHUNK_BYTES
_LAST_LINES_S = 0.5


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
