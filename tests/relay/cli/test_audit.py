"""``relay audit``."""

import asyncio
import hashlib
import json
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from relay.audit.retention import REMOVED_EVENT, next_removal
from relay.cli.audit import app
from relay.settings.config import AuditKeep
from tests.fakes.audits import LineLog, WrittenAudit
from tests.fakes.clock import FakeClock
from tests.fakes.command_lines import RUN
from tests.fakes.relay_command import RelayCommand as Relay
from tests.fakes.signer import NOW_MS

HOSTILE = "\x1b[2J\u202e"


@pytest.fixture
def audit(state: Path) -> Iterator[WrittenAudit]:
    """An audit of three lines, and a relay that goes on writing it."""
    state.mkdir()
    audit = WrittenAudit(state)
    audit.write(3)
    yield audit
    audit.close()


def test_audit_verify_says_what_stands_there(bare: Relay, audit: WrittenAudit) -> None:
    head = audit.write()
    outcome = bare("audit", "verify")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("audit    intact\n")
    assert f"head     {head}\n" in outcome.out
    facts = json.loads(bare("audit", "verify", "--json").out)
    assert (facts["intact"], facts["lines"], facts["head"], facts["broken"]) == (True, 4, head, None)


def test_audit_verify_exits_1_and_names_the_line_when_the_chain_is_broken(
    bare: Relay, audit: WrittenAudit
) -> None:
    audit.change(lambda lines: lines.pop(1))
    outcome = bare("audit", "verify")
    assert (outcome.code, outcome.err) == (1, "")
    assert "broken   audit.jsonl line 2: " in outcome.out
    facts = json.loads(bare("audit", "verify", "--json").out)
    assert (facts["intact"], facts["broken"]["file"], facts["broken"]["line"]) == (False, "audit.jsonl", 2)


def test_audit_verify_proves_with_a_hash_noted_earlier_that_nothing_was_cut_off(
    bare: Relay, audit: WrittenAudit
) -> None:
    head = audit.write()
    assert bare("audit", "verify", "--expect", head).code == 0
    audit.change(lambda lines: lines.pop())
    outcome = bare("audit", "verify", "--expect", head)
    assert outcome.code == 1
    assert "cut off" in outcome.out


def test_audit_verify_says_when_the_line_of_an_older_head_was_removed(
    bare: Relay, audit: WrittenAudit
) -> None:
    noted = audit.write(2)
    assert bare("audit", "verify").code == 0
    audit.rotate()
    audit.write(2)
    removal = next_removal(audit.path, AuditKeep(max_age_ms=1), audit.clock() + 10**6)
    assert removal is not None
    first = audit.files[0].read_bytes().splitlines()[0]
    audit.write_facts(
        event=REMOVED_EVENT, file=removal.file.name, head=removal.head, until_ms=removal.until_ms
    )
    removal.file.unlink()
    older = hashlib.sha256(first).hexdigest()
    unsaid = bare("audit", "verify", "--expect", older)
    assert unsaid.code == 1
    assert "if it was noted before, name --noted" in unsaid.out
    said = bare("audit", "verify", "--expect", older, "--noted", "2025-10-09T08:00")
    assert said.code == 0
    assert "removed  the line with the expected hash, on 2025-" in said.out
    assert bare("audit", "verify", "--expect", noted).code == 0
    assert bare("audit", "verify", "--noted", "2h").code == 2
    assert bare("audit", "verify", "--expect", older, "--noted", "soon").code == 2


@pytest.mark.parametrize(
    "lose",
    [
        pytest.param(lambda audit: audit.change(lambda lines: lines.pop()), id="the last line is cut off"),
        pytest.param(lambda audit: audit.change(lambda lines: lines.clear()), id="it was emptied"),
        pytest.param(lambda audit: audit.path.unlink(), id="a file is gone"),
    ],
)
def test_audit_verify_exits_4_when_what_it_verified_the_last_time_is_lost(
    bare: Relay, audit: WrittenAudit, state: Path, lose: Callable[[WrittenAudit], object]
) -> None:
    audit.rotate()
    audit.write(2)
    assert bare("audit", "verify").code == 0
    assert bare("audit", "verify").code == 0
    whole = audit.path.read_bytes()
    lose(audit)
    outcome = bare("audit", "verify")
    assert (outcome.code, outcome.err) == (4, "")
    assert outcome.out.startswith("audit    NOT INTACT\nmissing  the newest line of the last verification")
    assert bare("audit", "verify").code == 4  # and reported again
    facts = json.loads(bare("audit", "verify", "--json").out)
    assert (facts["intact"], facts["last_verified"], facts["broken"]) == (False, False, None)
    audit.path.write_bytes(whole)
    assert bare("audit", "verify").code == 0
    lose(audit)
    assert bare("audit", "verify", "--accept-loss").code == 0
    assert bare("audit", "verify").code == 0
    assert stat.S_IMODE((state / "audit-verified.json").stat().st_mode) == 0o644


