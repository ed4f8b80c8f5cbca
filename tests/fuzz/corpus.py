"""The inputs that are kept in git: a few of each target, out of all that led a run to new code.

Must not be edited by hand, but for an input that a run has found a fault with, which is never removed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

KEPT: Final = Path(__file__).parent / "corpus"
MAX_BYTES: Final = 200 * 1024
"""Of all of them together."""
FOUND: Final = "found-"
"""How the name of an input begins that a fault was found with."""

_MAX_BYTES_OF_ONE_TARGET: Final = 3072
_MAX_FILES_OF_ONE_TARGET: Final = 16


def inputs_of(target: str) -> list[Path]:
    directory = KEPT / target
    return sorted(directory.iterdir()) if directory.is_dir() else []


def keep(found: Path, targets: Sequence[str]) -> int:
    """Choose anew what is kept for ``targets``, out of that and of what runs have left below ``found``.

    Return how many inputs are kept.
    """
    return sum(_keep(found / target, target) for target in targets)


def _keep(found: Path, target: str) -> int:
    kept = KEPT / target
    kept.mkdir(parents=True, exist_ok=True)
    # By name: libFuzzer names an input by its digest.
    inputs = {file.name: file.read_bytes() for file in (*kept.iterdir(), *_files_in(found))}
    free = {name: data for name, data in inputs.items() if not name.startswith(FOUND)}
    chosen = _within_bounds(sorted(free, key=lambda name: (len(free[name]), name)), free)
    for name in free:
        (kept / name).unlink(missing_ok=True)
    for name in chosen:
        (kept / name).write_bytes(free[name])
    return sum(1 for _ in kept.iterdir())


def _files_in(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _within_bounds(names: Sequence[str], inputs: Mapping[str, bytes]) -> list[str]:
    """Return some of ``names``, which are sorted by size: evenly, so that not only the smallest are kept."""
    step = max(1, len(names) // _MAX_FILES_OF_ONE_TARGET)
    chosen, size = [], 0
    for name in names[::step][:_MAX_FILES_OF_ONE_TARGET]:
        size += len(inputs[name])
        if size > _MAX_BYTES_OF_ONE_TARGET:
            break
        chosen.append(name)
    return chosen
