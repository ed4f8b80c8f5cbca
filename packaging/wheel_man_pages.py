"""Puts the man pages that ``make man`` has written into the wheel, as ``share/man/man1``.

A hook of hatchling. Must not make them: that takes the programs' dependencies, which a build does without.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManPages(BuildHookInterface):  # type: ignore[type-arg]  # the library's own parameter says nothing here
    """Adds the pages, if there are any."""

    def initialize(self, _version: str, build_data: dict[str, Any]) -> None:
        """Add each page of ``build/man`` to what is installed."""
        for page in sorted(Path(self.root, "build", "man").glob("*.1")):
            build_data["shared_data"][str(page)] = f"share/man/man1/{page.name}"
