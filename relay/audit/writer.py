"""Writes and syncs the audit by threads, so that no disk, however slow, holds up the event loop.

A call waits until its line is written, with ``audit_sync = "always"`` until it is synced too; all lines that
wait are written by one write and synced by one sync. Otherwise each is synced within ``SYNCED_WITHIN_S``. A
line that is not written in time is withdrawn, and its call refused; the next ones are refused at once until
the disk answers. Must not decide what is recorded.

To wake a thread costs more than to write a line, and while it computes, the event loop waits for the
interpreter's lock. So lines are gathered as long as turns of the loop bring more and are chained in the loop;
the thread writes them, and chains them again only if a line was withdrawn or did not fit, or if more wait.
While there are many, the loop sends them to a process (``relay.audit.appender``); the thread has the first of
each second, when a new file may be due, all that the loop must not wait for, and what the process left.

writer = AuditWriter(AuditLog(path, now_ms), now_ms, log)
await writer.record(members)  # before it is acted upon; raises AuditUnavailableError
writer.note(members)  # what has happened: nothing waits for it
"""

import asyncio
import concurrent.futures
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from time import monotonic
from typing import Any

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.audit.appender import Appender
from relay.audit.log import AuditLog, AuditUnavailableError, Chained, NewLine, chained
from relay.audit.retention import REMOVED_EVENT, BrokenSuccessionError, file_bytes, next_removal
from relay.observability.ascii_json import members_of
from relay.settings.config import KEEP_ALL, AuditKeep
from schemas.files import sync_directory
from schemas.text import printable
from schemas.threads import started
from schemas.times import SystemClock, SystemMs

SYNCED_WITHIN_S = 5.0
WAIT_S = 2.0
"""So long a call waits for its line to be written."""
LOOP_WAIT_S = 0.1
"""So long the event loop itself waits for a line that is no call's, once each time that the disk stalls."""
MOST_QUEUED = 20_000
"""As many lines wait for the disk at most: some 16 MiB."""
_SYNC_AFTER_S = 2.0
_NOTED_AFTER_S = 0.005
_EXPIRY_S = 0.25
_OVERTAKEN_MS = 1000
_MOST_AT_ONCE = 512
_GATHERED_WITHIN_S = 0.01
_QUIET_TURNS, _LONE_TURNS = 8, 1
"""After as many turns of the event loop without another line, those gathered are written."""
_LONE_LINES = 2
"""So many does a call give that is alone: of its decision, and of the outcome of the one before."""
BUSY_LINES = 200
"""From as many lines a second, of 100 calls, a process writes them: it takes 8 MiB."""
_BUSY_S = 1.0
_HANGS_S = 3.0
"""After so long without an answer the process is killed."""
_START_AGAIN_S = 60.0
_CLOSE_S = 5.0
_REMOVE_EVERY_S = 60.0

_Waiter = asyncio.Future[None] | concurrent.futures.Future[None]


class _State(Enum):
    QUEUED = auto()
    TAKEN = auto()  # it is in the file, or will be
    LEFT_OUT = auto()  # it is not, and will not be


class _Asks(Enum):
    """What a line's waiter waits for, or how the line is written."""

    WRITTEN = auto()
    DECIDED = auto()  # as WRITTEN, and synced where each line is synced before its call
    SPACE = auto()  # as WRITTEN, but not into the space for calls
    SYNCED = auto()  # there is no line, but those before it


@define(eq=False, repr=False)
class _Line(NewLine):
    """A line on its way to the file; ``known_by`` names it in the log if nothing waits for it."""

    waiter: _Waiter | None
    asks: _Asks = _Asks.WRITTEN
    known_by: str = ""
    state: _State = _State.QUEUED


_Batch = tuple[Sequence[_Line], Chained]
"""Lines, and as they will stand in the file if all of them do."""
_NO_LINES: _Batch = (), Chained("", 0, b"", "")


@define(eq=False, repr=False)
class _Awaited:
    """Lines that calls wait for since then."""

    since: float
    lines: Sequence[_Line]


def _stalls() -> AuditUnavailableError:
    return AuditUnavailableError("the disk does not answer in time")


