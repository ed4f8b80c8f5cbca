"""Which kinds this node announces: those that its relay knows, as the last welcome named them.

The list is kept: the manifest reaches relays by the broker before the next welcome. Without one, the relay is
of a version before 0.3, which refuses a manifest with a kind that it does not know, and so loses the node.
Then RFC-0001's kinds are announced, and those of packages, which both operators have named. After a refusal
of that reason it is RFC-0001's alone, until a relay names what it knows. Must not sign or send anything.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from structlog.typing import FilteringBoundLogger

from schemas.files import read_state, write_atomic
from schemas.kinds import RFC_0001, KindRegistry
from schemas.text import printable

_KEPT_AGAIN_MS = 10_000


def read_relay_kinds(file: Path) -> frozenset[str] | None:
    """Return the kinds in ``file``; None if it is missing, or holds no such list."""
    try:
        kinds = json.loads(read_state(file))
    except (FileNotFoundError, ValueError):
        return None
    is_list = isinstance(kinds, list) and all(isinstance(each, str) for each in kinds)
    return frozenset(kinds) if is_list else None


class RelayKinds:
    """What of ``capabilities``, of ``kinds``, is announced. ``file`` keeps the list; None: nothing does.

    It is written every ten seconds at most, with the next welcome that is due: a relay that names others each
    time must not wear the card of a board. ``ticks_ms`` only ever go forward.
    """

    def __init__(
        self,
        capabilities: Sequence[Mapping[str, Any]],
        kinds: KindRegistry,
        file: Path | None,
        ticks_ms: Callable[[], int],
        log: FilteringBoundLogger,
    ) -> None:
        self._offered = capabilities
        self._installed = frozenset(kind.name for kind in kinds)
        self._of_packages = {kind.name for kind in kinds if kind.capability is None}
        self._file = file
        self._log = log
        self._known = self._kept = None if file is None else read_relay_kinds(file)
        self._logged: set[str] = set()
        self._ticks_ms = ticks_ms
        self._keep_again_ms = 0
        self._is_refused = False

    def capabilities(self) -> Sequence[Mapping[str, Any]]:
        """Return the capabilities that are announced."""
        return [each for each in self._offered if self._admits(each["kind"])]

    @property
    def left_out(self) -> set[str]:
        """The kinds that are not announced."""
        return {each["kind"] for each in self._offered} - self._announced()

    def welcomed(self, kinds: Sequence[str] | None) -> bool:
        """Take what a welcome names, None of an older relay; return whether other kinds are announced now."""
        before = self._announced()
        if kinds is not None:
            self._is_refused = False
        self._known = None if kinds is None else self._installed.intersection(kinds)
        if self._known != self._kept and self._ticks_ms() >= self._keep_again_ms:
            self._keep_again_ms = self._ticks_ms() + _KEPT_AGAIN_MS
            self._keep()
        self._log_left_out()
        return self._announced() != before

    def refused(self) -> bool:
        """Announce RFC-0001's kinds alone; return whether that changes anything."""
        before = self._announced()
        self._is_refused = True
        self._log_left_out()
        return self._announced() != before

    def _log_left_out(self) -> None:
        """Log once what is not announced: at a welcome, before which the relay may well know it."""
        left_out = self.left_out
        if left_out - self._logged:
            self._log.warning("kinds not announced: the relay does not know them", kinds=sorted(left_out))
        self._logged = left_out

    def _announced(self) -> set[str]:
        return {name for each in self._offered if self._admits(name := each["kind"])}

    def _admits(self, kind: str) -> bool:
        if kind in RFC_0001:
            return True
        if self._is_refused:
            return False
        return kind in (self._of_packages if self._known is None else self._known)

    def _keep(self) -> None:
        if self._file is None:
            return
        try:
            if self._known is None:
                self._file.unlink(missing_ok=True)
            else:
                write_atomic(self._file, json.dumps(sorted(self._known)) + "\n")
            self._kept = self._known
        except OSError as error:
            self._log.warning("what the relay knows is not kept", reason=printable(str(error)))
