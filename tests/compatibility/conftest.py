"""The versions that must work together: this checkout, and the wheels of the minor versions before it."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.site import Programs

ROOT = Path(__file__).parent.parent.parent
PREVIOUS = tomllib.loads((Path(__file__).parent / "previous.toml").read_text("utf-8"))
_BOUND_S = 60


@pytest.fixture(scope="session")
def current() -> Programs:
    """This checkout's programs."""
    return Programs(ROOT, metadata.version("edge-kubelet"))


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The programs of the previous version's wheel."""
    return _built(tmp_path_factory.mktemp("previous"), PREVIOUS)


@pytest.fixture(scope="session")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The programs of the wheel of the version before that."""
    return _built(tmp_path_factory.mktemp("oldest"), PREVIOUS["oldest"])


def _built(work: Path, version: Mapping[str, Any]) -> Programs:
    """Return the programs of the wheel that is built from the commit of ``version``.

    They run with this environment's dependencies: what the two say to each other is the subject here.
    """
    subprocess.run(
        [sys.executable, "-P", "-m", "hatchling", "build", "--target", "wheel", "--directory", work],
        cwd=sources_of(version, work),
        capture_output=True,
        timeout=_BOUND_S,
        check=True,
    )
    wheel = work / f"edge_kubelet-{version['version']}-py3-none-any.whl"
    shutil.unpack_archive(wheel, work / "programs", format="zip")
    return Programs(work / "programs", version["version"], version["second"])


def sources_of(version: Mapping[str, Any], work: Path) -> Path:
    """Return a directory below ``work`` with the sources of ``version``; a test without them is skipped."""
    if reason := _take_sources(work / "source.tar", version["commit"]):
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    shutil.unpack_archive(work / "source.tar", work / "source", filter="data")
    return work / "source"


def _take_sources(archive: Path, commit: str) -> str | None:
    """Write the sources of ``commit`` to ``archive``; return why that is not possible."""
    git = shutil.which("git")
    if git is None:
        return "not installed: git"
    command = [git, "-C", str(ROOT), "archive", "--output", str(archive), commit]
    taken = subprocess.run(command, capture_output=True, timeout=_BOUND_S, check=False)
    return f"this checkout has no commit {commit}" if taken.returncode != 0 else None
