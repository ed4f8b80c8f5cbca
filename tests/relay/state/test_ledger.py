import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relay.state.ledger import Ledger, LedgerError
from schemas.files import ExposedFileError, UntrustedFileError
from tests.fakes.demo import environment_of
from tests.fakes.disk import full_disk
from tests.fakes.numbers_ledger import Numbers, ledger_in, line

ONE, TWO, THREE = {"n": 1}, {"n": 2}, {"n": 3}
BOUND_S = 60
WITH_TESTS = environment_of(Path(__file__).parents[2])
"""For processes that use what stands here."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def ledger(path: Path) -> Ledger[Numbers]:
    ledger = ledger_in(path)
    with ledger.locked():
        ledger.append(ONE)
        ledger.append(TWO)
    return ledger


@pytest.fixture
def _no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


# --- entries ------------------------------------------------------------------------------------------


def test_a_ledger_that_was_never_written_is_empty_and_stays_unmade(path: Path) -> None:
    assert ledger_in(path).read().entries == []
    assert ledger_in(path).stamp == (0, 0, 0)
    assert not path.exists()


def test_entries_come_back_in_their_order_to_every_process(ledger: Ledger[Numbers], path: Path) -> None:
    assert ledger.read().entries == ledger_in(path).read().entries == [ONE, TWO]


def test_a_text_of_any_kind_is_one_line_of_ascii(path: Path) -> None:
    entry = {"text": "a\nb\r\u2028\u00e9\x1b[31m\x00"}
    ledger = ledger_in(path)
    with ledger.locked():
        ledger.append(entry)
    assert path.read_bytes().count(b"\n") == 1
    assert path.read_bytes().isascii()
    assert ledger.read().entries == [entry]


@pytest.mark.usefixtures("_no_umask")
def test_a_ledger_is_for_its_owner_alone(path: Path) -> None:
    ledger = ledger_in(path)
    with ledger.locked():
        ledger.append(ONE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_stamp_differs_after_every_append_and_only_then(ledger: Ledger[Numbers], path: Path) -> None:
    first = ledger.stamp
    with ledger.locked():
        pass
    assert ledger.stamp == ledger_in(path).stamp == first
    with ledger.locked():
        ledger.append(THREE)
    assert ledger.stamp != first


# --- a power cut, and a full disk ---------------------------------------------------------------------


@pytest.mark.parametrize("torn", [b'{"n":', b'{"n":3}', b"\x00" * 4096, b"\xff\xfe"])
def test_what_was_not_written_to_its_end_does_not_count(
    ledger: Ledger[Numbers], path: Path, torn: bytes
) -> None:
    with path.open("ab") as file:
        file.write(torn)
    assert ledger.read().entries == [ONE, TWO]
    with ledger.locked() as numbers:
        assert numbers.entries == [ONE, TWO]
        ledger.append(THREE)
    assert ledger.read().entries == [ONE, TWO, THREE]


@pytest.mark.parametrize("room", range(1, 16))
def test_a_disk_that_fills_up_takes_all_entries_or_none(
    ledger: Ledger[Numbers], path: Path, room: int
) -> None:
    before = path.read_bytes()
    with ledger.locked():
        with full_disk(len(before) + room - 1), pytest.raises(OSError, match=r"ledger\.jsonl"):
            ledger.append(THREE, THREE)
        assert path.read_bytes() == before
        ledger.append(THREE)
    assert ledger.read().entries == [ONE, TWO, THREE]


def test_an_entry_is_on_the_disk_before_it_is_said_to_be_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bytes]] = []

    def watching(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, path.read_bytes()))

    monkeypatch.setattr(os, "fsync", watching)
    ledger = ledger_in(path)
    with ledger.locked():
        ledger.append(ONE)
        # The name of a new file must survive as well.
        assert synced == [(path.name, b'{"n":1}\n'), (path.parent.name, b'{"n":1}\n')]
        synced.clear()
        ledger.append(TWO)
        assert synced == [(path.name, b'{"n":1}\n{"n":2}\n')]


def test_an_entry_that_the_disk_does_not_confirm_is_taken_back(
    ledger: Ledger[Numbers], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: int) -> None:
        raise OSError(5, "Input/output error")

    with ledger.locked(), monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match=r"Input/output error: '.*ledger\.jsonl'"):
            ledger.append(THREE)
    assert ledger.read().entries == [ONE, TWO]


# --- damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"", id="an empty line"),
        pytest.param(b"damaged", id="no JSON"),
        pytest.param(b"[]", id="no object"),
        pytest.param(b"null", id="nothing"),
        pytest.param(b'{"n":3}{"n":4}', id="two"),
        pytest.param(b'{"n":"\xff"}', id="no text"),
        pytest.param('{"n":"\u00e9"}'.encode(), id="not as it writes"),
        pytest.param(b"[" * 100_000, id="too deep"),
        pytest.param(b'{"n":Infinity}', id="a number without end"),
    ],
)
def test_a_line_that_is_no_entry_is_an_error_that_names_it(
    ledger: Ledger[Numbers], path: Path, line: bytes
) -> None:
    with path.open("ab") as file:
        file.write(line + b'\n{"n":4}\n')
    before = path.read_bytes()
    for use in (ledger.read, lambda: ledger.locked().__enter__()):
        with pytest.raises(LedgerError, match=rf"{path} is damaged: line 3"):
            use()
    assert path.read_bytes() == before


def test_what_is_no_file_is_an_error_that_names_it(path: Path) -> None:
    path.mkdir()
    with pytest.raises(OSError, match=r"ledger\.jsonl"):
        ledger_in(path).read()


@pytest.mark.usefixtures("ledger")
@pytest.mark.parametrize(
    ("secret", "mode"),
    [*((True, mode) for mode in (0o640, 0o604, 0o620, 0o602)), *((False, m) for m in (0o620, 0o602, 0o666))],
)
def test_what_others_have_a_right_to_is_not_used(path: Path, mode: int, *, secret: bool) -> None:
    path.chmod(mode)
    error, fix = (ExposedFileError, "600") if secret else (UntrustedFileError, "go-w")
    ledger = ledger_in(path, secret=secret)
    with pytest.raises(error, match=f"chmod {fix} {path}"):
        ledger.read()
    with pytest.raises(error), ledger.locked():
        pass


@pytest.mark.parametrize("position", range(5))
def test_damage_at_any_line_is_found_by_who_had_read_the_file_and_by_who_had_not(
    path: Path, position: int
) -> None:
    path.write_bytes(b"".join(map(line, range(5))))
    reader = ledger_in(path)
    reader.read()
    lines = path.read_bytes().splitlines(keepends=True)
    lines[position] = b"X" + lines[position][1:]
    for inode in ("the same", "another"):
        if inode == "another":
            path.rename(path.with_suffix(".before"))
        path.write_bytes(b"".join(lines))
        for ledger in (reader, reader, ledger_in(path)):
            with pytest.raises(LedgerError, match=f"line {position + 1} is no entry"):
                ledger.read()
    path.write_bytes(b"".join(map(line, range(7))))
    assert [entry["n"] for entry in reader.read().entries] == list(range(7))


def test_damage_that_stays_is_parsed_once(ledger: Ledger[Numbers], path: Path) -> None:
    taken = ledger.read().taken
    with path.open("ab") as file:
        file.write(line(3) + b"damaged\n")
    for _ in range(3):
        with pytest.raises(LedgerError):
            ledger.read()
    assert taken == [1, 2, 3]


# --- what a look costs, and what it notices -----------------------------------------------------------


def test_after_the_first_look_only_what_was_appended_is_parsed(path: Path) -> None:
    path.write_bytes(b"".join(map(line, range(5000))))
    ledger, command = ledger_in(path), ledger_in(path)
    taken = ledger.read().taken
    assert len(taken) == 5000
    for number in (5000, 5001):
        taken.clear()
        ledger.read()
        assert taken == []
        with command.locked():
            command.append({"n": number})
        assert [entry["n"] for entry in ledger.read().entries] == list(range(number + 1))
        with ledger.locked() as numbers:
            assert len(numbers.entries) == number + 1
        assert taken == [number]


def test_a_state_that_was_returned_never_changes(ledger: Ledger[Numbers], path: Path) -> None:
    numbers = ledger.read()
    with ledger_in(path).locked():
        ledger_in(path).append(THREE)
    assert ledger.read().entries == [ONE, TWO, THREE]
    assert numbers.entries == [ONE, TWO]


def test_a_line_counts_when_its_end_has_come_and_not_before(ledger: Ledger[Numbers], path: Path) -> None:
    ledger.read()
    for piece in (b'{"n"', b":3}"):
        with path.open("ab") as file:
            file.write(piece)
        assert ledger.read().entries == [ONE, TWO]
    with path.open("ab") as file:
        file.write(b"\n")
    assert ledger.read().entries == [ONE, TWO, THREE]
    assert ledger.read().taken == [1, 2, 3]


@pytest.mark.parametrize("left", range(3))
def test_a_file_that_was_cut_off_is_read_anew(path: Path, left: int) -> None:
    path.write_bytes(b"".join(map(line, range(3))))
    ledger = ledger_in(path)
    ledger.read()
    os.truncate(path, left * len(line(0)))
    assert [entry["n"] for entry in ledger.read().entries] == list(range(left))
    with path.open("ab") as file:
        file.write(line(7) + line(8) + line(9) + line(10))
    assert [entry["n"] for entry in ledger.read().entries] == [*range(left), 7, 8, 9, 10]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_file_that_was_put_in_its_place_is_read_whether_longer_or_shorter(
    ledger: Ledger[Numbers], path: Path, count: int
) -> None:
    ledger.read()
    other = path.with_name("restored")
    other.write_bytes(b"".join(map(line, range(5, 5 + count))))
    other.replace(path)
    assert [entry["n"] for entry in ledger.read().entries] == list(range(5, 5 + count))
    with ledger.locked():
        ledger.append(ONE)
    assert [entry["n"] for entry in ledger.read().entries] == [*range(5, 5 + count), 1]


@pytest.mark.parametrize("copy", [shutil.copyfile, shutil.copy2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_file_that_was_copied_over_it_is_read_also_if_size_and_time_are_the_same(
    ledger: Ledger[Numbers], path: Path, count: int, copy: Callable[[Path, Path], object]
) -> None:
    ledger.read()
    before = ledger.stamp
    backup = path.with_name("backup")
    backup.write_bytes(b"".join(map(line, range(5, 5 + count))))
    shutil.copystat(path, backup)
    copy(backup, path)
    assert ledger.stamp != before
    assert [entry["n"] for entry in ledger.read().entries] == list(range(5, 5 + count))


def test_a_file_that_was_taken_away_and_came_back_is_read_again(ledger: Ledger[Numbers], path: Path) -> None:
    ledger.read()
    aside = path.rename(path.with_name("aside"))
    assert ledger.read().entries == []
    aside.rename(path)
    assert ledger.read().entries == [ONE, TWO]


def test_a_pipe_in_the_place_of_the_file_is_an_error_and_does_not_block(
    ledger: Ledger[Numbers], path: Path
) -> None:
    ledger.read()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"ledger\.jsonl is no regular file"):
        ledger.read()


def test_a_file_that_is_larger_than_any_ledger_is_refused_before_it_is_read(
    ledger: Ledger[Numbers], path: Path
) -> None:
    os.truncate(path, 1 << 40)
    with pytest.raises(LedgerError, match=r"ledger\.jsonl is larger than 512 MiB: move it away"):
        ledger.read()


def test_who_waited_while_the_file_was_replaced_writes_into_the_new_one(
    ledger: Ledger[Numbers], path: Path
) -> None:
    with ThreadPoolExecutor(1) as thread:

        def add() -> None:
            with ledger_in(path).locked():
                ledger_in(path).append(THREE)

        with ledger.locked():
            waiting = thread.submit(add)
            until_waited_for(path)
            other = path.with_name("restored")
            other.write_bytes(line(9))
            other.replace(path)
        waiting.result(BOUND_S)
    assert ledger.read().entries == [{"n": 9}, THREE]


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def until_waited_for(path: Path) -> None:
    """Wait until a process waits for the lock of ``path``."""
    inode, ends = str(path.stat().st_ino), time.monotonic() + BOUND_S
    while time.monotonic() < ends:
        locks = Path("/proc/locks").read_text("ascii").splitlines()
        if any("->" in lock and f":{inode} " in lock for lock in locks):
            return
    raise TimeoutError


# --- no descriptors -----------------------------------------------------------------------------------

_EXHAUSTED = """
import os
import resource
import sys
from pathlib import Path
from tests.fakes.numbers_ledger import ledger_in, line

