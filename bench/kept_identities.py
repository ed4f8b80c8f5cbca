"""Identities of mock nodes that are made once, and kept for further runs: making thousands takes minutes."""

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from relay.config import StateFiles
from relay.demo.local_system import TENANT
from relay.pki.authority import CertificateAuthority

_MIN_LEFT_MS = 86_400_000
_VALID_MS = 80 * 86_400_000


def kept_identities(directory: Path, groups: Mapping[str, int]) -> None:
    """Have so many identities of each group below ``directory``/mocks, of the CA of ``directory``/relay.

    They are made if they are not there. Nothing else is left in ``directory``.
    """
    if not _is_kept(directory, groups):
        make_new(directory)
        ca = CertificateAuthority(StateFiles(directory / "relay").ca, _now_ms, os.urandom)
        ca.create()
        for group, count in groups.items():
            ca.issue_mock(count, directory / "mocks" / group, TENANT)
        kept = {"groups": dict(groups), "until_ms": _now_ms() + _VALID_MS}
        (directory / "kept.json").write_text(json.dumps(kept), "utf-8")
    state = StateFiles(directory / "relay")
    keep = {directory / "mocks", directory / "kept.json", state.root, state.ca}
    for path in (*directory.iterdir(), *state.root.iterdir()):
        if path not in keep:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def make_new(directory: Path) -> None:
    """Make ``directory``, empty."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _is_kept(directory: Path, groups: Mapping[str, int]) -> bool:
    try:
        kept = json.loads((directory / "kept.json").read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return bool(kept["groups"] == dict(groups) and kept["until_ms"] > _now_ms() + _MIN_LEFT_MS)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
