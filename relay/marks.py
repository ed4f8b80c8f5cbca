"""The newest manifest ever accepted from each node, kept across restarts.

Without it, whoever can write to the broker could bring back an older manifest after a restart. Writes are
gathered and made once in a while, off the event loop: a crash forgets at most that long, and a manifest
replayed within it is younger than a heartbeat. What a full disk refuses is tried again. Must not judge.
"""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from schemas.trust import Mark

_FLUSH_INTERVAL_S = 1.0


class MarkStore:
    """The marks in one SQLite file.

    Raises:
        OSError: the file cannot be used; from ``load`` too.
    """

    def __init__(self, path: Path, flush_interval_s: float = _FLUSH_INTERVAL_S) -> None:
        self._path = path
        self._flush_interval_s = flush_interval_s
        self._pending: dict[str, tuple[str, Mark]] = {}
        with self._transaction() as database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS marks (node_id TEXT PRIMARY KEY, tenant TEXT NOT NULL,"
                " issued_at_ms INTEGER NOT NULL, etag TEXT NOT NULL) STRICT"
            )

    def load(self) -> Iterator[tuple[str, str, Mark]]:
        """Yield ``(node_id, tenant, mark)`` of every node."""
        with self._transaction() as database:
            rows = database.execute("SELECT node_id, tenant, issued_at_ms, etag FROM marks").fetchall()
        for node_id, tenant, issued_at_ms, etag in rows:
            yield node_id, tenant, Mark(issued_at_ms, etag)

    def put(self, node_id: str, tenant: str, mark: Mark) -> None:
        """Remember ``mark``; it reaches the disk with the next flush."""
        self._pending[node_id] = (tenant, mark)

    async def run(self) -> None:
        """Flush once in a while until cancelled, and then a last time."""
        try:
            while True:
                await asyncio.sleep(self._flush_interval_s)
                if self._pending:
                    await self._flush()
        finally:
            # What the disk refuses now is lost as in a crash; the relay ends as it was told.
            with suppress(OSError):
                self._write(self._take())

    async def _flush(self) -> None:
        taken = self._take()
        try:
            await asyncio.to_thread(self._write, taken)
        except OSError:
            self._pending = {**taken, **self._pending}

    def _take(self) -> dict[str, tuple[str, Mark]]:
        taken, self._pending = self._pending, {}
        return taken

    def _write(self, marks: dict[str, tuple[str, Mark]]) -> None:
        rows = [(node_id, tenant, mark.issued_at_ms, mark.etag) for node_id, (tenant, mark) in marks.items()]
        with self._transaction() as database:
            database.executemany(
                "INSERT INTO marks VALUES (?, ?, ?, ?) ON CONFLICT (node_id) DO UPDATE"
                " SET tenant = excluded.tenant, issued_at_ms = excluded.issued_at_ms, etag = excluded.etag"
                " WHERE excluded.issued_at_ms > marks.issued_at_ms",
                rows,
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for one transaction: in the thread that uses it, and not kept."""
        try:
            with closing(sqlite3.connect(self._path)) as database, database:
                yield database
        except sqlite3.Error as error:
            raise OSError(f"{self._path} cannot be used: {error}") from None
