"""Whose state a command works on, and as whom: root goes on as the owner of the state directory.

The service could not read what root made there, and its user could put a link where root writes. As the
owner, root can do no more in that directory than the owner can. The same holds for a directory that another
user could exchange, since it lies in one of theirs: root goes on as that user. What the operator has named on
the command line is still the operator's to read and write: ``as_operator``. Its user may have no home
directory. Must not read a file.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from schemas.error_roots import OperatorError

_ROOT = 0
_UNKNOWN = 65_534
"""What a user namespace, or a network's file system, shows of a user that it does not have."""


def usual_directory(service: Path, own: Path | None) -> Path | None:
    """Return the state directory of a command that is told none; None if this user has none.

    It is that of the service for root, for the service's user, and for a member of its group who has no
    ``own`` one.
    """
    if os.getuid() == _ROOT or _owner_of(service) == os.getuid():
        return service
    has_own = own is not None and os.access(own, os.F_OK)
    return service if not has_own and os.access(service, os.R_OK | os.X_OK) else own


def act_as_owner_of(directory: Path, *, for_good: bool = False) -> None:
    """Let a process of root go on as the owner of ``directory``.

    If that is root, or if the directory is not there, root goes on as the first other user on the way to it.

    ``for_good``: a daemon, which needs nothing of the operator's any more.
    """
    # Looked at once: between two looks its place could be taken by a directory with another group.
    facts = _of_another_user(directory) if os.getuid() == _ROOT else None
    if facts is None:
        return
    if os.geteuid() != facts.st_uid:
        os.setgroups(_groups_of(facts.st_uid, facts.st_gid))
        os.setegid(facts.st_gid)
        os.seteuid(facts.st_uid)
    if for_good:
        user, group = os.geteuid(), os.getegid()
        os.seteuid(_ROOT)
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)


@contextmanager
def as_operator() -> Iterator[None]:
    """Run the block as the user that typed the command, for files that are named on the command line."""
    user, group = os.geteuid(), os.getegid()
    os.seteuid(os.getuid())
    os.setegid(os.getgid())
    try:
        yield
    finally:
        os.setegid(group)
        os.seteuid(user)


def _of_another_user(directory: Path) -> os.stat_result | None:
    """Return the facts of ``directory``, or else of the first on the way to it, that is not root's."""
    named, real = directory.absolute(), Path(os.path.realpath(directory))
    with suppress(OSError):
        if (facts := directory.stat()).st_uid != _ROOT:
            return facts
    for place in (place for path in (named, real) for place in (*reversed(path.parents), path)):
        with suppress(OSError):
            if (facts := place.lstat()).st_uid not in {_ROOT, _UNKNOWN}:
                return facts
    return None


def _owner_of(directory: Path) -> int | None:
    """Return the number of the owner; None if the directory is not there, or this user may not see it."""
    try:
        return directory.stat().st_uid
    except OSError:
        return None


def _groups_of(user: int, group: int) -> list[int]:
    import pwd  # noqa: PLC0415 - Unix alone has it, and the client's commands run elsewhere too

    try:
        return os.getgrouplist(pwd.getpwuid(user).pw_name, group)
    except KeyError:
        return [group]


def home_directory() -> Path | None:
    """Return it; None if HOME is not set and this system has no entry for the user."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def needed_home_directory() -> Path:
    """Return it.

    Raises:
        OperatorError: there is none.
    """
    home = home_directory()
    if home is None:
        raise OperatorError("set HOME: this user has no home directory")
    return home
