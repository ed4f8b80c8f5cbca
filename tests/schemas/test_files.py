import os
import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from schemas.files import (
    PRIVATE,
    PUBLIC,
    ExposedFileError,
    UntrustedFileError,
    check_loadable,
    check_private_directory,
    make_private_directory,
    open_state,
    read_given,
    read_named,
    read_named_secret,
    read_private,
    read_state,
    write_atomic,
    write_unsynced,
)
from tests.fakes.command_lines import OTHER_OWNER, give_away


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=["umask-000", "umask-022", "umask-077"])
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@dataclass
class Watched:
    """What was synced: what it is, what it held, and what was read under the file's own name just then."""

    synced: list[tuple[str, str, str]] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)
    failures: dict[str, BaseException] = field(default_factory=dict)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Return what ``os.fsync`` is asked for while ``tmp_path / "file"`` is written."""
    seen = Watched()
    path = tmp_path / "file"
    sync = os.fsync

    def watching(descriptor: int) -> None:
        synced = Path(f"/proc/self/fd/{descriptor}").readlink()
        kind = "directory" if synced == tmp_path else "file"
        if kind == "file":
            seen.temporary.append(synced.name)
        if kind in seen.failures:
            raise seen.failures[kind]
        content = synced.read_text() if kind == "file" else ""
        seen.synced.append((kind, content, path.read_text() if path.exists() else ""))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watching)
    return seen


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_text_and_bytes_are_written(tmp_path: Path) -> None:
    write_atomic(tmp_path / "text", "caf\xe9\n")
    write_atomic(tmp_path / "bytes", b"\x00\xff")
    assert (tmp_path / "text").read_bytes() == b"caf\xc3\xa9\n"
    assert (tmp_path / "bytes").read_bytes() == b"\x00\xff"


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "a long first content")
    write_atomic(path, "short")
    assert path.read_text() == "short"


def test_who_still_reads_the_old_file_reads_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    with path.open() as reading:
        write_atomic(path, "new")
        assert reading.read() == "old"
    assert path.read_text() == "new"


def test_nothing_is_left_beside_the_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", "content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("mode", [PUBLIC, PRIVATE], ids=oct)
def test_a_file_has_the_mode_that_was_asked_for_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    write_atomic(tmp_path / "file", "content", mode)
    assert mode_of(tmp_path / "file") == mode


@pytest.mark.usefixtures("_umask")
@pytest.mark.parametrize("mode", [PUBLIC, PRIVATE], ids=oct)
def test_an_unsynced_file_is_written_once_with_the_mode_that_is_named(tmp_path: Path, mode: int) -> None:
    write_unsynced(tmp_path / "file", "caf\xe9\n", mode)
    with pytest.raises(FileExistsError):
        write_unsynced(tmp_path / "file", "other", mode)
    assert ((tmp_path / "file").read_bytes(), mode_of(tmp_path / "file")) == (b"caf\xc3\xa9\n", mode)


def test_an_unsynced_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write_unsynced(tmp_path / "file", "content")
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_is_public_unless_told_otherwise(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", "content")
    assert mode_of(tmp_path / "file") == 0o644


def test_a_secret_that_replaces_an_open_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "public", PUBLIC)
    write_atomic(path, "secret", PRIVATE)
    assert mode_of(path) == 0o600


def test_a_write_that_fails_leaves_things_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(path, "content")
    assert list(tmp_path.iterdir()) == [path]
    assert list(path.iterdir()) == []


def test_a_write_below_a_missing_directory_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "missing" / "file", "content")


def test_a_file_below_the_working_directory_needs_no_directory_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_atomic(Path("file"), "content")
    assert (tmp_path / "file").read_text() == "content"


@pytest.mark.parametrize("content", ["short", "a content that is longer"])
@pytest.mark.parametrize("plant", ["file", "link"])
def test_what_lies_under_the_names_of_temporary_files_is_left_alone(
    tmp_path: Path, watched: Watched, plant: str, content: str
) -> None:
    write_atomic(tmp_path / "file", "before")
    [used] = watched.temporary
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    # Each name that one could guess: the one of last time, and the one made of the process id.
    for planted in (tmp_path / used, tmp_path / f".file.{os.getpid()}.tmp"):
        planted.symlink_to(victim) if plant == "link" else planted.write_text("untouched")
    write_atomic(tmp_path / "file", content)
    assert (tmp_path / "file").read_text() == content
    assert not (tmp_path / "file").is_symlink()
    assert victim.read_text() == "untouched"
    assert (tmp_path / used).read_text() == (tmp_path / f".file.{os.getpid()}.tmp").read_text() == "untouched"


def test_a_temporary_file_is_hidden_beside_the_one_that_it_becomes(tmp_path: Path, watched: Watched) -> None:
    write_atomic(tmp_path / "file", "content")
    [used] = watched.temporary
    assert used.startswith(".file.")


def test_who_writes_the_same_file_at_the_same_time_does_not_disturb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    sync = os.fsync

    def another_writes_meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        write_atomic(path, "of the other")
        assert path.read_text() == "of the other"
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", another_writes_meanwhile)
    write_atomic(path, "of the first")
    assert path.read_text() == "of the first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("_umask")
def test_no_other_user_can_read_the_temporary_file_before_it_has_its_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[tuple[int, int]] = []
    set_mode = os.fchmod

    def watching(descriptor: int, mode: int) -> None:
        made = os.fstat(descriptor)
        before.append((stat.S_IMODE(made.st_mode) & 0o077, made.st_size))
        set_mode(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", watching)
    write_atomic(tmp_path / "file", "secret", PRIVATE)
    assert before == [(0, 0)]


# --- what a power cut leaves --------------------------------------------------------------------------


def test_the_content_is_on_the_disk_before_the_name_and_then_the_name_is(
    tmp_path: Path, watched: Watched
) -> None:
    write_atomic(tmp_path / "file", "old")
    watched.synced.clear()
    write_atomic(tmp_path / "file", "the new content")
    assert watched.synced == [("file", "the new content", "old"), ("directory", "", "the new content")]


@pytest.mark.parametrize("failure", [OSError("the disk is full"), KeyboardInterrupt()], ids=repr)
def test_a_content_that_cannot_be_synced_leaves_things_as_they_were(
    tmp_path: Path, watched: Watched, failure: BaseException
) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    open_before = open_descriptors()
    watched.failures["file"] = failure
    with pytest.raises(type(failure)):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    assert open_descriptors() == open_before


def test_a_name_that_cannot_be_synced_is_an_error_and_the_file_is_whole(
    tmp_path: Path, watched: Watched
) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    open_before = open_descriptors()
    watched.failures["directory"] = OSError("the disk is gone")
    with pytest.raises(OSError, match="the disk is gone"):
        write_atomic(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
    assert open_descriptors() == open_before


# --- secrets ------------------------------------------------------------------------------------------


def test_a_private_file_is_read(tmp_path: Path) -> None:
    write_atomic(tmp_path / "key", "secret\n", PRIVATE)
    assert read_private(tmp_path / "key") == "secret\n"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o666], ids=oct)
def test_a_secret_that_others_have_any_right_to_is_not_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    write_atomic(path, "secret", mode)
    with pytest.raises(ExposedFileError) as caught:
        read_private(path)
    assert str(caught.value) == f"{path} can be read by others: chmod 600 {path}"
    assert isinstance(caught.value, OSError)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700], ids=oct)
def test_a_secret_that_only_its_owner_has_a_right_to_is_read(tmp_path: Path, mode: int) -> None:
    write_atomic(tmp_path / "key", "secret", mode)
    assert read_private(tmp_path / "key") == "secret"


def test_a_missing_secret_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_private(tmp_path / "key")


# --- what is believed ---------------------------------------------------------------------------------

READERS = pytest.mark.parametrize("read", [read_state, read_private, open_state])


@READERS
@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing"])
def test_a_link_is_not_followed(tmp_path: Path, read: Callable[[Path], object], *, there: bool) -> None:
    if there:
        write_atomic(tmp_path / "key", "secret", PRIVATE)
    (tmp_path / "link").symlink_to(tmp_path / "key")
    with pytest.raises(UntrustedFileError, match=f"{tmp_path / 'link'} is a symbolic link"):
        read(tmp_path / "link")


@pytest.mark.parametrize("flags", [os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_APPEND | os.O_CREAT])
def test_nothing_is_made_or_written_through_a_link(tmp_path: Path, flags: int) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(UntrustedFileError):
        open_state(tmp_path / "link", flags)
    assert not (tmp_path / "victim").exists()


@READERS
def test_a_file_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "key"
    write_atomic(path, "secret", PRIVATE)
    give_away(path, monkeypatch)
    before = open_descriptors()
    with pytest.raises(UntrustedFileError, match=r"belongs to user .* run it as that user"):
        read(path)
    assert open_descriptors() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of root's")
def test_a_file_of_roots_is_used_by_every_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "file", "content")
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    assert read_state(tmp_path / "file") == b"content"


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o620], ids=oct)
def test_a_file_that_others_can_change_is_not_used(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    write_atomic(path, "content", mode)
    with pytest.raises(UntrustedFileError, match=f"chmod go-w {path}"):
        read_state(path)


@pytest.mark.parametrize("read", [read_state, read_private])
def test_a_pipe_in_the_place_of_a_file_is_refused_without_waiting_for_its_other_end(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    os.mkfifo(tmp_path / "pipe", PRIVATE)
    with pytest.raises(UntrustedFileError, match="no regular file: put one there, or remove it"):
        read(tmp_path / "pipe")


def test_a_directory_in_the_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no regular file"):
        read_state(tmp_path)


def test_a_directory_that_is_named_for_a_secret_is_not_to_be_given_another_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        read_named_secret(tmp_path)


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", b"12345")
    assert read_state(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match=r"too large.*file"):
        read_state(tmp_path / "file", 4)


@pytest.mark.usefixtures("_umask")
def test_what_is_made_is_private_whatever_the_umask(tmp_path: Path) -> None:
    os.close(open_state(tmp_path / "file", os.O_RDWR | os.O_CREAT))
    assert mode_of(tmp_path / "file") & 0o077 == 0


def test_a_named_secret_may_lie_behind_a_link_whose_target_must_be_private(tmp_path: Path) -> None:
    write_atomic(tmp_path / "key", "secret", PRIVATE)
    (tmp_path / "link").symlink_to(tmp_path / "key")
    assert read_named_secret(tmp_path / "link") == "secret"
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(ExposedFileError):
        read_named_secret(tmp_path / "link")


def test_a_named_secret_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "key", "secret", PRIVATE)
    give_away(tmp_path / "key", monkeypatch)
    with pytest.raises(UntrustedFileError, match="belongs to user"):
        read_named_secret(tmp_path / "key")


def test_a_named_secret_may_come_through_a_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"secret")
    os.close(writing)
    try:
        assert read_named_secret(Path(f"/proc/self/fd/{reading}")) == "secret"
    finally:
        os.close(reading)


# --- what the operator named, and is no file ----------------------------------------------------------


def held_by_a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def of_8_gib(path: Path) -> None:
    path.touch(PRIVATE)
    os.truncate(path, 8 << 30)


ODD_PLACES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a directory": (Path.mkdir, "Is a directory"),
    "a device without end": (lambda path: path.symlink_to("/dev/zero"), "neither a file nor a pipe: name"),
    "a socket": (held_by_a_socket, "neither a file nor a pipe: name another"),
    "a pipe that another user holds": (lambda path: os.mkfifo(path, PUBLIC), r"a pipe, and not|no regular"),
    "a file of 8 GiB": (of_8_gib, "File too large"),
}


@pytest.mark.parametrize("odd", ODD_PLACES)
@pytest.mark.parametrize(
    "read", [read_given, partial(read_named, max_bytes=1000), read_named_secret, check_loadable]
)
def test_what_is_named_is_read_within_bounds_whatever_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object], odd: str
) -> None:
    put, told = ODD_PLACES[odd]
    put(tmp_path / "named")
    monkeypatch.setattr("schemas.files.PIPE_S", 0.01)
    with pytest.raises(OSError, match=f"{told}|can be read by others|no regular file: put one") as caught:
        read(tmp_path / "named")
    assert str(tmp_path / "named") in str(caught.value)


def test_a_pipe_is_waited_for_and_not_beyond_its_bound(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", PRIVATE)
    with ThreadPoolExecutor() as threads:
        reading = threads.submit(read_given, tmp_path / "pipe")
        (tmp_path / "pipe").write_text("what it holds")
        assert reading.result() == b"what it holds"
    writer = os.open(tmp_path / "pipe", os.O_RDWR)  # which never ends
    with pytest.raises(TimeoutError, match="not at its end after 0 s"):
        read_given(tmp_path / "pipe", wait_s=0)
    os.close(writer)


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o770, 0o777], ids=oct)
def test_a_directory_that_is_open_to_others_is_not_private(tmp_path: Path, mode: int) -> None:
    make_private_directory(tmp_path / "own")
    check_private_directory(tmp_path / "own")
    (tmp_path / "own").chmod(mode)
    with pytest.raises(UntrustedFileError):
        check_private_directory(tmp_path / "own")


def test_a_directory_of_another_user_or_behind_a_link_is_not_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_private_directory(tmp_path / "own")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(UntrustedFileError, match="no directory"):
        check_private_directory(tmp_path / "link")
    give_away(tmp_path / "own", monkeypatch)
    with pytest.raises(UntrustedFileError, match="belongs to user"):
        check_private_directory(tmp_path / "own")


def someone_elses(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let ``directory`` be another user's, and what is made in it this one's; return what is said of it."""
    os.chown(directory, OTHER_OWNER, OTHER_OWNER)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_OWNER + 1)
    return f"{directory} belongs to user {directory.stat().st_uid}, who can change what is in it"


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT], ids=["read", "made"])
@pytest.mark.parametrize("there", [True, False], ids=["there", "taken away"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_no_file_is_believed_missing_or_made_in_another_users_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, *, there: bool
) -> None:
    (ca := tmp_path / "ca").mkdir()
    if there:
        write_atomic(ca / "ledger.jsonl", "{}\n")
    before = list(ca.iterdir())
    said = someone_elses(ca, monkeypatch)
    with pytest.raises(UntrustedFileError, match=said):
        open_state(ca / "ledger.jsonl", flags)
    with pytest.raises(UntrustedFileError, match=said):
        make_private_directory(ca)
    assert list(ca.iterdir()) == before


def test_a_directory_into_which_all_may_put_files_is_not_used(tmp_path: Path) -> None:
    (ca := tmp_path / "ca").mkdir()
    ca.chmod(0o777)
    for use in (lambda: open_state(ca / "ledger.jsonl"), lambda: make_private_directory(ca)):
        with pytest.raises(UntrustedFileError, match=f"{ca} can be changed by others: chmod go-w {ca}"):
            use()
    ca.chmod(0o1777)  # only the owner of a file can take it away
    make_private_directory(ca)


# --- directories --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_umask")
def test_a_private_directory_and_what_was_missing_above_it_is_its_owners_alone(tmp_path: Path) -> None:
    make_private_directory(tmp_path / "a" / "b" / "c")
    assert [mode_of(tmp_path / name) for name in ("a", "a/b", "a/b/c")] == [0o700] * 3


def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o755)
    make_private_directory(there)
    make_private_directory(there / "below")
    assert mode_of(there) == 0o755
    assert mode_of(there / "below") == 0o700


