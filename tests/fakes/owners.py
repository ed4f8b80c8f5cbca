"""A file of another user: by ``chown`` where the tests run as root, else by another effective user id."""

import os
from pathlib import Path

import pytest

OTHER_OWNER = 54_321
"""A user that is neither this one nor root."""


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``path`` belong to another user than the one that runs."""
    if os.geteuid() == 0:
        os.chown(path, OTHER_OWNER, OTHER_OWNER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER_OWNER)
