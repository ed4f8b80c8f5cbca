"""What was redeemed at the relays of a fleet, codes and refresh tokens: each once.

| action | members besides ``ts_ms`` |
|---|---|
| `claim` | `what`: a digest of what is redeemed; `by`: names the try; `expires_at_ms` |
| `count` | the same, as the stream that the relays share has it: the first of all tries |

A relay that was restored from an older backup does not know by its own files what was redeemed since, and of
two that were restored from one each would redeem; the stream has one entry for each ``what``. Must not know
what a digest is of.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from relay.state.ledger import Entry, Ledger, LedgerState
from relay.state.merging import SharedForm
from schemas.times import SystemClock

_ACTIONS = ("claim", "count")


class _Try(NamedTuple):
    by: str
    expires_at_ms: int


class RedemptionState(LedgerState):
    """The tries of this relay, and those that count, by what is redeemed."""

    def __init__(self) -> None:
        self.claimed: dict[str, _Try] = {}
        self.counted: dict[str, _Try] = {}
        self.last_ms = 0

    def apply(self, entry: Entry) -> None:
        one = _Try(str(entry["by"]), int(entry["expires_at_ms"]))
        self.last_ms = int(entry["ts_ms"])
        match entry["action"]:
            case "claim":
                self.claimed.setdefault(entry["what"], one)
            case "count":
                self.counted.setdefault(entry["what"], one)
            case other:
                raise ValueError(other)

    def lasting(self) -> Sequence[Entry]:
        """Return what must stay in the file: what has expired cannot be redeemed."""
        return [
            _line(action, what, one, self.last_ms)
            for action, tries in zip(_ACTIONS, (self.claimed, self.counted), strict=True)
            for what, one in tries.items()
            if one.expires_at_ms > self.last_ms
        ]


def _line(action: str, what: str, one: _Try, now_ms: int) -> Entry:
    return {"action": action, "ts_ms": now_ms, "what": what, **one._asdict()}


class Redemptions:
    """The list in ``path``, which is made with the first entry.

    Everything raises LedgerError if the file is damaged, and OSError if it cannot be used.
    """

    def __init__(self, path: Path, now_ms: SystemClock) -> None:
        self.ledger = Ledger(path, RedemptionState(), lasting=RedemptionState.lasting)
        self._now_ms = now_ms

    def claim(self, what: str, by: str, expires_at_ms: int) -> bool | None:
        """Claim ``what`` for this relay; return whether its claim counts, or None while none does.

        The claim that it has made before is the one that may count, so that a try can be repeated.
        """
        state = self.ledger.read()
        if what not in state.claimed and what not in state.counted:
            with self.ledger.locked() as state:
                if what not in state.claimed:
                    one = _Try(by, expires_at_ms)
                    self.ledger.append(_line("claim", what, one, self._now_ms()))
        counted = state.counted.get(what)
        return None if counted is None else counted == state.claimed.get(what)


# --- as the relays of a fleet have them in common ------------------------------------------------------


def _all(state: RedemptionState) -> Mapping[str, Entry]:
    return {what: {"what": what, **one._asdict()} for what, one in (state.claimed | state.counted).items()}


REDEMPTIONS = SharedForm(
    key_of=lambda entry: str(entry["what"]),
    entries=_all,
    has=lambda state, entry: entry["what"] in state.counted,
    line=lambda _state, entry, now_ms: {"action": "count", "ts_ms": now_ms, **entry},
    end_ms_of=lambda entry: int(entry["expires_at_ms"]),
    holder_takes=True,
)
