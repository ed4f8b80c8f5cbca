"""What the relay and a node write is read as they write it, also where its last line is torn."""

from pathlib import Path

from tests.chaos.history import Decision, Fault, Outcome, Run
from tests.chaos.journals import audit, faults_in, runs
from tests.fakes.audits import LineLog
from tests.fakes.clock import FakeClock

NOW = 1_800_000_000_000
TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_the_audit_is_read_through_all_of_its_files(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    clock = FakeClock(NOW)
    log = LineLog(path, clock, max_bytes=1)
    log.write(correlation_id="A", decision="allow", code="ok", tool="sysecho.n.echo.invoke")
    log.write(correlation_id="B", decision="deny", code="E_SAFETY_DENIED", tool="sys.n.sysmetrics.subscribe")
    clock.advance(1000)  # the log looks at its size once a second
    log.write(correlation_id="A", outcome="ok", code="ok", duration_ms=12.5, tool="sysecho.n.echo.invoke")
    log.write(event="fleet", reason="neither a decision nor an outcome")
    log.close()
    with path.open("ab") as torn:
        torn.write(b'{"prev":"00","correlation_id":"C","outc')
    assert [file.name for file in tmp_path.glob("audit-*.jsonl")] == ["audit-000001.jsonl"]
    decisions, outcomes = audit(path)
    assert decisions == [Decision("A", NOW, allowed=True), Decision("B", NOW, allowed=False, is_prompt=False)]
    assert outcomes == [Outcome("A", NOW + 1000, 12.5)]


def test_a_run_is_a_command_that_was_done(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    traced = f'"correlation_id": "A", "traceparent": "00-{TRACE}-00f067aa0ba902b7-01"'
    log.write_text(
        f'{{"event": "command done", {traced}}}\n'
        f'{{"event": "command refused", "code": "E_RATE_LIMITED", {traced}}}\n'
        '{"event": "command done", "correlation_id": "of a caller that does not trace"}\n'
        "not JSON\n"
        f'{{"event": "command done", {traced}'
    )
    assert runs(log, "node-0") == [Run(TRACE, "A", "node-0")]


def test_a_fault_is_a_line_with_an_exception(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_text(
        '{"event": "broker lost", "level": "warning"}\n'
        '{"event": "a loop ended", "error": "ValueError", "exception": "Traceback"}\n'
    )
    assert faults_in(log, "node-0") == [Fault("node-0", "a loop ended: ValueError")]
