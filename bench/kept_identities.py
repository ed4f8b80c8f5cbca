"""Identities of mock nodes that are made once, and kept for further runs: making thousands takes minutes."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from relay.cli.demo.local_system import TENANT
from relay.pki.authority import CertificateAuthority
from relay.settings.config import StateFiles
from relay.settings.environment import now_ms
from schemas.files import make_private_directory

_MIN_LEFT_MS = 86_400_000
_VALID_MS = 80 * 86_400_000


def kept_identities(directory: Path, groups: Mapping[str, int]) -> None:
    """Have so many identities of each group below ``directory``/mocks, of the CA of ``directory``/relay.

    They are made if they are not there. Nothing else is left in ``directory``. The CA of each run is a copy
    of the one that was made, so that what a run has revoked is not revoked in the next.
    """
    made, mocks, kept = directory / "ca", directory / "mocks", directory / "kept.json"
    if not _is_kept(kept, groups):
        make_new(directory)
        ca = CertificateAuthority(made, now_ms, os.urandom)
        ca.create()
        for group, count in groups.items():
            ca.issue_mock(count, mocks / group, TENANT)
        told = {"groups": dict(groups), "until_ms": now_ms() + _VALID_MS}
        kept.write_text(json.dumps(told), "utf-8")
    for path in directory.iterdir():
        if path not in {made, mocks, kept}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    state = StateFiles(directory / "relay")
    make_private_directory(state.root)
    shutil.copytree(made, state.ca)


def make_new(directory: Path) -> None:
    """Make ``directory``, empty."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _is_kept(file: Path, groups: Mapping[str, int]) -> bool:
    try:
        kept = json.loads(file.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return bool(kept["groups"] == dict(groups) and kept["until_ms"] > now_ms() + _MIN_LEFT_MS)