@define(eq=False, repr=False, slots=False)
class AuditWriter:
    """Writes ``file`` until it is closed.

    Attributes:
        always: whether each line is synced before its call is made. May be changed, as may ``loop_wait_s``.
        keep: which full files are not removed: ``retain`` changes it.
        loop_wait_s: so long the event loop waits for a line that is no call's.
        busy_lines: from as many lines a second a process writes them.
    """

    _file: AuditLog
    _now_ms: SystemClock
    _log: FilteringBoundLogger
    always: bool = False
    keep: AuditKeep = KEEP_ALL
    loop_wait_s: float = LOOP_WAIT_S
    busy_lines: int = BUSY_LINES
    _kept_as_broken: str = field(init=False, default="")
    _gathered: deque[_Line] = field(init=False, factory=deque)
    _hands_over: bool = field(init=False, default=False)
    _is_lone: bool = field(init=False, default=True)
    """Whether calls come one by one: then there is nothing to wait for, unless lines are on their way."""
    _is_due: bool = field(init=False, default=False)
    """Whether a timer hands over what was noted, unless the line of a call has taken it along."""
    _queue: queue.SimpleQueue[_Batch | None] = field(init=False, factory=queue.SimpleQueue)
    _queued: int = field(init=False, default=0)
    _in_thread: int = field(init=False, default=0)
    """As many lines has the thread, or will have: no other may overtake them."""
    _loop: asyncio.AbstractEventLoop | None = field(init=False, default=None)
    _watched_by: asyncio.AbstractEventLoop | None = field(init=False, default=None)
    """The loop that reads what the process answers: while there is another, nothing is sent."""
    _appender: Appender | None = field(init=False, default=None)
    _sent: deque[_Batch] = field(init=False, factory=deque)
    """What the process has not answered yet."""
    _counted: tuple[float, int] = field(init=False, default=(0.0, 0))
    _start_from: float = field(init=False, default=0.0)
    _states: threading.Lock = field(init=False, factory=threading.Lock)
    """Held where lines are gathered by another thread than the loop's, and where their states change."""
    _awaited: deque[_Awaited] = field(init=False, factory=deque)
    _expiry: asyncio.TimerHandle | None = field(init=False, default=None)
    _writing_since: float | None = field(init=False, default=None)
    _unsynced_since: float | None = field(init=False, default=None)
    _syncing_since: float | None = field(init=False, default=None)
    _sync_fails: bool = field(init=False, default=False)
    _unsynced: threading.Event = field(init=False, factory=threading.Event)
    _closing: threading.Event = field(init=False, factory=threading.Event)
    _newest_ms: int = field(init=False, default=0)
    _chain: str = field(init=False, default="")
    _threads: Sequence[threading.Thread] = field(init=False, default=())

    def __attrs_post_init__(self) -> None:
        # Daemons: one that is blocked by the disk must not keep the process from ending.
        self._threads = [
            started(threading.Thread(target=run, name=name, daemon=True))
            for name, run in (("audit", self._write_lines), ("audit sync", self._keep_synced))
        ]

    @property
    def available(self) -> bool:
        """Whether the newest line was written, and the disk answers."""
        return self._file.available and not self._sync_fails and not self._is_stalled(WAIT_S)

    @property
    def has_process(self) -> bool:
        """Whether a process appends what calls record."""
        appender = self._appender  # the thread may take it away meanwhile
        return appender is not None and appender.runs

    @property
    def head(self) -> str:
        """The hash of the newest line that is on the disk."""
        return self._file.synced_head

    def retain(self, keep: AuditKeep) -> None:
        """Remove from now on what ``keep`` does not keep, in files of a size that fits it."""
        self.keep, self._file.max_bytes = keep, file_bytes(keep)

    async def record(self, members: str, *, otherwise: Callable[[BaseException], str] | None = None) -> None:
        """Write a line, and return when it is in the file, and synced if each line is.

        If it may be in the file although this raises, ``otherwise`` gives the members of a line that follows
        it, of what was raised.

        Raises:
            AuditUnavailableError: what it allows must not be done.
        """
        if self._is_stalled(WAIT_S):
            raise _stalls()
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        line = _Line(self._now_ms(), members, waiter, _Asks.DECIDED)
        self._gathered.append(line)
        if not self._hands_over:
            self._hands_over = True
            if self._is_lone and not self._queued:
                self._hand_over(loop)
            else:
                self._gather(loop, loop.time() + _GATHERED_WITHIN_S)
        try:
            await waiter
        except BaseException as error:
            if not self._withdrawn(line) and otherwise is not None:
                self.note(otherwise(error))
            raise

    def note(self, members: str, correlation_id: str = "") -> None:
        """Have a line written about what has happened, with the next; if it cannot be, the log says so."""
        if self._queued >= MOST_QUEUED:
            self._log.error("outcome not recorded", reason="too many wait", correlation_id=correlation_id)
            return
        self._gathered.append(_Line(self._now_ms(), members, None, known_by=correlation_id))
        if not (self._is_due or self._hands_over):
            self._is_due = True
            loop = asyncio.get_running_loop()
            loop.call_later(_NOTED_AFTER_S, self._hand_over_noted, loop)

    def write(self, **facts: Any) -> None:
        """Write a line that is not a call's, and return when it is in the file. Any thread may call.

        The event loop too, which it holds up for ``loop_wait_s`` at most.

        Raises:
            AuditUnavailableError: as ``record``.
        """
        self._append(members_of(facts), _Asks.WRITTEN)

    def decide(self, members: str, otherwise: str) -> None:
        """As ``write``, of ``members``, in the event loop alone; synced too, if each line is.

        If it may be in the file although this raises, ``otherwise`` are the members of a line that follows.

        Raises:
            AuditUnavailableError: as ``record``.
        """
        self._append(members, _Asks.DECIDED, otherwise)

    def write_if_space(self, **facts: Any) -> None:
        """As ``write``, for lines that can wait: not into the space that is reserved for calls.

        Returns too if the disk is slow to take the line: written again, it would count twice.
        """
        self._append(members_of(facts), _Asks.SPACE)

    def _append(self, members: str, asks: _Asks, otherwise: str = "") -> None:
        # If the process alone writes, a loop that was held up may not have read its answer: the thread will.
        if self._is_stalled(self.loop_wait_s if self._in_thread else WAIT_S):
            raise _stalls()
        waiter = concurrent.futures.Future[None]()
        line = _Line(self._now_ms(), members, waiter, asks)
        self._hand_over_now([line])
        try:
            waiter.result(self.loop_wait_s)
        except (TimeoutError, AuditUnavailableError) as error:
            is_taken = not self._withdrawn(line)
            if is_taken and asks is _Asks.SPACE:
                return
            if is_taken and otherwise:
                self.note(otherwise)
            if isinstance(error, TimeoutError):
                raise _stalls() from None
            raise

    def flush(self, timeout_s: float = _CLOSE_S) -> None:
        """Wait until all lines so far are synced. Blocks, so it is for the end, and for tests.

        Raises:
            AuditUnavailableError: they are not.
        """
        waiter = concurrent.futures.Future[None]()
        self._hand_over_now([_Line(self._now_ms(), "", waiter, _Asks.SYNCED)])
        try:
            waiter.result(timeout_s)
        except TimeoutError:
            raise _stalls() from None

    def close(self) -> None:
        """Write and sync what waits, and close the file; if its disk stalls, the process's end does."""
        self._hand_over_now([])
        self._queue.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
        if not any(thread.is_alive() for thread in self._threads):
            if self._appender is not None:
                self._drop(self._appender)
            self._file.close()

    # --- what waits --------------------------------------------------------------------------------------

    def _gather(
        self, loop: asyncio.AbstractEventLoop, until: float, known: int = 0, quiet_turns: int = 0
    ) -> None:
        """Hand over what was gathered, at ``until`` or once some turns bring no more than the ``known``."""
        count = len(self._gathered)
        quiet_turns = quiet_turns + 1 if count == known else 0
        patience = _LONE_TURNS if self._is_lone else _QUIET_TURNS
        if quiet_turns < patience and loop.time() < until:
            loop.call_soon(self._gather, loop, until, count, quiet_turns)
            return
        self._is_lone = count <= _LONE_LINES
        self._hand_over(loop)

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have what was gathered written, and let no call wait for it longer than ``WAIT_S``."""
        self._hands_over, self._loop = False, loop
        self._hand_over_now([])
        if self._awaited and self._expiry is None:
            self._expiry = loop.call_later(_EXPIRY_S, self._expire, loop)

    def _hand_over_noted(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_due = False
        if self._gathered and not self._hands_over:
            self._hand_over(loop)

    def _hand_over_now(self, more: Sequence[_Line]) -> None:
        with self._states:
            gathered = [self._gathered.popleft() for _ in range(len(self._gathered))]
            gathered = [line for line in gathered if line.state is _State.QUEUED]  # not withdrawn meanwhile
            if gathered:
                self._awaited.append(_Awaited(monotonic(), gathered))
            if lines := [*gathered, *more]:
                self._queued += len(lines)
                batch = (lines, self._chained(lines))
                if more or not self._sends(*batch):
                    self._in_thread += len(lines)
                    self._queue.put(batch)

    def _sends(self, lines: Sequence[_Line], ready: Chained) -> bool:
        """Return whether the process writes ``lines``: only if nothing else is due, or comes before."""
        appender = self._appender if self.has_process else None
        if appender is None or self._in_thread or self.always or self._watched_by is not self._loop:
            return False
        if not self._file.takes_more(lines[-1].at_ms) or not appender.send(ready.data):
            return False
        for line in lines:
            line.state = _State.TAKEN
        self._sent.append((lines, ready))
        if self._writing_since is None:
            self._writing_since = monotonic()
        return True

    def _chained(self, lines: Sequence[_Line]) -> Chained:
        """Return ``lines`` after those before them, as these stand in the file or will if nothing fails."""
        if self._queued == len(lines) and self._writing_since is None:
            self._chain = self._file.prev  # nothing is on its way
        for line in lines:
            line.at_ms = self._in_order(line.at_ms)
        ready = chained(self._chain, [line for line in lines if line.asks is not _Asks.SYNCED])
        self._chain = ready.head
        return ready

    def _in_order(self, at_ms: SystemMs) -> SystemMs:
        """Return ``at_ms``, or the time of the line before if that has overtaken this one."""
        if self._newest_ms - _OVERTAKEN_MS < at_ms < self._newest_ms:
            return SystemMs(self._newest_ms)
        self._newest_ms = at_ms
        return at_ms

    def _is_stalled(self, after_s: float) -> bool:
        writing, unsynced = self._writing_since, self._syncing_since or self._unsynced_since
        if writing is None and unsynced is None:
            return False
        now = monotonic()
        return (writing is not None and now - writing > after_s) or (
            unsynced is not None and now - unsynced > SYNCED_WITHIN_S
        )

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._expiry, oldest = None, monotonic() - WAIT_S
        while self._awaited:
            waiters = [line.waiter for line in self._awaited[0].lines if line.waiter is not None]
            if any(not waiter.done() for waiter in waiters):
                if self._awaited[0].since > oldest:
                    break
                _resolve_all([(waiter, _stalls()) for waiter in waiters])
            self._awaited.popleft()
        if self._awaited:
            self._expiry = loop.call_later(_EXPIRY_S, self._expire, loop)

    def _withdrawn(self, line: _Line) -> bool:
        """Return whether ``line`` is not in the file, and will not be."""
        with self._states:
            if line.state is _State.QUEUED:
                line.state = _State.LEFT_OUT
            return line.state is _State.LEFT_OUT

    # --- the process that appends ------------------------------------------------------------------------

    def _read_answer(self, appender: Appender) -> None:
        """Let the calls go on whose lines the process has written, in the event loop."""
        _resolve_all([(line.waiter, None) for line in self._answered(appender) if line.waiter is not None])
        if appender.ended and self._loop is not None:
            self._loop.remove_reader(appender)
            if appender is self._appender:
                self._queue.put(_NO_LINES)  # for what it has not written

    def _answered(self, appender: Appender) -> Sequence[_Line]:
        """Return the lines that the process says it has written, if it says so by now."""
        with self._states:
            if not appender.answered():
                return ()
            lines, ready = self._sent.popleft()
            self._queued -= len(lines)
            self._file.has_appended(ready)
            self._writing_since = monotonic() if self._sent else None
        self._note_unsynced()
        return lines

    def _left(self) -> Sequence[_Line]:
        """Return what was sent and is not written if the process has ended, and nothing once all is."""
        if (appender := self._appender) is None:
            return ()
        while self._sent and not appender.ended:
            appender.wait()
            _settle(self._answered(appender), None)
            self._kill_if_it_hangs(appender)
        if not appender.ended:
            return ()
        status = self._retire(appender)
        self._log.warning("audit process ended; a thread writes the audit", status=status)
        self._start_from = monotonic() + _START_AGAIN_S
        lines = [line for lines, _ in self._sent for line in lines]  # one that has ended is sent no more
        count = self._file.has_appended_part(b"".join(ready.data for _, ready in self._sent))
        with self._states:
            self._sent.clear()
            self._queued -= count
            for line in lines[count:]:
                line.state = _State.QUEUED
        self._note_unsynced()
        _settle(lines[:count], None)
        return lines[count:]

    def _kill_if_it_hangs(self, appender: Appender) -> None:
        """Kill the process if it may answer never; where the disk is what hangs, it writes first."""
        with self._states:
            since = self._writing_since if self._sent else None
        if since is not None and monotonic() - since > _HANGS_S:
            appender.kill()

    def _start_if_busy(self, count: int) -> None:
        """Start the process if the thread had to write too much in this second, ``count`` lines just now."""
        now = monotonic()
        since, lines = self._counted
        if now - since > _BUSY_S:
            since, lines = now, 0
        self._counted = since, lines + count
        if lines + count < self.busy_lines or now < self._start_from or self.always:
            return
        if self._appender is not None or self._loop is None:
            return
        try:
            appender = Appender(*self._file.descriptors)
        except OSError as error:
            self._start_from = now + _START_AGAIN_S
            self._log.warning("audit process not started; a thread writes the audit", reason=str(error))
            return
        self._appender = appender
        with suppress(RuntimeError):  # the loop is closed: nothing will be sent
            self._loop.call_soon_threadsafe(self._watch, appender, self._loop)

    def _watch(self, appender: Appender, loop: asyncio.AbstractEventLoop) -> None:
        if appender.fileno() >= 0:  # this is not closed meanwhile
            loop.add_reader(appender, self._read_answer, appender)
            self._watched_by = loop

    def _retire(self, appender: Appender) -> int | None:
        self._appender, status = None, appender.end()
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._drop, appender)
            except RuntimeError:  # it is closed
                appender.close()
        return status

    def _drop(self, appender: Appender) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(appender)
        appender.close()

    # --- the thread that writes --------------------------------------------------------------------------

    def _write_lines(self) -> None:
        while (batch := self._next_batch()) is not None:
            lines, ready = batch
            others = self._waiting(_MOST_AT_ONCE - len(lines))
            left = self._left()
            self._writing_since = monotonic()
            self._write_batch([*left, *lines, *others], None if left or others else ready)
            if self._appender is not None and self._appender.descriptor != self._file.descriptors[0]:
                self._retire(self._appender)  # a new file was begun
            self._start_if_busy(count := len(lines) + len(others))
            with self._states:
                self._writing_since = None
                self._in_thread -= count
        self._write_batch(self._left(), None)
        if self._appender is not None:
            self._appender.end()
        self._closing.set()
        self._unsynced.set()

    def _next_batch(self) -> _Batch | None:
        while (appender := self._appender) is not None:  # which no other thread changes
            with suppress(queue.Empty):
                return self._queue.get(timeout=WAIT_S)
            self._kill_if_it_hangs(appender)
        return self._queue.get()

    def _waiting(self, most: int) -> Sequence[_Line]:
        """Take whole batches that wait until they are ``most`` lines; what ends the queue stays in it."""
        lines = list[_Line]()
        while self._queue.qsize() and len(lines) < most:
            if (batch := self._queue.get()) is None:
                self._queue.put(None)
                break
            lines += batch[0]
        return lines

    def _write_batch(self, batch: Sequence[_Line], ready: Chained | None) -> None:
        with self._states:
            self._queued -= len(batch)
            lines = [line for line in batch if line.state is _State.QUEUED]
            for line in lines:
                line.state = _State.TAKEN
        asked = [line for line in lines if line.asks is _Asks.SYNCED]
        written = self._written([line for line in lines if line.asks is not _Asks.SYNCED], ready)
        if written:
            self._note_unsynced()
        if not asked and not self.always:
            _settle(written, None)
            return
        decided = [line for line in written if line.asks is _Asks.DECIDED and self.always]
        _settle([line for line in written if line not in decided], None)
        if asked or decided:
            _settle([*decided, *asked], self._sync())

    def _note_unsynced(self) -> None:
        if self._unsynced_since is None:
            self._unsynced_since = monotonic()
            self._unsynced.set()

    def _written(self, lines: Sequence[_Line], ready: Chained | None) -> Sequence[_Line]:
        """Write ``lines``, and return those that are in the file; the others are settled."""
        try:
            if any(line.asks is _Asks.SPACE for line in lines):
                self._file.check_space()
        except AuditUnavailableError as error:
            self._leave_out([line for line in lines if line.asks is _Asks.SPACE], error)
            lines = [line for line in lines if line.asks is not _Asks.SPACE]
        if not lines:
            return lines
        count, why = 0, AuditUnavailableError("the disk took only a part of the line")
        try:
            count = self._file.append_all(lines, ready)
        except AuditUnavailableError as error:
            why = error
        except OSError as error:
            why = AuditUnavailableError(str(error))
        if count == len(lines):
            return lines
        self._leave_out(lines[count:], why)
        return lines[:count]

    def _leave_out(self, lines: Sequence[_Line], why: AuditUnavailableError) -> None:
        for line in lines:
            line.state = _State.LEFT_OUT
            if line.waiter is None:
                self._log.error("outcome not recorded", reason=str(why), correlation_id=line.known_by)
        _settle(lines, why)

    # --- the thread that syncs ---------------------------------------------------------------------------

    def _keep_synced(self) -> None:
        while not self._closing.is_set():
            self._remove_old_files()
            if not self._unsynced.wait(_REMOVE_EVERY_S):
                continue
            self._closing.wait(_SYNC_AFTER_S)
            self._unsynced.clear()
            if self._unsynced_since is not None and self._sync() is not None:
                self._unsynced.set()  # again

    def _sync(self) -> AuditUnavailableError | None:
        """Sync what was written so far, and return why it cannot be, if so."""
        since, self._unsynced_since = self._unsynced_since, None
        self._syncing_since = since
        try:
            self._file.sync()
        except OSError as error:
            self._unsynced_since = since
            if not self._sync_fails:
                self._log.error("audit cannot be synced; calls are refused", reason=str(error))
            self._sync_fails = True
            return AuditUnavailableError(f"it cannot be synced: {error.strerror or error}")
        finally:
            self._syncing_since = None
        self._sync_fails = False
        return None

    def _remove_old_files(self) -> None:
        """Remove the full files that are not to be kept, each after the line that says so is synced."""
        try:
            while self.keep != KEEP_ALL and not self._closing.is_set():
                removal = next_removal(self._file.path, self.keep, self._now_ms())
                if removal is None:
                    return
                name = removal.file.name
                self.write(event=REMOVED_EVENT, file=name, head=removal.head, until_ms=removal.until_ms)
                self.flush()
                removal.file.unlink()
                sync_directory(removal.file.parent)
                self._log.info("audit file removed", file=name, head=removal.head)
        except (AuditUnavailableError, BrokenSuccessionError, OSError) as error:
            if str(error) != self._kept_as_broken:
                self._kept_as_broken = str(error)
                self._log.error("audit file not removed", reason=printable(str(error)))


def _settle(lines: Sequence[_Line], error: AuditUnavailableError | None) -> None:
    """Wake what waits for ``lines``: what waits in an event loop, by one call of it."""
    loop, in_loop = None, list[tuple[_Waiter, AuditUnavailableError | None]]()
    for line in lines:
        if isinstance(line.waiter, asyncio.Future):
            in_loop.append((line.waiter, error))
            loop = line.waiter.get_loop()
        elif line.waiter is not None and not line.waiter.done():
            _resolve(line.waiter, error)
    if loop is not None:
        with suppress(RuntimeError):  # it is closed, and what waited has ended with it
            loop.call_soon_threadsafe(_resolve_all, in_loop)


def _resolve_all(waiters: Sequence[tuple[_Waiter, AuditUnavailableError | None]]) -> None:
    for waiter, error in waiters:
        if not waiter.done():
            _resolve(waiter, error)


def _resolve(waiter: _Waiter, error: AuditUnavailableError | None) -> None:
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)
