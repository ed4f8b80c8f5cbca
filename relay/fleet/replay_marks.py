"""The newest manifest ever accepted from each node, and the leaves that were verified, kept across restarts.

Without the marks, anyone who can publish to the broker could replay an older manifest after a restart. Writes
are collected and made once a second, off the event loop: a crash loses at most that second, and what is
replayed from it is younger than a heartbeat. A write that fails is logged and retried. Must not judge.

SQLite opens its files by name, follows links, and creates others beside them. So they are in a directory of
the relay's own, and are checked before SQLite first opens them.
"""

import asyncio
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from structlog.typing import FilteringBoundLogger

from schemas.certificates import LEAF_RULES
from schemas.files import check_private_directory, make_private_directory, open_state
from schemas.health import Loop
from schemas.identity import Identity
from schemas.manifest import MAX_FUTURE_MS
from schemas.text import printable
from schemas.trust import HighWaterMark

_FLUSH_INTERVAL_S = 1.0
_ROUND_S = 120.0
_FILE = "marks.sqlite3"
_UNUSABLE = (sqlite3.Error, UnicodeDecodeError)
"""What the library raises for a damaged file; the second one where its own error repeats what is damaged."""
_MARK_TYPES = (str, str, int, str)
_LEAF_TYPES = (str, str, str, bytes, int, int, str)
_Changes = dict[str, tuple[str, HighWaterMark] | None]
"""By node: its tenant and its newest mark; None: the mark is to be deleted."""
_BESIDE = ("-journal", "-wal", "-shm")


class KeptLeaf(NamedTuple):
    """What is kept of a leaf, as ``Identity`` has it."""

    kid: str
    node_id: str
    tenant: str
    public_key: bytes
    not_before_ms: int
    not_after_ms: int
    root_kid: str

    @classmethod
    def of(cls, leaf: Identity) -> "KeptLeaf":
        return cls(*(getattr(leaf, name) for name in cls._fields))


