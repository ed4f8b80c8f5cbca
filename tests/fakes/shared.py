"""The entries of one kind in a file, as relays of a fleet have them in common, without a fleet."""

from collections.abc import Callable
from typing import Any

from relay.state.kinds import KINDS
from relay.state.ledger import Entry, Ledger
from relay.state.merging import Merging, SharedLedger
from schemas.process.logs import make_logger
from schemas.times import SystemClock
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.signer import NOW_MS


def shared(  # noqa: PLR0913 - what a relay gives its ledgers
    kind: str,
    ledger: Ledger[Any],
    now_ms: SystemClock | None = None,
    *,
    issues: bool = False,
    is_endorsed: Callable[[Entry], bool] = lambda _entry: False,
    refused: Callable[[str], None] = lambda _kind: None,
    lines: LogLines | None = None,
) -> SharedLedger:
    (row,) = [row for row in KINDS if row.name == kind]
    log = make_logger("relay", lines or LogLines())
    merging = Merging(
        now_ms or FakeClock(NOW_MS), log, issues=issues, is_endorsed={kind: is_endorsed}, refused=refused
    )
    return SharedLedger(row, ledger, merging)
