"""How state is opened, read and written: the one place that decides which files are believed.

A file of the state directory is opened without following a link, and is used only if it is a regular file,
belongs to the user that the program runs as or to root, and cannot be changed by others; a secret cannot be
read by others either. What is checked is what was opened, not its name. Its directory is not another user's
either, who could take a revocation away or bring an old file back. Root does not use what belongs to
another user: that user could change it, or put a link in its place, while root reads and writes. What root
makes belongs to the owner of its directory: a service that runs as that user could not read it otherwise.

A directory that is open to its group, and to no others, shows the group what is no secret: files that are
opened to be written become readable by the group, and its members believe files of the directory's owner.

A secret that the operator names (a TLS key, a file with a token) may lie behind a link, as certificate tools
lay them, or come through a pipe; owner and mode are checked all the same. What is named is read up to a bound
of bytes and of time, whatever lies there. Must not know what a file holds.
"""

import errno
import os
import select
import stat
import time
from contextlib import suppress
from pathlib import Path

from schemas.error_roots import StateError

PRIVATE = 0o600
PUBLIC = 0o644
PRIVATE_DIRECTORY = 0o700
MAX_STATE_BYTES = 1 << 20
"""More than any file holds that is read as a whole."""

MAX_SOCKET_PATH_BYTES = 107
"""What the kernel's address of a Unix socket holds, without its last byte."""

MEMBERS_READ = "its group sees what is no secret, and changes nothing: run this as root, with sudo"
"""What a member of the group of a state directory is told where its rights do not suffice."""

PIPE_S = 60.0
"""How long a pipe that the operator named may take: its writer may have to ask for a passphrase."""

_PIECE_BYTES = 1 << 16
_MAX_LOADED_BYTES = 1 << 24
_OTHERS = 0o077
_FOR_THE_GROUP = 0o640
_GROUP_DIRECTORY = 0o750
_GROUP_ENTERS = 0o050
_OTHERS_WRITE = 0o022
_ROOT = 0


class UntrustedFileError(StateError, PermissionError):
    """A file is not used, because another user may have put it there; the text states what to do."""


class ExposedFileError(UntrustedFileError):
    """A secret lies in a file that others can read."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} can be read by others: chmod 600 {path}")


def open_state(path: Path, flags: int = os.O_RDONLY, *, secret: bool = False) -> int:
    """Open a file of the state directory, and return its descriptor; what ``flags`` create is private.

    Never with ``O_TRUNC``: the file would be emptied before it is looked at.

    Raises:
        UntrustedFileError: it is a link or no regular file, it or its directory belongs to another user, or
            others can change it.
        ExposedFileError: ``secret``, and others have any right to it.
        OSError: it cannot be opened.
    """
    # First: a file that is missing says something too, and none is left there.
    _check_state_directory(path.parent)
    # Without blocking: a pipe in the file's place must be refused, and not waited for.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor, is_new = _opened(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedFileError(f"{path} is a symbolic link: no state is behind one") from None
        raise
    try:
        facts = os.fstat(descriptor)
        check_state(path, facts, secret=secret)
        if is_new:
            _give_to_owner_of(path.parent, descriptor)
        is_own = facts.st_uid == os.geteuid()
        if flags & os.O_CREAT and is_own and not secret and is_shown_to_group(path.parent):
            os.fchmod(descriptor, _FOR_THE_GROUP)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _opened(path: Path, flags: int) -> tuple[int, bool]:
    """Return a descriptor, and whether the file is new, as far as ``flags`` create one."""
    if flags & os.O_CREAT:
        with suppress(FileExistsError):
            return os.open(path, flags | os.O_EXCL, PRIVATE), True
    return os.open(path, flags, PRIVATE), False


def _give_to_owner_of(directory: Path, descriptor: int) -> None:
    """Give what this program has just made in ``directory`` to the directory's owner. Only root can."""
    if os.geteuid() == _ROOT:
        owner = directory.stat()
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


def fits_socket(path: Path) -> bool:
    """Return whether ``path`` is short enough for a Unix socket."""
    return len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES


def is_shown_to_group(directory: Path) -> bool:
    """Return whether ``directory`` is open to its group, and to no others."""
    return directory.stat().st_mode & _OTHERS == _GROUP_ENTERS


def sees_as_member(path: Path) -> bool:
    """Return whether ``path`` is in a state directory where this user has the rights of its group alone."""
    for directory in path.parents:
        with suppress(OSError):
            if is_shown_to_group(directory):
                return directory.stat().st_uid != os.geteuid()
    return False


def os_error_text(error: OSError) -> str:
    """Return what a call of the system failed for, and with which file, without the number of the error."""
    text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    return f"{text}: {MEMBERS_READ}" if is_kept_from_member(error) else text


