"""Whose state a command works on, and as whom: root goes on as the owner of the state directory.

The service could not read what root made there, and its user could put a link where root writes. As the
owner, root can do no more in that directory than the owner can. What the operator has named on the command
line is still the operator's to read and write: ``as_operator``. Must not read a file.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from schemas.files import is_shown_to_group

_ROOT = 0


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
    """Let a process of root go on as the owner of ``directory``; of one that is not there, root is.

    ``for_good``: a daemon, which needs nothing of the operator's any more.
    """
    owner = _owner_of(directory)
    if os.getuid() != _ROOT or owner is None or owner == _ROOT:
        return
    if os.geteuid() != owner:
        group = directory.stat().st_gid
        os.setgroups(_groups_of(owner, group))
        os.setegid(group)
        os.seteuid(owner)
    if for_good:
        group = os.getegid()
        os.seteuid(_ROOT)
        os.setresgid(group, group, group)
        os.setresuid(owner, owner, owner)


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


def sees_as_member(path: Path) -> bool:
    """Return whether ``path`` is in a state directory where this user has the rights of its group alone."""
    for directory in path.parents:
        with suppress(OSError):
            if is_shown_to_group(directory):
                return directory.stat().st_uid != os.geteuid()
    return False


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
