"""The interface of each package that the relay assembles. Must not know any of them."""

from collections.abc import Mapping


class Part:
    """One assembled package. It overrides what applies to it."""

    async def run(self) -> None:
        """Do its background work until cancelled; return at once where there is none."""

    async def close(self) -> None:
        """Finish pending work after the last request, and close files."""

    def ready(self) -> Mapping[str, bool]:
        """Return the conditions that calls need of it, by the name that ``/readyz`` shows."""
        return {}
