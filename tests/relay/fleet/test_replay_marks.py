import asyncio
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from relay.fleet.replay_marks import KeptLeaf, MarkStore
from schemas.certificates import LEAF_RULES
from schemas.files import UntrustedFileError, make_private_directory, write_atomic
from schemas.manifest import MAX_FUTURE_MS
from schemas.process.logs import make_logger
from schemas.trust import HighWaterMark
from tests.fakes.background import in_background
from tests.fakes.disk import full_disk
from tests.fakes.lines import LogLines
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID

BOUND_S = 30
LOG = make_logger("relay", LogLines())
OLD = HighWaterMark(NOW_MS, "aa" * 32)
NEW = HighWaterMark(NOW_MS + 1, "bb" * 32)

# A cache of one page, so that the rows reach the file, and the end of the process before they are committed.
CRASH = """
import os, sqlite3, sys

database = sqlite3.connect(sys.argv[1])
database.execute("PRAGMA cache_size = 1")
rows = [(f"node {number}", "globex", 1, "x" * 500) for number in range(500)]
database.executemany("INSERT INTO marks VALUES (?, ?, ?, ?)", rows)
os._exit(1)
"""


LEAF = KeptLeaf("ab" * 32, NODE_ID, "acme", b"k" * 32, 1_000, 2_000, "ef" * 32)


async def stopped(store: MarkStore) -> None:
    """Let the store run until it waits for the first time, and stop it."""
    async with in_background(store.run()):
        await asyncio.sleep(0)


class WatchedStore(MarkStore):
    """Tells the event loop how each write to the disk ended."""

    def __init__(self, path: Path) -> None:
        self.lines = LogLines()
        super().__init__(path, make_logger("relay", self.lines), flush_interval_s=0.001)
        self._loop = asyncio.get_running_loop()
        self._endings: asyncio.Queue[str] = asyncio.Queue()

    def _write(self, changes: dict[str, tuple[str, HighWaterMark] | None], leaves: list[KeptLeaf]) -> None:
        ending = "failed"
        try:
            super()._write(changes, leaves)
            ending = "written"
        finally:
            self._loop.call_soon_threadsafe(self._endings.put_nowait, ending)

    async def ending(self) -> str:
        return await asyncio.wait_for(self._endings.get(), BOUND_S)


@pytest.fixture
async def store(path: Path) -> AsyncIterator[WatchedStore]:
    store = WatchedStore(path)
    async with in_background(store.run()):
        yield store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "marks"


def test_a_new_store_is_empty(path: Path) -> None:
    assert list(MarkStore(path, LOG).load()) == []


async def test_marks_outlive_the_process(path: Path) -> None:
    store = MarkStore(path, LOG)
    store.put(NODE_ID, "acme", OLD)
    store.put(OTHER_NODE_ID, "globex", NEW)
    await stopped(store)
    assert sorted(MarkStore(path, LOG).load()) == [(NODE_ID, "acme", OLD), (OTHER_NODE_ID, "globex", NEW)]


async def test_leaves_outlive_the_process_until_they_expire(path: Path) -> None:
    store = MarkStore(path, LOG)
    store.put_leaf(LEAF)
    store.put_leaf(LEAF)
    await stopped(store)
    assert MarkStore(path, LOG).load_leaves(LEAF.not_after_ms - 1) == [LEAF]
    assert MarkStore(path, LOG).load_leaves(LEAF.not_after_ms) == []
    assert MarkStore(path, LOG).load_leaves(LEAF.not_after_ms - 1) == []


async def test_leaves_that_other_rules_have_verified_count_for_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MarkStore(path, LOG)
    store.put_leaf(LEAF)
    await stopped(store)
    monkeypatch.setattr("relay.fleet.replay_marks.LEAF_RULES", LEAF_RULES + 1)
    assert MarkStore(path, LOG).load_leaves(0) == []


async def test_the_leaves_of_a_node_that_is_forgotten_are_forgotten(path: Path) -> None:
    store = MarkStore(path, LOG)
    store.put_leaf(LEAF)
    store.put_leaf(LEAF._replace(kid="cd" * 32, node_id=OTHER_NODE_ID))
    await stopped(store)
    store = MarkStore(path, LOG)
    store.drop(NODE_ID)
    await stopped(store)
    assert [leaf.node_id for leaf in MarkStore(path, LOG).load_leaves(0)] == [OTHER_NODE_ID]


