"""The home directory of the user who runs a command: a service's user, or a container's, may have none.

Must not make it.
"""

from pathlib import Path

from schemas.error_roots import ConfigError, OperatorError


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


class NoStateDirError(ConfigError):
    """No state directory is named, and there is no home directory for the usual one."""

    def __init__(self) -> None:
        super().__init__(["name the state directory with --state-dir: this user has no home directory"])