def is_kept_from_member(error: OSError) -> bool:
    """Return whether it takes more than the rights of the group of a state directory."""
    return error.errno == errno.EACCES and bool(error.filename) and sees_as_member(Path(error.filename))


def mode_without_secrets(directory: Path) -> int:
    """Return the mode of a file in ``directory`` that holds no secret, as ``open_state`` makes it."""
    return _FOR_THE_GROUP if is_shown_to_group(directory) else PRIVATE


def read_state(path: Path, max_bytes: int = MAX_STATE_BYTES) -> bytes:
    """Return what a file of the state directory holds.

    Raises:
        OSError: as ``open_state``, or it is longer than ``max_bytes``.
    """
    return _read(path, open_state(path), max_bytes)


def read_private(path: Path) -> str:
    """Return the text of a secret of the state directory.

    Raises:
        OSError: as ``open_state``; an ExposedFileError if group or others have any right to it.
    """
    return _read(path, open_state(path, secret=True), MAX_STATE_BYTES).decode("utf-8")


def read_named(path: Path, max_bytes: int) -> bytes:
    """Return what a file holds that the operator named and no other user can change; a link is followed.

    Raises:
        UntrustedFileError: it is no regular file, belongs to another user, or others can change it.
        OSError: it cannot be read, or is longer than ``max_bytes``.
    """
    descriptor = _open_named(path)
    try:
        facts = os.fstat(descriptor)
        _check_regular(path, facts)
        _check(path, facts, secret=False)
    except BaseException:
        os.close(descriptor)
        raise
    return _read(path, descriptor, max_bytes)


def read_given(path: Path, max_bytes: int = MAX_STATE_BYTES, *, wait_s: float | None = None) -> bytes:
    """Return what a file or a pipe holds that the operator named and any user may own: it is no secret.

    Raises:
        UntrustedFileError: it is neither.
        OSError: it cannot be read, is longer than ``max_bytes``, or is a pipe and takes more than ``wait_s``.
    """
    return _read(path, _open_named(path), max_bytes, wait_s)


def check_loadable(path: Path) -> None:
    """See that a library that opens ``path`` by its name, and reads all of it, comes to an end.

    Raises:
        UntrustedFileError: it is no regular file.
        OSError: it is not there, or too large.
    """
    facts = path.stat()
    _check_regular(path, facts)
    if facts.st_size > _MAX_LOADED_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))


def _open_named(path: Path) -> int:
    try:
        # Without blocking: a pipe would be waited for here, before it is known whose it is.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise UntrustedFileError(f"{path} is neither a file nor a pipe: name another") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISFIFO(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise UntrustedFileError(f"{path} is neither a file nor a pipe: name another")


def read_named_secret(path: Path) -> str:
    """Return the text of a secret's file that the operator named: a link is followed, a pipe is read.

    Raises:
        OSError: as ``read_private``.
    """
    return read_named_private(path, MAX_STATE_BYTES).decode("utf-8")


def read_named_private(path: Path, max_bytes: int) -> bytes:
    """Return what a file holds that the operator named and only its owner may read.

    Raises:
        OSError: as ``read_private``, or it is longer than ``max_bytes``.
    """
    descriptor = _open_named(path)
    try:
        _check(path, os.fstat(descriptor), secret=True)
    except BaseException:
        os.close(descriptor)
        raise
    return _read(path, descriptor, max_bytes)


def check_state(path: Path, facts: os.stat_result, *, secret: bool = False) -> None:
    """Check again what ``open_state`` has opened and the program keeps open: its ``facts`` may have changed.

    Raises:
        UntrustedFileError, ExposedFileError: as ``open_state``.
    """
    _check_regular(path, facts)
    _check(path, facts, secret=secret, believed=_ROOT if secret else _shown_by(path.parent))


def check_secret(path: Path) -> None:
    """See that a secret of the state directory is for its owner alone, also as a member who may not read it.

    Raises:
        UntrustedFileError, ExposedFileError: as ``open_state``.
        OSError: it cannot be seen.
    """
    facts = path.stat()
    _check_regular(path, facts)
    _check(path, facts, secret=True, believed=_shown_by(path.parent))


def _shown_by(directory: Path) -> int:
    """Return the user that members of a group believe in ``directory``; root if it shows them nothing."""
    return directory.stat().st_uid if is_shown_to_group(directory) else _ROOT


