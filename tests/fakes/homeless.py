"""A user who has no home directory, as in a container that runs as an arbitrary user."""

import os
import pwd
from typing import NoReturn

import pytest


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process one of such a user, who is not root."""

    def no_entry(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
