import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from relay.marks import MarkStore
from schemas.trust import Mark
from tests.fakes.disk import full_disk
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID

BOUND_S = 10
OLD = Mark(NOW_MS, "aa" * 32)
NEW = Mark(NOW_MS + 1, "bb" * 32)


async def stopped(store: MarkStore) -> None:
    """Let the store run until it waits for the first time, and stop it."""
    task = asyncio.create_task(store.run())
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


class WatchedStore(MarkStore):
    """Tells the event loop how each write to the disk ended."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, flush_interval_s=0.001)
        self._loop = asyncio.get_running_loop()
        self._endings: asyncio.Queue[str] = asyncio.Queue()

    def _write(self, marks: dict[str, tuple[str, Mark]]) -> None:
        ending = "failed"
        try:
            super()._write(marks)
            ending = "written"
        finally:
            self._loop.call_soon_threadsafe(self._endings.put_nowait, ending)

    async def ending(self) -> str:
        return await asyncio.wait_for(self._endings.get(), BOUND_S)


@pytest.fixture
async def store(path: Path) -> AsyncIterator[WatchedStore]:
    store = WatchedStore(path)
    running = asyncio.create_task(store.run())
    yield store
    assert not running.done()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "marks.sqlite3"


def test_a_new_store_is_empty(path: Path) -> None:
    assert list(MarkStore(path).load()) == []


async def test_marks_outlive_the_process(path: Path) -> None:
    store = MarkStore(path)
    store.put(NODE_ID, "acme", OLD)
    store.put(OTHER_NODE_ID, "globex", NEW)
    await stopped(store)
    assert sorted(MarkStore(path).load()) == [(NODE_ID, "acme", OLD), (OTHER_NODE_ID, "globex", NEW)]


async def test_a_newer_mark_replaces_an_older_one_on_the_disk(path: Path) -> None:
    for tenant, mark in (("acme", OLD), ("globex", NEW)):
        store = MarkStore(path)
        store.put(NODE_ID, tenant, mark)
        await stopped(store)
    assert list(MarkStore(path).load()) == [(NODE_ID, "globex", NEW)]


@pytest.mark.parametrize(
    "later",
    [pytest.param(OLD, id="older"), pytest.param(Mark(NEW.issued_at_ms, "cc" * 32), id="as old")],
)
async def test_nothing_moves_a_mark_back(path: Path, later: Mark) -> None:
    for mark in (NEW, later):
        store = MarkStore(path)
        store.put(NODE_ID, "acme", mark)
        await stopped(store)
    assert list(MarkStore(path).load()) == [(NODE_ID, "acme", NEW)]


async def test_marks_reach_the_disk_while_the_relay_runs(store: WatchedStore) -> None:
    for mark in (OLD, NEW):
        store.put(NODE_ID, "acme", mark)
        assert await store.ending() == "written"
        assert list(store.load()) == [(NODE_ID, "acme", mark)]


async def test_what_a_full_disk_refused_is_written_when_there_is_room(store: WatchedStore) -> None:
    with full_disk():
        store.put(NODE_ID, "acme", OLD)
        assert await store.ending() == "failed"
    while await store.ending() == "failed":
        pass
    assert list(store.load()) == [(NODE_ID, "acme", OLD)]


async def test_a_mark_that_came_while_the_disk_was_full_is_not_overwritten_by_the_one_before(
    store: WatchedStore,
) -> None:
    with full_disk():
        store.put(NODE_ID, "acme", OLD)
        assert await store.ending() == "failed"
        store.put(NODE_ID, "acme", NEW)
        assert await store.ending() == "failed"
    while await store.ending() == "failed":
        pass
    assert list(store.load()) == [(NODE_ID, "acme", NEW)]


def test_a_file_that_is_no_database_is_an_error_of_the_operating_system(path: Path) -> None:
    path.write_bytes(b"no database" * 100)
    with pytest.raises(OSError, match=r"marks\.sqlite3 cannot be used"):
        MarkStore(path)


def test_a_directory_that_is_not_there_is_an_error_of_the_operating_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot be used"):
        MarkStore(tmp_path / "nowhere" / "marks.sqlite3")