def test_audit_verify_goes_on_when_the_files_before_the_last_verified_line_are_archived(
    bare: Relay, audit: WrittenAudit
) -> None:
    assert bare("audit", "verify").code == 0
    audit.rotate()
    audit.write(2)
    audit.files[0].unlink()  # its last line is the one that was verified: the next file names it
    assert bare("audit", "verify").code == 0


def test_audit_verify_of_a_broken_chain_exits_1_and_keeps_what_was_verified(
    bare: Relay, audit: WrittenAudit, state: Path
) -> None:
    assert bare("audit", "verify").code == 0
    kept = (state / "audit-verified.json").read_bytes()
    audit.write()
    audit.change(lambda lines: lines.pop(1))
    assert bare("audit", "verify").code == 1
    assert (state / "audit-verified.json").read_bytes() == kept


def test_audit_verify_shows_how_far_it_is_to_a_person_alone(
    bare: Relay, audit: WrittenAudit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cli.audit._QUIET_S", -1)
    assert audit.path.exists()
    assert bare("audit", "verify").err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    outcome = bare("audit", "verify")
    assert "%" in outcome.err
    assert outcome.err.endswith("\r     \r")
    assert "%" not in outcome.out


def test_audit_tail_shows_the_newest_lines(bare: Relay, audit: WrittenAudit) -> None:
    audit.rotate()
    audit.write(30)
    assert len(bare("audit", "tail").out.splitlines()) == 20
    lines = [line for file in audit.files for line in file.read_text().splitlines()]
    outcome = bare("audit", "tail", "-n", "31", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == lines[-31:]


def test_audit_tail_leaves_out_canaries_however_many_there_are(
    bare: Relay, audit: WrittenAudit, state: Path
) -> None:
    by_call = {"tenant": "acme", "iss": None, "sub": "relay", "jti": None, "tool": "echo", "outcome": "ok"}
    agent = {**by_call, "iss": "https://relay.example", "jti": "j"}  # an agent may have the same name
    summed = {"event": "canaries", "sub": "relay", "count": 10, "failed": 0}
    of_canaries = [json.dumps(each).encode() for each in (by_call, summed)] * 300
    audit.change(lambda lines: lines.extend([json.dumps(agent).encode(), *of_canaries]))
    shown = bare("audit", "tail", "-n", "2", "--json").out.splitlines()
    assert [json.loads(line).get("iss") for line in shown] == [None, "https://relay.example"]
    assert json.loads(shown[0])["number"] == 3
    assert len(bare("audit", "tail").out.splitlines()) == 4
    assert json.loads(bare("audit", "tail", "-n", "1", "--canaries", "--json").out) == summed
    assert state.is_dir()


def test_audit_tail_json_prints_no_byte_that_a_terminal_obeys(bare: Relay, audit: WrittenAudit) -> None:
    raw = json.dumps({"tool": HOSTILE}, ensure_ascii=False).encode()
    audit.change(lambda lines: lines.extend([raw, b'{"tool":"\xc2\x9b31m"}', b"\x1b[2J"]))
    outcome = bare("audit", "tail", "-n", "3", "--json")
    assert [json.loads(line) for line in outcome.out.splitlines()] == [{"tool": HOSTILE}, {"tool": "\x9b31m"}]
    assert all(line.isascii() and line.isprintable() for line in (outcome.out + outcome.err).splitlines())
    assert "left out" in outcome.err


def test_audit_grep_shows_the_lines_that_say_all_of_it(bare: Relay, audit: WrittenAudit) -> None:
    assert audit.path.exists()
    outcome = bare("audit", "grep", "number=2", f"ts_ms={NOW_MS}", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out)["number"] == 2
    assert len(bare("audit", "grep").out.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["tenant=acme"], "", id="a field that lines can have"),
        pytest.param(["tennant=acme"], "no line has a field tennant; there are ts_ms, ", id="a slip"),
        pytest.param(["--since", "1s"], "", id="nothing so new"),
        pytest.param(["--since", "2999-01-01"], "", id="nothing from the future"),
    ],
)
def test_audit_grep_exits_1_when_no_line_says_it(
    bare: Relay, audit: WrittenAudit, arguments: list[str], said: str
) -> None:
    assert audit.path.exists()
    outcome = bare("audit", "grep", *arguments)
    assert (outcome.code, outcome.out) == (1, "")
    assert said in outcome.err
    assert bool(outcome.err) == bool(said)


