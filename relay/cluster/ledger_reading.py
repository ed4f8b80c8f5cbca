"""What one reading of the stream of shared ledgers has brought, from its oldest entry on.

With each reading all is forgotten and read again. Must not write anything.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from nats.aio.msg import Msg
from nats.js.api import StreamInfo
from structlog.typing import FilteringBoundLogger

from relay.cluster.ledger_stream import LedgerStream, NotUnderstoodError, StreamEntry
from relay.cluster.retry_backoff import RetryBackoff
from relay.ledger import Entry
from relay.shared_ledger import SharedLedger
from schemas.error_roots import PeerError

MAX_KEYS = 1_000_000
"""How many entries of the stream are read. One more is not understood."""
_HOUR_MS = 3_600_000

CountEntry = Callable[[str, str], None]
"""Counts an entry by its kind and by what became of it."""


class LostReaderError(PeerError):
    """What is in the stream does not arrive, or is not what was read: all is to be read again."""


@dataclass(slots=True)
class Shared:
    """One ledger, and what is known of its entries in the stream.

    Attributes:
        backoff: for how long it waits after a failure.
        known: the keys of those that were read, and when each ends.
        unfit: the keys of those of the file that others would not understand.
        arrived: the entries that were read, and are not in the file yet.
        newest: the sequence number of the newest.
        due: whether file and stream are to be compared.
        waits: whether that has failed, and is not tried again yet.
    """

    ledger: SharedLedger
    backoff: RetryBackoff
    known: dict[str, int | None] = field(default_factory=dict)
    unfit: set[str] = field(default_factory=set)
    arrived: dict[str, Entry] = field(default_factory=dict)
    newest: int = 0
    due: bool = True
    waits: bool = False

    def __contains__(self, key: object) -> bool:
        """Return whether the entry with that key need not be appended. Thread-safe."""
        return key in self.known or key in self.unfit


class LedgerReading:
    """One reading of ``stream`` for ``ledgers``. ``is_told``: what is not understood is logged already.

    Attributes:
        shared: the ledgers, by kind.
        messages: how many entries have arrived.
        refused_at: ``messages`` when the stream last refused an entry, because another relay was first.
        not_understood: the first entry that is not understood, if there is one.
        caught_up: set once all has arrived that was in the stream.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        stream: LedgerStream,
        ledgers: Iterable[Shared],
        *,
        is_told: bool,
        wake: Callable[[], None],
        count: CountEntry,
        log: FilteringBoundLogger,
    ) -> None:
        self._stream = stream
        self._is_told = is_told
        self._wake = wake
        self._count = count
        self._log = log
        self._of: StreamInfo | None = None
        # How many entries end in the hour that begins then, and how many never end.
        self._ends: Counter[int | None] = Counter()
        self.shared = {shared.ledger.kind: shared for shared in ledgers}
        self.messages = 0
        self.refused_at: int | None = None
        self.not_understood: NotUnderstoodError | None = None
        self.caught_up = asyncio.Event()

    async def arrive(self, message: Msg) -> None:
        """Take in an entry."""
        self.messages += 1
        try:
            self._take(self._stream.read(message))
        except NotUnderstoodError as error:
            self._misunderstand(error)
        except Exception as error:  # noqa: BLE001 - the library would drop what may be a revocation
            if not self._is_told and self.not_understood is None:
                self._log.error("entry not read", exc_info=error)
            sequence = message.metadata.sequence.stream
            self._misunderstand(NotUnderstoodError(sequence, message.subject, "is not read: see the log"))
        if message.metadata.num_pending == 0:
            self.caught_up.set()
        self._wake()

    def _misunderstand(self, error: NotUnderstoodError) -> None:
        self.not_understood = self.not_understood or error
        self._count("unknown", "not_understood")

    def _take(self, read: StreamEntry) -> None:
        shared = self.shared[read.ledger.kind]
        count = sum(len(each.known) for each in self.shared.values())
        if count >= MAX_KEYS and read.key not in shared.known:
            raise NotUnderstoodError(read.sequence, read.key, f"is one of more than {MAX_KEYS}")
        if read.key in shared.known:
            self._ends[_hour_of(shared.known[read.key])] -= 1
        end_ms = shared.known[read.key] = read.ledger.end_ms_of(read.entry)
        self._ends[_hour_of(end_ms)] += 1
        shared.arrived[read.key] = read.entry
        shared.newest = max(shared.newest, read.sequence)
        shared.due = True

    def lasting(self) -> int:
        """Return how many entries were read that the servers still keep, but for those that end in this hour.

        Read from a count of each hour: each minute, on the event loop, of up to a million entries.
        """
        return sum(count for hour_ms, count in self._ends.items() if self._stream.lasts(hour_ms))

    def compare(self, info: StreamInfo, lasting: int) -> None:
        """Compare what the servers say of the stream with what was read: ``lasting``, before they said it.

        Raises:
            LostReaderError: it was made anew, or has lost entries, which are to be appended again.
        """
        first, self._of = self._of or info, info
        if info.created != first.created or info.state.messages < lasting:
            raise LostReaderError("entries were removed from the stream: all is read again")

    def check_arrival(self, before: int | None, pending: int, *, is_new: bool) -> None:
        """Take in that ``pending`` entries have not arrived, and that ``before`` had some seconds ago.

        ``is_new``: none was ever sent to this relay.

        Raises:
            LostReaderError: nothing arrives, although there is something.
        """
        if before == self.messages:
            if pending or self.refused_at == before:
                raise LostReaderError("what is in the stream does not arrive")
            # What was pending may have been removed.
            self.caught_up.set()
        elif is_new and not pending:
            self.caught_up.set()  # there is no entry


def _hour_of(end_ms: int | None) -> int | None:
    """Return when the hour begins in which an entry ends; None of one that never ends."""
    return None if end_ms is None else end_ms - end_ms % _HOUR_MS
