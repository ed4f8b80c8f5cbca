"""The interface of each package that the relay assembles. Must not know any of them."""

import asyncio
from collections.abc import Mapping
from typing import Any

from schemas.health import Health, Loop


class Part:
    """One assembled package. It overrides what applies to it."""

    async def run(self) -> None:
        """Do its background work until cancelled."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Finish pending work after the last request, and close files."""

    def health(self) -> Mapping[str, Health]:
        """Return the health of its subsystems that calls need, by the name that ``/readyz`` shows."""
        return {}

    def status(self) -> Mapping[str, Any]:
        """Return what ``relay status`` shows of it besides its health; no secret."""
        return {}

    def loops(self) -> Mapping[str, Loop]:
        """Return the loops without whose progress the relay should be restarted."""
        return {}