@pytest.mark.parametrize(
    "since", ["99999d", "2025-10-09T08:53:20", "2025-10-09 10:53:20+02:00", "2025-10-09"]
)
def test_audit_grep_knows_times_in_several_forms(bare: Relay, audit: WrittenAudit, since: str) -> None:
    assert audit.path.exists()  # lines of 2025-10-09 08:53:20 UTC
    assert len(bare("audit", "grep", "--since", since).out.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        pytest.param(["grep", "acme"], "FIELD=VALUE", id="no field"),
        pytest.param(["grep", "=acme"], "FIELD=VALUE", id="a field without a name"),
        pytest.param(["grep", "--since", f"soon{HOSTILE}"], "soon\\x1b", id="no time"),
        pytest.param(["grep", "--since", "0s"], "0s", id="no duration"),
        pytest.param(["verify", "--expect", "abc"], "--expect", id="no hash"),
        pytest.param(["verify", "--expect", "A" * 64], "--expect", id="a hash in capitals"),
    ],
)
def test_a_question_to_the_audit_that_is_none_is_a_wrong_command_line(
    bare: Relay, arguments: list[str], word: str
) -> None:
    outcome = bare("audit", *arguments)
    assert outcome.code == 2
    assert word in outcome.error


@pytest.mark.parametrize("command", ["verify", "tail", "grep"])
def test_where_there_is_no_audit_that_is_said_in_one_line(bare: Relay, state: Path, command: str) -> None:
    outcome = bare("audit", command)
    assert outcome.code == 3
    assert f"there is no audit in {state}" in outcome.error


def test_verify_exits_4_when_the_whole_verified_audit_was_removed(bare: Relay, audit: WrittenAudit) -> None:
    assert bare("audit", "verify").code == 0
    audit.path.unlink()
    outcome = bare("audit", "verify")
    assert outcome.code == 4
    assert "one was verified before" in outcome.error
    assert bare("audit", "verify", "--accept-loss").code == 3


