"""A new kind of state is a row and a document: it is watched, backed up, restored and compacted.

``test_merging`` has how it is shared.
"""

import errno
import os
from pathlib import Path

import pytest

from relay.cli.backup.commands import restore, save, save_for_another_relay
from relay.pki.authority import CertificateAuthority
from relay.settings.config import StateFiles
from relay.settings.kept import KeptSettings
from relay.state.kinds import KINDS, files_of, shared_ledgers
from relay.state.ledger import WORTH_COMPACTING
from relay.state.merging import Merging, Rule
from relay.state.redemptions import Redemptions
from relay.state.watcher import Applied, watched_files
from schemas.process.logs import make_logger
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.plain_state import pins_by
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS


def test_an_endorsed_kind_without_a_judge_is_refused_when_the_relay_is_composed() -> None:
    kind = pins_by(Rule.ENDORSED)
    files = {kind.file: kind.file.ledger(Path("unused"))}
    with pytest.raises(ValueError, match="which entries of pin are endorsed"):
        shared_ledgers(files, Merging(FakeClock(NOW_MS), make_logger("relay", LogLines())), [kind])


def test_a_row_that_nothing_applies_is_refused_when_the_relay_is_composed() -> None:
    kind = pins_by(Rule.FINAL)
    ledgers = {kind.file: kind.file.ledger(Path("unused"))}
    acts = Applied[object](lambda: None, lambda _: None, lambda _: None)
    with pytest.raises(ValueError, match="pins"):
        watched_files(ledgers, {}, [kind])
    with pytest.raises(KeyError):
        watched_files({}, {kind.file: acts}, [kind])
    (file,) = watched_files(ledgers, {kind.file: acts}, [kind])
    assert (file.name, file.kinds, file.stamp()) == ("pins", ["pin"], (ledgers[kind.file].stamp, None))


@pytest.mark.parametrize("expected", [{"save"}, {"save", "copy"}], ids=["own", "copied"])
def test_it_is_in_the_backup_and_in_another_relays_copy_if_its_row_says_so(
    tmp_path: Path, expected: set[str]
) -> None:
    kinds = (*KINDS, pins_by(Rule.FINAL, copied="copy" in expected))
    state = StateFiles(tmp_path / "relay")
    ca = CertificateAuthority(state.ca, FakeClock(NOW_MS), os.urandom)
    ca.create()
    (state.root / "pins.jsonl").write_text("{}\n")
    archives = {
        "save": save(state, ca, NOW_MS, kinds),
        "copy": save_for_another_relay(state, ca, KeptSettings(), NOW_MS, os.urandom, kinds=kinds),
    }
    for name, archive in archives.items():
        restore(archive, StateFiles(tmp_path / name), kinds)
    assert {name for name in archives if (tmp_path / name / "pins.jsonl").exists()} == expected


def test_a_file_whose_lines_may_leave_is_compacted_once_most_have_ended(tmp_path: Path) -> None:
    file = pins_by(Rule.ORDERED).file
    ledger, reader = file.ledger(tmp_path), file.ledger(tmp_path)
    for number in range(WORTH_COMPACTING):
        with ledger.locked():
            ledger.append({"node_id": NODE_ID, "number": number})
        assert reader.read().by_key[NODE_ID]["number"] == number
    assert len(ledger.path.read_text().splitlines()) == 1
    assert ledger.path.stat().st_mode & 0o777 == 0o600


def test_what_was_appended_holds_where_the_shorter_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ledger = pins_by(Rule.ORDERED).file.ledger(tmp_path)
    monkeypatch.setattr("relay.state.ledger.write_atomic", fail)
    for number in range(WORTH_COMPACTING + 1):
        with ledger.locked():
            ledger.append({"node_id": NODE_ID, "number": number})
    assert ledger.read().by_key[NODE_ID]["number"] == WORTH_COMPACTING


def test_a_line_of_a_clock_that_was_ahead_ends_no_other(tmp_path: Path) -> None:
    redeemed = Redemptions(tmp_path / "redemptions.jsonl", clock := FakeClock(NOW_MS))
    for number in range(2 * WORTH_COMPACTING):
        is_ahead = number == 10
        clock.now_ms += DAY_MS * 700 * is_ahead
        redeemed.claim(f"{number}", "a try", clock() + (DAY_MS if number < 200 else 1))
        clock.now_ms -= DAY_MS * 700 * is_ahead
        clock.advance(1)
    assert set(map(str, range(200))) <= redeemed.ledger.read().claimed.keys()
    assert len(redeemed.ledger.read().claimed) < WORTH_COMPACTING + 200


def test_of_todays_kinds_no_line_leaves_the_file() -> None:
    """An id once issued stays taken, and a revocation stays. Others say nothing more once they have ended."""
    leave = {file.path for file in files_of() if file.lasting is not None}
    assert leave == {"grants.jsonl", "redemptions.jsonl"}
