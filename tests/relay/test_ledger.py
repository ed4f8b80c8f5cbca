import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.ledger import Ledger, LedgerError
from schemas.files import ExposedFileError, UntrustedFileError
from tests.fakes.disk import full_disk

ONE, TWO, THREE = {"n": 1}, {"n": 2}, {"n": 3}
BOUND_S = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    ledger = Ledger(path)
    with ledger.held():
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
    assert Ledger(path).entries() == []
    assert Ledger(path).stamp == (0, 0, 0)
    assert not path.exists()


def test_entries_come_back_in_their_order_to_every_process(ledger: Ledger, path: Path) -> None:
    assert ledger.entries() == Ledger(path).entries() == [ONE, TWO]


def test_who_holds_the_ledger_is_given_its_entries(ledger: Ledger) -> None:
    with ledger.held() as entries:
        assert entries == [ONE, TWO]


def test_a_text_of_any_kind_is_one_line_of_ascii(path: Path) -> None:
    entry = {"text": "a\nb\r\u2028\u00e9\x1b[31m\x00"}
    ledger = Ledger(path)
    with ledger.held():
        ledger.append(entry)
    assert path.read_bytes().count(b"\n") == 1
    assert path.read_bytes().isascii()
    assert ledger.entries() == [entry]


@pytest.mark.usefixtures("_no_umask")
def test_a_ledger_is_for_its_owner_alone(path: Path) -> None:
    ledger = Ledger(path)
    with ledger.held():
        ledger.append(ONE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_stamp_differs_after_every_append_and_only_then(ledger: Ledger, path: Path) -> None:
    first = ledger.stamp
    with ledger.held():
        pass
    assert ledger.stamp == Ledger(path).stamp == first
    with ledger.held():
        ledger.append(THREE)
    assert ledger.stamp != first


# --- a power cut, and a full disk ---------------------------------------------------------------------


@pytest.mark.parametrize("torn", [b'{"n":', b'{"n":3}', b"\x00" * 4096, b"\xff\xfe"])
def test_what_was_not_written_to_its_end_does_not_count(ledger: Ledger, path: Path, torn: bytes) -> None:
    with path.open("ab") as file:
        file.write(torn)
    assert ledger.entries() == [ONE, TWO]
    with ledger.held() as entries:
        assert entries == [ONE, TWO]
        ledger.append(THREE)
    assert ledger.entries() == [ONE, TWO, THREE]


def test_a_first_entry_that_is_torn_leaves_an_empty_ledger(path: Path) -> None:
    path.write_bytes(b'{"n":1')
    assert Ledger(path).entries() == []
    with Ledger(path).held() as entries:
        assert entries == []
    assert path.read_bytes() == b""


@pytest.mark.parametrize("room", range(1, 16))
def test_a_disk_that_fills_up_takes_all_entries_or_none(ledger: Ledger, path: Path, room: int) -> None:
    before = path.read_bytes()
    with ledger.held():
        with full_disk(len(before) + room - 1), pytest.raises(OSError, match=r"ledger\.jsonl"):
            ledger.append(THREE, THREE)
        assert path.read_bytes() == before
        ledger.append(THREE)
    assert ledger.entries() == [ONE, TWO, THREE]


def test_an_entry_is_on_the_disk_before_it_is_said_to_be_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bytes]] = []

    def watching(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, path.read_bytes()))

    monkeypatch.setattr(os, "fsync", watching)
    ledger = Ledger(path)
    with ledger.held():
        ledger.append(ONE)
        # The name of a new file must survive as well.
        assert synced == [(path.name, b'{"n":1}\n'), (path.parent.name, b'{"n":1}\n')]
        synced.clear()
        ledger.append(TWO)
        assert synced == [(path.name, b'{"n":1}\n{"n":2}\n')]


def test_an_entry_that_the_disk_does_not_confirm_is_taken_back(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: int) -> None:
        raise OSError(5, "Input/output error")

    with ledger.held(), monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match=r"Input/output error: '.*ledger\.jsonl'"):
            ledger.append(THREE)
    assert ledger.entries() == [ONE, TWO]


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
    ],
)
def test_a_line_that_is_no_entry_is_an_error_that_names_it(ledger: Ledger, path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line + b'\n{"n":4}\n')
    before = path.read_bytes()
    for use in (ledger.entries, lambda: ledger.held().__enter__()):
        with pytest.raises(LedgerError, match=rf"{path} is damaged: line 3"):
            use()
    assert path.read_bytes() == before


def test_a_link_is_not_followed(ledger: Ledger, path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(OSError, match="link"):
        Ledger(link).entries()
    with pytest.raises(OSError, match="link"), Ledger(link).held():
        pass
    assert ledger.entries() == [ONE, TWO]


def test_what_is_no_file_is_an_error_that_names_it(path: Path) -> None:
    path.mkdir()
    with pytest.raises(OSError, match=r"ledger\.jsonl"):
        Ledger(path).entries()


@pytest.mark.usefixtures("ledger")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_secrets_that_others_have_a_right_to_are_not_used(path: Path, mode: int) -> None:
    path.chmod(mode)
    secret = Ledger(path, secret=True)
    with pytest.raises(ExposedFileError, match=f"chmod 600 {path}"):
        secret.entries()
    with pytest.raises(ExposedFileError), secret.held():
        pass


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_what_is_no_secret_may_be_read_by_others(ledger: Ledger, path: Path, mode: int) -> None:
    path.chmod(mode)
    assert ledger.entries() == [ONE, TWO]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_ledger_that_others_can_change_is_not_used(ledger: Ledger, path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(UntrustedFileError, match=f"chmod go-w {path}"):
        ledger.entries()
    with pytest.raises(UntrustedFileError), ledger.held():
        pass


def test_secrets_are_used_when_they_are_private(path: Path) -> None:
    secret = Ledger(path, secret=True)
    with secret.held():
        secret.append(ONE)
    assert secret.entries() == [ONE]


# --- several processes --------------------------------------------------------------------------------

_COUNTER = """
import sys
from pathlib import Path
from relay.ledger import Ledger

ledger = Ledger(Path(sys.argv[1]))
for _ in range(50):
    with ledger.held() as entries:
        ledger.append({"n": len(entries)})
"""


def test_processes_that_write_at_once_see_what_the_others_wrote(path: Path) -> None:
    command = [sys.executable, "-P", "-c", _COUNTER, str(path)]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(BOUND_S) for process in processes] == [0, 0, 0]
    assert [entry["n"] for entry in Ledger(path).entries()] == list(range(150))


_READER = """
import json
import sys
from pathlib import Path
from relay.ledger import Ledger

print(json.dumps(Ledger(Path(sys.argv[1])).entries()))
"""


def test_who_reads_needs_not_wait_for_who_holds(ledger: Ledger, path: Path) -> None:
    command = [sys.executable, "-P", "-c", _READER, str(path)]
    with ledger.held():
        read = subprocess.run(command, capture_output=True, check=True, timeout=BOUND_S)
    assert json.loads(read.stdout) == [ONE, TWO]