class MarkStore:
    """The marks in one SQLite file in ``directory``. A file of earlier versions is moved there.

    Raises:
        OSError: the file cannot be used; from ``load`` too.
    """

    def __init__(
        self, directory: Path, log: FilteringBoundLogger, flush_interval_s: float = _FLUSH_INTERVAL_S
    ) -> None:
        make_private_directory(directory)
        check_private_directory(directory)
        _move_in(directory)
        self._path = directory / _FILE
        _check_files(self._path)
        self._log = log
        self._flush_interval_s = flush_interval_s
        self._failure = ""
        self._pending: _Changes = {}
        self._leaves: list[KeptLeaf] = []
        self.loop = Loop()
        with self._transaction() as database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS marks (node_id TEXT PRIMARY KEY, tenant TEXT NOT NULL,"
                " issued_at_ms INTEGER NOT NULL, etag TEXT NOT NULL) STRICT"
            )
            database.execute(
                "CREATE TABLE IF NOT EXISTS leaves (kid TEXT PRIMARY KEY, node_id TEXT NOT NULL,"
                " tenant TEXT NOT NULL, public_key BLOB NOT NULL, not_before_ms INTEGER NOT NULL,"
                " not_after_ms INTEGER NOT NULL, root_kid TEXT NOT NULL, rules INTEGER NOT NULL) STRICT"
            )

    def load(self) -> Iterator[tuple[str, str, HighWaterMark]]:
        with self._transaction() as database:
            rows = database.execute("SELECT node_id, tenant, issued_at_ms, etag FROM marks").fetchall()
        self._check(rows, _MARK_TYPES)
        for node_id, tenant, issued_at_ms, etag in rows:
            yield node_id, tenant, HighWaterMark(issued_at_ms, etag)

    def load_leaves(self, now_ms: int) -> list[KeptLeaf]:
        """Return the leaves that were verified by the present rules; delete others and expired ones."""
        with self._transaction() as database:
            database.execute("DELETE FROM leaves WHERE not_after_ms <= ? OR rules <> ?", (now_ms, LEAF_RULES))
            rows = database.execute(
                "SELECT kid, node_id, tenant, public_key, not_before_ms, not_after_ms, root_kid FROM leaves"
            ).fetchall()
        self._check(rows, _LEAF_TYPES)
        return [KeptLeaf(*row) for row in rows]

    def put_leaf(self, leaf: KeptLeaf) -> None:
        """Keep ``leaf``, which was verified by the present rules, and write it with the next flush."""
        self._leaves.append(leaf)

    def put(self, node_id: str, tenant: str, mark: HighWaterMark) -> None:
        """Keep ``mark``, and write it with the next flush.

        It is newer than the one before, unless that was set while the clock was ahead (``HighWaterMark``).
        """
        self._pending[node_id] = (tenant, mark)

    def drop(self, node_id: str) -> None:
        self._pending[node_id] = None

    async def run(self) -> None:
        """Flush once a second until cancelled, and then a last time."""
        try:
            while True:
                self.loop.busy(self._flush_interval_s + _ROUND_S)
                await asyncio.sleep(self._flush_interval_s)
                if self._pending or self._leaves:
                    await self._flush()
        finally:
            # A write that fails now is lost as in a crash; the relay ends all the same.
            with suppress(OSError):
                self._write(*self._take())

    async def _flush(self) -> None:
        changes, leaves = self._take()
        try:
            await asyncio.to_thread(self._write, changes, leaves)
        except OSError as error:
            self._pending = {**changes, **self._pending}
            self._leaves = [*leaves, *self._leaves]
            self._report(printable(str(error)))
        else:
            self._report("")

    def _report(self, failure: str) -> None:
        """Log each reason once: a write is tried again every second."""
        if failure and failure != self._failure:
            self._log.error("the newest manifests are not kept: a restart forgets them", reason=failure)
        elif self._failure and not failure:
            self._log.info("the newest manifests are kept again")
        self._failure = failure

    def _take(self) -> "tuple[_Changes, list[KeptLeaf]]":
        taken = self._pending, self._leaves
        self._pending, self._leaves = {}, []
        return taken

    def _write(self, changes: "_Changes", leaves: list[KeptLeaf]) -> None:
        rows = [
            (node_id, new[0], new[1].issued_at_ms, new[1].etag, MAX_FUTURE_MS)
            for node_id, new in changes.items()
            if new is not None
        ]
        dropped = [(node_id,) for node_id, new in changes.items() if new is None]
        with self._transaction() as database:
            database.executemany(
                "INSERT INTO marks VALUES (?, ?, ?, ?) ON CONFLICT (node_id) DO UPDATE"
                " SET tenant = excluded.tenant, issued_at_ms = excluded.issued_at_ms, etag = excluded.etag"
                " WHERE excluded.issued_at_ms > marks.issued_at_ms"
                " OR excluded.issued_at_ms < marks.issued_at_ms - ?",
                rows,
            )
            database.executemany(
                "INSERT OR REPLACE INTO leaves VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(*leaf, LEAF_RULES) for leaf in leaves],
            )
            database.executemany("DELETE FROM marks WHERE node_id = ?", dropped)
            database.executemany("DELETE FROM leaves WHERE node_id = ?", dropped)

    def _check(self, rows: Sequence[tuple[object, ...]], types: tuple[type, ...]) -> None:
        """Raise OSError for a value of another type: the library checks what it writes, not what it reads."""
        if any(type(value) is not type_ for row in rows for value, type_ in zip(row, types, strict=True)):
            raise OSError(f"{self._path} cannot be used: it is damaged")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for one transaction: in the thread that uses it, and not kept."""
        try:
            with closing(sqlite3.connect(self._path)) as database, database:
                yield database
        except _UNUSABLE as error:
            raise OSError(f"{self._path} cannot be used: {printable(str(error))}") from None


def snapshot(directory: Path) -> bytes | None:
    """Return the database as a file's content, whole, while a relay may write to it; None if there is none.

    Raises:
        OSError: it cannot be used.
    """
    places = (directory / _FILE, directory.with_name(_FILE))
    path = next((place for place in places if os.path.lexists(place)), None)
    if path is None:
        return None
    _check_files(path)
    try:
        with closing(sqlite3.connect(path)) as database:
            return database.serialize()
    except _UNUSABLE as error:
        raise OSError(f"{path} cannot be used: {printable(str(error))}") from None


def _move_in(directory: Path) -> None:
    """Move the file that earlier versions kept beside ``directory``, with its journal.

    Raises:
        OSError: the file is not safe to use, or there is one in ``directory`` as well.
    """
    former, path = directory.with_name(_FILE), directory / _FILE
    if not os.path.lexists(former):
        return
    if os.path.lexists(path):
        raise OSError(f"{former} and {path} are both there: remove the one that the relay did not use last")
    # The journal first: if this is interrupted, the next start moves the database, and finds it there.
    for suffix in (*_BESIDE, ""):
        old = former.with_name(former.name + suffix)
        if os.path.lexists(old):
            os.close(open_state(old))
            old.rename(path.with_name(path.name + suffix))


def _check_files(path: Path) -> None:
    """Check that the database's files can be used, and create an empty private one."""
    os.close(open_state(path, os.O_RDWR | os.O_CREAT))
    for suffix in _BESIDE:
        beside = path.with_name(path.name + suffix)
        if os.path.lexists(beside):
            os.close(open_state(beside))