async def test_leaves_that_a_full_disk_refused_are_written_when_there_is_room(store: WatchedStore) -> None:
    with full_disk():
        store.put_leaf(LEAF)
        assert await store.ending() == "failed"
    while await store.ending() == "failed":
        pass
    assert store.load_leaves(0) == [LEAF]


@pytest.mark.parametrize(
    ("before", "later", "kept"),
    [
        pytest.param(OLD, NEW, NEW, id="newer"),
        pytest.param(NEW, OLD, NEW, id="older"),
        pytest.param(NEW, HighWaterMark(NEW.issued_at_ms, "cc" * 32), NEW, id="as old"),
        pytest.param(
            HighWaterMark(NEW.issued_at_ms + MAX_FUTURE_MS + 1, "dd" * 32),
            NEW,
            NEW,
            id="after a clock that was ahead",
        ),
    ],
)
async def test_the_newest_mark_is_kept_with_its_tenant_unless_it_is_of_a_clock_that_was_ahead(
    path: Path, before: HighWaterMark, later: HighWaterMark, kept: HighWaterMark
) -> None:
    for tenant, mark in (("acme", before), ("globex", later)):
        store = MarkStore(path, LOG)
        store.put(NODE_ID, tenant, mark)
        await stopped(store)
    tenant = "globex" if kept is later else "acme"
    assert list(MarkStore(path, LOG).load()) == [(NODE_ID, tenant, kept)]


async def test_marks_reach_the_disk_while_the_relay_runs(store: WatchedStore) -> None:
    for mark in (OLD, NEW):
        store.put(NODE_ID, "acme", mark)
        assert await store.ending() == "written"
        assert list(store.load()) == [(NODE_ID, "acme", mark)]


async def test_a_disk_that_stays_full_is_one_line_and_room_again_another(store: WatchedStore) -> None:
    with full_disk():
        store.put(NODE_ID, "acme", OLD)
        assert [await store.ending() for _ in range(3)] == ["failed"] * 3
    await store.lines.until("the newest manifests are kept again")
    assert [(line["event"], "full" in line.get("reason", "")) for line in store.lines.entries()] == [
        ("the newest manifests are not kept: a restart forgets them", True),
        ("the newest manifests are kept again", False),
    ]


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
    make_private_directory(path)
    write_atomic(path / "marks.sqlite3", b"no database" * 100)
    with pytest.raises(OSError, match=r"marks\.sqlite3 cannot be used"):
        MarkStore(path, LOG)


# --- where it lies --------------------------------------------------------------------------------------


def test_a_value_of_another_type_is_refused_as_damage(path: Path) -> None:
    make_private_directory(path)
    # Without STRICT, as a torn page reads: the type of a value is a byte beside it.
    with closing(sqlite3.connect(path / "marks.sqlite3")) as database:
        database.executescript(
            "CREATE TABLE marks (node_id, tenant, issued_at_ms, etag);"
            "INSERT INTO marks VALUES ('a', 'b', 'c', 'd');"
            "CREATE TABLE leaves"
            " (kid, node_id, tenant, public_key, not_before_ms, not_after_ms, root_kid, rules)"
        )
        leaf = ("a", None, "c", b"", 1, NOW_MS + 1, "g", LEAF_RULES)
        database.execute("INSERT INTO leaves VALUES (?, ?, ?, ?, ?, ?, ?, ?)", leaf)
        database.commit()
    (path / "marks.sqlite3").chmod(0o600)
    store = MarkStore(path, make_logger("relay", LogLines()))
    with pytest.raises(OSError, match="it is damaged"):
        list(store.load())
    with pytest.raises(OSError, match="it is damaged"):
        store.load_leaves(NOW_MS)