def _check_regular(path: Path, facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise UntrustedFileError(f"{path} is no regular file: put one there, or remove it")


def check_unchangeable(path: Path) -> None:
    """See that no other user can change the file or directory ``path``; a link is followed.

    Raises:
        UntrustedFileError: it belongs to another user, or others can change it.
        OSError: it is not there.
    """
    _check(path, path.stat(), secret=False)


def check_directory(path: Path) -> None:
    """See that no other user can put files into the directory ``path``, or take some away.

    Raises:
        UntrustedFileError: one can.
        OSError: it is not there.
    """
    _check_place(path, path.stat(), believed=_ROOT)


def _check_state_directory(path: Path) -> None:
    """Check the directory of a state file. Its owner is believed by its group, and by root, file by file."""
    try:
        facts = path.stat()
    except OSError:
        return  # opening says it, with the file's name
    is_believed = os.geteuid() == _ROOT or is_shown_to_group(path)
    _check_place(path, facts, believed=facts.st_uid if is_believed else _ROOT)


def _check_place(path: Path, facts: os.stat_result, *, believed: int) -> None:
    user = os.geteuid()
    if facts.st_uid not in {user, _ROOT, believed}:
        raise UntrustedFileError(
            f"{path} belongs to user {facts.st_uid}, who can change what is in it: "
            f"move it away, or give it to user {user}"
        )
    if facts.st_mode & stat.S_IWOTH and not facts.st_mode & stat.S_ISVTX:
        raise UntrustedFileError(f"{path} can be changed by others: chmod go-w {path}")


def _check(path: Path, facts: os.stat_result, *, secret: bool, believed: int = _ROOT) -> None:
    """Check owner and mode; ``believed`` is a user whose files are read besides one's own and root's."""
    user = os.geteuid()
    if facts.st_uid not in {user, _ROOT} and (user == _ROOT or facts.st_uid != believed):
        raise UntrustedFileError(
            f"{path} belongs to user {facts.st_uid}, and this runs as user {user}: run it as that user"
        )
    rights = stat.S_IMODE(facts.st_mode)
    if secret and rights & _OTHERS:
        raise ExposedFileError(path)
    if rights & _OTHERS_WRITE:
        raise UntrustedFileError(f"{path} can be changed by others: chmod go-w {path}")


def _read(path: Path, descriptor: int, max_bytes: int, wait_s: float | None = None) -> bytes:
    data = bytearray()
    wait_s = PIPE_S if wait_s is None else wait_s
    ready, until = select.poll(), time.monotonic() + wait_s
    ready.register(descriptor, select.POLLIN)
    try:
        # In pieces: one read of ``max_bytes`` would take that much memory for a file of one line.
        while len(data) <= max_bytes:
            # A regular file is always ready.
            if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError(
                    errno.ETIMEDOUT, f"a pipe, and not at its end after {wait_s:g} s", str(path)
                )
            if not (piece := os.read(descriptor, _PIECE_BYTES)):
                break
            data += piece
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return bytes(data)


def write_atomic(path: Path, content: str | bytes, mode: int = PUBLIC) -> None:
    """Write ``content`` to ``path`` so that it is there whole, or as it was before, whatever happens."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    import tempfile  # noqa: PLC0415 - most commands only read

    # mkstemp makes a file that is new, ours alone, and no link that another user made.
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # not the temporary name
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            _give_to_owner_of(path.parent, descriptor)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_unsynced(path: Path, content: str, mode: int = PUBLIC) -> None:
    """Write ``content`` to ``path``, which must not exist yet. A power cut may lose it, or leave it empty.

    For what can be made again, by the thousands: a sync of each file takes longer than all the rest.

    Raises:
        OSError: it exists, or cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, PRIVATE), "wb") as file:
        os.fchmod(file.fileno(), mode)
        _give_to_owner_of(path.parent, file.fileno())
        file.write(content.encode("utf-8"))


def sync_directory(path: Path) -> None:
    """Make the new name itself survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private_directory(path: Path, *, shown: bool = False) -> None:
    """Make ``path``, and what is missing above it, readable by its owner alone.

    ``shown``: the group may enter it, if it may enter the directory above.

    Raises:
        UntrustedFileError: ``path`` is there, and another user can put files into it.
        OSError: it cannot be made.
    """
    # One by one: `parents=True` would make those above with the default mode.
    for directory in (*reversed(path.parents), path):
        if directory.is_dir():
            if directory == path:
                _check_state_directory(path)
            continue
        directory.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _give_to_owner_of(directory.parent, descriptor)
            if shown and is_shown_to_group(directory.parent):
                os.fchmod(descriptor, _GROUP_DIRECTORY)
        finally:
            os.close(descriptor)


def check_private_directory(path: Path) -> None:
    """See that ``path`` is a directory into which only this user can put files, and not a link to one.

    Raises:
        UntrustedFileError: it is something else.
        OSError: it is not there.
    """
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise UntrustedFileError(f"{path} is no directory: remove it")
    _check(path, facts, secret=False)
    if stat.S_IMODE(facts.st_mode) & _OTHERS:
        raise UntrustedFileError(f"{path} is open to others: chmod 700 {path}")