def test_a_relative_directory_is_made_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_private_directory(Path("a/b"))
    assert mode_of(tmp_path / "a" / "b") == 0o700


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_the_place_of_a_directory_is_an_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        make_private_directory(tmp_path / "file" / below)


# --- whose it is that root makes ------------------------------------------------------------------------

SERVICE, GROUP = 54_321, 54_322
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for other users")


@pytest.fixture
def of_a_service(tmp_path: Path) -> Path:
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    os.chown(directory, SERVICE, GROUP)
    return directory


def owner(path: Path) -> tuple[int, int]:
    facts = path.lstat()
    return facts.st_uid, facts.st_gid


@as_root
def test_what_root_makes_belongs_to_the_owner_of_its_directory(of_a_service: Path) -> None:
    make_private_directory(of_a_service / "ca" / "inner")
    write_atomic(of_a_service / "ca" / "root.key", "key", PRIVATE)
    write_unsynced(of_a_service / "ca" / "leaf.pem", "leaf")
    os.close(open_state(of_a_service / "ca" / "ledger.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND))
    made = [of_a_service / "ca", *(of_a_service / "ca").iterdir()]
    assert len(made) == 5
    assert {owner(path) for path in made} == {(SERVICE, GROUP)}
    assert (of_a_service / "ca" / "root.key").stat().st_mode & 0o777 == 0o600


@as_root
def test_what_root_replaces_belongs_to_the_owner_of_its_directory(of_a_service: Path) -> None:
    key = of_a_service / "root.key"
    key.write_text("old")
    write_atomic(key, "new", PRIVATE)
    assert owner(key) == (SERVICE, GROUP)


@as_root
def test_what_root_opens_keeps_its_owner(of_a_service: Path) -> None:
    ledger = of_a_service / "ledger.jsonl"
    ledger.touch(0o600)
    os.close(open_state(ledger, os.O_RDWR | os.O_CREAT | os.O_APPEND))
    assert owner(ledger) == (0, 0)


def test_a_directory_that_its_group_may_enter_shows_the_group_what_is_no_secret(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o750)
    make_private_directory(state / "ca", shown=True)
    make_private_directory(state / "marks")
    for name, secret in (("ca/ledger.jsonl", False), ("join_tokens.jsonl", True)):
        os.close(open_state(state / name, os.O_RDWR | os.O_CREAT, secret=secret))
    names = ("ca", "marks", "ca/ledger.jsonl", "join_tokens.jsonl")
    assert [(state / name).stat().st_mode & 0o777 for name in names] == [0o750, 0o700, 0o640, 0o600]


@as_root
def test_a_member_believes_what_the_owner_of_such_a_directory_has_written_and_no_secret(
    of_a_service: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = of_a_service / "ledger.jsonl"
    write_atomic(ledger, "{}\n")
    write_atomic(of_a_service / "key", "key", PRIVATE)
    monkeypatch.setattr(os, "geteuid", lambda: 54_322)
    with pytest.raises(UntrustedFileError):
        read_state(ledger)
    of_a_service.chmod(0o750)
    assert read_state(ledger) == b"{}\n"
    with pytest.raises(UntrustedFileError):
        read_private(of_a_service / "key")
