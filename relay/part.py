"""What the relay's composition asks of each wing that it assembles. Must not know any wing."""

from collections.abc import Mapping


class Part:
    """One assembled wing. A wing overrides what applies to it."""

    async def run(self) -> None:
        """Do the wing's background work until cancelled; return at once where there is none."""

    async def close(self) -> None:
        """Finish what must be finished after the last request, and let go of files."""

    def ready(self) -> Mapping[str, bool]:
        """Return what calls need of this wing in order to flow, by the name that ``/readyz`` shows."""
        return {}