@pytest.mark.parametrize("byte", [b"\xff", b"\t"], ids=["no UTF-8", "a control character"])
def test_a_damaged_definition_is_refused_in_printable_words(path: Path, byte: bytes) -> None:
    file = path / "marks.sqlite3"
    MarkStore(path, make_logger("relay", LogLines()))
    file.write_bytes(file.read_bytes().replace(b"INTEGER", b"INT" + byte + b"GER"))
    with pytest.raises(OSError, match="cannot be used") as caught:
        MarkStore(path, make_logger("relay", LogLines()))
    assert str(caught.value).isprintable()


def test_the_database_is_private_in_a_directory_that_is_private(path: Path) -> None:
    MarkStore(path, LOG)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "marks.sqlite3").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["marks.sqlite3", "marks.sqlite3-journal", "marks.sqlite3-wal"])
@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing"])
def test_a_link_in_the_place_of_a_file_is_refused_and_not_followed(
    path: Path, tmp_path: Path, name: str, *, there: bool
) -> None:
    make_private_directory(path)
    victim = tmp_path / "victim"
    if there:
        victim.write_bytes(b"")
    (path / name).symlink_to(victim)
    with pytest.raises(UntrustedFileError, match="is a symbolic link"):
        MarkStore(path, LOG)
    assert (victim.read_bytes() if victim.exists() else None) == (b"" if there else None)


def test_a_link_in_the_place_of_the_directory_is_refused(path: Path, tmp_path: Path) -> None:
    make_private_directory(path.parent)
    make_private_directory(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedFileError, match="no directory"):
        MarkStore(path, LOG)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_directory_that_is_open_to_others_is_refused(path: Path) -> None:
    make_private_directory(path)
    path.chmod(0o755)
    with pytest.raises(UntrustedFileError, match="chmod 700"):
        MarkStore(path, LOG)


@pytest.fixture
def former(path: Path) -> Path:
    """Return a file with one mark where earlier versions kept it."""
    store = MarkStore(path, LOG)
    store.put(NODE_ID, "acme", OLD)
    asyncio.run(stopped(store))
    former = path.with_name("marks.sqlite3")
    (path / "marks.sqlite3").rename(former)
    path.rmdir()
    return former


def test_the_file_of_an_earlier_version_is_moved_in(path: Path, former: Path) -> None:
    assert list(MarkStore(path, LOG).load()) == [(NODE_ID, "acme", OLD)]
    assert not former.exists()
    assert list(MarkStore(path, LOG).load()) == [(NODE_ID, "acme", OLD)]


@pytest.mark.integration
@pytest.mark.parametrize("cut_short", [False, True], ids=["at once", "after the journal was moved"])
def test_what_a_crash_left_in_the_journal_of_an_earlier_version_is_rolled_back(
    path: Path, former: Path, *, cut_short: bool
) -> None:
    subprocess.run([sys.executable, "-P", "-c", CRASH, str(former)], check=False)
    journal = former.with_name("marks.sqlite3-journal")
    assert journal.stat().st_size
    if cut_short:
        make_private_directory(path)
        journal.rename(path / journal.name)
    assert list(MarkStore(path, LOG).load()) == [(NODE_ID, "acme", OLD)]


def test_of_two_databases_none_is_chosen(path: Path, former: Path) -> None:
    write_atomic(former.with_name("copy"), former.read_bytes())
    MarkStore(path, LOG)
    former.with_name("copy").rename(former)
    with pytest.raises(OSError, match="both there"):
        MarkStore(path, LOG)


def test_a_link_in_the_place_of_an_earlier_versions_file_is_not_moved_in(
    path: Path, former: Path, tmp_path: Path
) -> None:
    former.rename(tmp_path / "elsewhere")
    former.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedFileError, match="is a symbolic link"):
        MarkStore(path, LOG)
    assert former.is_symlink()


async def test_a_mark_that_is_dropped_is_gone_and_a_new_one_stays(tmp_path: Path) -> None:
    store = MarkStore(tmp_path / "marks", LOG)
    for node_id in (NODE_ID, OTHER_NODE_ID):
        store.put(node_id, "acme", NEW)
    await stopped(store)
    store.drop(NODE_ID)
    store.drop(OTHER_NODE_ID)
    store.put(OTHER_NODE_ID, "acme", OLD)
    await stopped(store)
    assert [node_id for node_id, _, _ in MarkStore(tmp_path / "marks", LOG).load()] == [OTHER_NODE_ID]