path = Path(sys.argv[1])
ledger = ledger_in(path)
ledger.read()
writer = os.open(path, os.O_WRONLY | os.O_APPEND)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.dup(writer))
except OSError as error:
    assert error.errno == 24, error
for number in (3, 4):
    os.write(writer, line(number))
    print(len(ledger.read().entries))
other = Path(sys.argv[2])
other.replace(path)
print(ledger.read().entries)
"""


@pytest.mark.integration
def test_a_ledger_is_read_on_and_even_replaced_when_no_descriptor_is_left(
    ledger: Ledger[Numbers], path: Path
) -> None:
    other = path.with_name("restored")
    other.write_bytes(line(9))
    command = [sys.executable, "-P", "-c", _EXHAUSTED, str(path), str(other)]
    outcome = subprocess.run(
        command, env=WITH_TESTS, capture_output=True, check=False, timeout=BOUND_S, text=True
    )
    assert (outcome.stdout.splitlines(), outcome.stderr) == (["3", "4", "[{'n': 9}]"], "")
    assert ledger.read().entries == [{"n": 9}]


def test_a_ledger_that_is_collected_gives_its_descriptor_back(path: Path) -> None:
    path.write_bytes(line(1))
    before = open_files()
    readers = [ledger_in(path) for _ in range(5)]
    for reader in readers:
        reader.read()
    assert open_files() == before + 5
    del reader
    readers.clear()
    assert open_files() == before


# --- several processes --------------------------------------------------------------------------------

_COUNTER = """
import sys
from pathlib import Path
from tests.fakes.numbers_ledger import ledger_in

ledger = ledger_in(Path(sys.argv[1]))
for _ in range(50):
    with ledger.locked() as numbers:
        ledger.append({"n": len(numbers.entries)})
"""


@pytest.mark.integration
def test_processes_that_write_at_once_see_what_the_others_wrote(path: Path) -> None:
    command = [sys.executable, "-P", "-c", _COUNTER, str(path)]
    processes = [subprocess.Popen(command, env=WITH_TESTS) for _ in range(3)]
    assert [process.wait(BOUND_S) for process in processes] == [0, 0, 0]
    assert [entry["n"] for entry in ledger_in(path).read().entries] == list(range(150))


_READER = """
import json
import sys
from pathlib import Path
from tests.fakes.numbers_ledger import ledger_in

print(json.dumps(ledger_in(Path(sys.argv[1])).read().entries))
"""


@pytest.mark.integration
def test_who_reads_needs_not_wait_for_who_holds(ledger: Ledger[Numbers], path: Path) -> None:
    command = [sys.executable, "-P", "-c", _READER, str(path)]
    with ledger.locked():
        read = subprocess.run(command, env=WITH_TESTS, capture_output=True, check=True, timeout=BOUND_S)
    assert json.loads(read.stdout) == [ONE, TWO]
