"""What the broker writes on its standard error, as lines of the relay's log: bounded, and escaped.

Warnings and errors are logged, at a limited rate, since any client can cause them; notices are not.
Lines that report neither a fault nor an attack are no warnings, whatever the broker calls them. The last of
the others are kept for the report of its end. Must not stop reading: the broker would block.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from schemas import topics
from schemas.text import printable
from schemas.token_bucket import TokenBucket

_PIECE_BYTES = 16_384
_MAX_LINE = 400
_KEPT = 5
_RATE, _BURST = 1.0, 30.0
_FORM = re.compile(r"\[\d+\] \[(?P<level>[A-Z]{3})\] (?P<text>.*)", re.DOTALL)
_NOTICES = frozenset({"INF", "DBG", "TRC"})
_OF_A_RELOAD = re.compile(r'User ".*" found in connect proto, but user required from cert', re.DOTALL)
"""For each client that is connected when the broker reads its access lists again. The certificate decides."""
_OF_MQTT_5 = re.compile(r'\S+ - mid:\d+ - "" - unacceptable protocol version of 5')
"""A client that speaks MQTT 5 is told so, and uses 3.1.1: `kubelet doctor` is one."""
_OF_A_FULL_STORE = re.compile(r"resource limits exceeded|insufficient resources|maximum bytes exceeded")


class BrokerLines:
    """The lines of one broker process.

    ``probe_node``: on whose topic `relay doctor` tries to publish, which is to be refused. Another client
    that tried it would be taken for `relay doctor`, so no other program is told this id.
    """

    def __init__(self, log: FilteringBoundLogger, monotonic: Callable[[], float], probe_node: str) -> None:
        self._log = log
        self._probe_refused = f'Publish Violation - Subject "{topics.subject(topics.heartbeat(probe_node))}"'
        self._monotonic = monotonic
        self._bucket = TokenBucket(_RATE, _BURST, monotonic())
        self._left_out = 0
        self._last: deque[str] = deque(maxlen=_KEPT)

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read ``stream`` to its end."""
        begun = b""
        while piece := await stream.read(_PIECE_BYTES):
            *whole, begun = (begun + piece).split(b"\n")
            for line in whole:
                self.take(line)
            # Of a line without an end, no more is kept than is shown of it.
            begun = begun[: _MAX_LINE * 4]
        if begun:
            self.take(begun)

    def take(self, line: bytes) -> None:
        """Log one line, if it says that something is wrong."""
        text = line.decode("utf-8", "replace")
        match = _FORM.fullmatch(text)
        level, shown = (match["level"], match["text"]) if match else ("", text)
        shown = printable(shown.strip(), _MAX_LINE)
        if level in _NOTICES or not shown or _OF_A_RELOAD.fullmatch(shown):
            return
        harmless = self._harmless(shown)
        if harmless is None:
            self._last.append(shown)
        if self._bucket.take(self._monotonic()) > 0:
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        facts = {"left_out": left_out} if left_out else {}
        if harmless is not None:
            self._log.info(harmless, **facts)
            return
        if _OF_A_FULL_STORE.search(shown):
            self._log.error("the broker's store is full", line=shown, **facts)
            return
        write = self._log.warning if level == "WRN" else self._log.error
        write("the broker reports", line=shown, **facts)

    def _harmless(self, line: str) -> str | None:
        """Return what a line means that reports neither a fault nor an attack; None if it may be one."""
        if line.endswith(self._probe_refused):
            return "the broker refuses what relay doctor tries, as it should"
        if _OF_MQTT_5.fullmatch(line):
            return "a client tries MQTT 5, which the broker does not speak"
        return None

    def last(self) -> str:
        """Return the last lines that said something wrong, in one line."""
        return " | ".join(self._last)