def test_rows_have_colour_on_a_terminal_alone(
    bare: Relay, audit: WrittenAudit, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert audit.path.exists()
    assert "\x1b" not in bare("audit", "tail").out
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b" in bare("audit", "tail").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in bare("audit", "tail").out


@pytest.mark.integration
async def test_audit_tail_follows_across_rotation_until_ctrl_c(state: Path, audit: WrittenAudit) -> None:
    command = [
        *("env", "--default-signal=INT"),  # a shell ignores it for what runs in its background
        *(sys.executable, "-P", "-m", "relay", "audit", "tail", "-n", "1", "--follow", "--json"),
        "--state-dir",
        str(state),
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    numbers = []
    async with asyncio.timeout(60):
        for _ in range(3):
            numbers.append(json.loads(await process.stdout.readline())["number"])
            audit.rotate()
            audit.write()
        numbers.append(json.loads(await process.stdout.readline())["number"])
        process.send_signal(signal.SIGINT)
        assert await process.stdout.read() == b""
        assert await process.wait() == 0
    assert numbers == [3, 4, 5, 6]


@pytest.mark.integration
def test_a_relay_does_not_run_beside_another_in_one_state_directory(bare: Relay, audit: WrittenAudit) -> None:
    bare("ca", "init")
    before = audit.path.read_bytes()
    outcome = bare(*RUN)
    assert outcome.code == 3
    assert "another relay uses the state directory" in outcome.error
    assert audit.path.read_bytes() == before


PARENT = "01HZX9K3M4P7Q8R9S0T1V2W3XA"


class Written:
    """The audit of one relay, whose clock is ``late_ms`` behind."""

    def __init__(self, directory: Path, late_ms: int) -> None:
        directory.mkdir()
        self.directory = directory
        self.path = directory / "audit.jsonl"
        self.clock = FakeClock(NOW_MS + late_ms)
        self.log = LineLog(self.path, self.clock)

    def write(self, **facts: str) -> None:
        self.log.write(**facts)
        self.clock.advance(1000)


@pytest.fixture
def relays(tmp_path: Path) -> Iterator[list[Written]]:
    """Two relays, whose lines alternate in time."""
    written = [Written(tmp_path / "first", 0), Written(tmp_path / "second", 500)]
    for number in range(2):
        for relay in written:
            relay.write(event="tried", parent=PARENT, reason=str(number))
            relay.write(event="other", reason=str(number))
    yield written
    for relay in written:
        relay.log.close()


Run = Callable[..., Result]


@pytest.fixture
def run(relays: list[Written]) -> Run:
    def run(command: str, *arguments: str, option: str = "") -> Result:
        places = [str(relay.directory) for relay in relays]
        named = [word for place in places for word in ((option, place) if option else (place,))]
        return CliRunner().invoke(app, [command, *arguments, *named])

    return run


def spoil(relay: Written) -> None:
    lines = relay.path.read_bytes().splitlines(keepends=True)
    relay.path.write_bytes(b"".join([lines[0], *lines[2:]]))


def test_each_chain_is_a_row_of_one_table(run: Run, relays: list[Written]) -> None:
    done = run("verify")
    assert done.exit_code == 0, done.output
    header, *rows = done.output.splitlines()
    assert header.split() == ["AUDIT", "LINES", "FIRST", "LAST", "HEAD", "RESULT"]
    for row, relay in zip(rows, relays, strict=True):
        assert row.startswith(str(relay.directory))
        assert relay.log.head[:12] in row
        assert row.endswith("intact")


def test_one_that_is_broken_is_named_and_hides_no_other(run: Run, relays: list[Written]) -> None:
    spoil(relays[0])
    done = run("verify", "--json")
    assert done.exit_code == 1
    first, second = json.loads(done.output)
    assert (first["intact"], first["broken"]["line"], second["intact"]) == (False, 2, True)
    assert first["result"] == "BROKEN: audit.jsonl line 2"


def test_lines_that_were_cut_off_since_the_last_time_are_exit_code_4(run: Run, relays: list[Written]) -> None:
    assert run("verify").exit_code == 0
    relays[1].path.write_bytes(b"".join(relays[1].path.read_bytes().splitlines(keepends=True)[:-1]))
    done = run("verify")
    assert done.exit_code == 4
    assert "LINES LOST" in done.output
    spoil(relays[0])
    assert run("verify").exit_code == 1  # a broken chain is worse
    assert run("verify", "--accept-loss").exit_code == 1


def test_a_place_without_an_audit_is_a_row_too(run: Run, tmp_path: Path) -> None:
    done = run("verify", str(tmp_path / "nowhere"))
    assert done.exit_code == 1
    assert f"NOT READ: there is no audit in {tmp_path / 'nowhere'}" in done.output
    assert done.output.count("intact") == 2


def test_an_audit_that_cannot_be_read_is_a_row_in_words(run: Run, tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").mkdir()
    done = run("verify", str(tmp_path))
    assert done.exit_code == 1
    assert f"NOT READ: {tmp_path / 'audit.jsonl'}: Is a directory\n" in done.output


def test_a_hash_is_expected_in_one_audit_alone(run: Run) -> None:
    assert run("verify", "--expect", "ab" * 32).exit_code == 2


def test_an_id_is_found_in_all_of_them_in_the_order_of_time(run: Run, relays: list[Written]) -> None:
    done = run("grep", f"parent={PARENT}", "--json", option="--in")
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in done.output.splitlines()]
    assert [Path(line["audit"]).name for line in found] == ["first", "second", "first", "second"]
    assert {line["event"] for line in found} == {"tried"}
    shown = run("grep", f"parent={PARENT}", option="--in").output.splitlines()
    assert [line.split()[0] for line in shown] == [str(relay.directory) for relay in relays] * 2


def test_what_is_in_none_of_them_is_exit_code_1(run: Run) -> None:
    assert run("grep", "event=nothing", option="--in").exit_code == 1


def test_a_line_cannot_say_of_which_audit_it_is_nor_what_is_not_json(
    run: Run, relays: list[Written], tmp_path: Path
) -> None:
    records = tmp_path / "calls.jsonl"
    records.write_text(
        f'{{"audit": "{relays[0].directory}", "time_ms": 1, "parent": "forged"}}\n'
        '{"time_ms": NaN, "parent": "forged"}\n{"time_ms": -Infinity, "parent": "forged"}\n'
    )
    done = run("grep", "parent=forged", "--json", "--in", str(records), option="--in")
    assert [json.loads(line) for line in done.output.splitlines()] == [
        {"audit": str(records), "time_ms": 1, "parent": "forged"}
    ]
