import pytest

from relay.audit.log import AuditUnavailableError
from relay.server import decisions
from relay.server.decisions import DecisionRecords
from tests.fakes.disk import full_disk
from tests.fakes.hub import Hub


@pytest.fixture
def records(hub: Hub) -> DecisionRecords:
    return DecisionRecords(hub.audit, hub.log)


def audited(hub: Hub) -> list[tuple[str, str]]:
    return [(line["event"], line["kid"]) for line in hub.audited()]


def unrecorded(hub: Hub) -> list[tuple[str, str]]:
    """Return the reason and the kid of each decision that the log has as not recorded."""
    return [(line["reason"], line["what"]["kid"]) for line in hub.lines.entries("not recorded")]


def test_decisions_are_in_the_audit_in_their_order_and_once(hub: Hub, records: DecisionRecords) -> None:
    for kid in ("a", "b", "c"):
        records.add("leaf_revoked", kid=kid)
    records.write()
    records.write()
    assert audited(hub) == [("leaf_revoked", kid) for kid in ("a", "b", "c")]


def test_a_decision_is_in_the_log_before_it_is_in_the_audit(hub: Hub, records: DecisionRecords) -> None:
    records.add("leaf_revoked", kid="a")
    [line] = hub.lines.entries("leaf_revoked")
    assert (line["level"], line["kid"]) == ("warning", "a")
    assert hub.audit_file.read_bytes() == b""


def test_what_the_audit_does_not_take_is_written_once_it_does(hub: Hub, records: DecisionRecords) -> None:
    records.add("leaf_revoked", kid="a")
    records.add("leaf_revoked", kid="b")
    with full_disk():
        records.write()
        records.add("leaf_revoked", kid="c")
        records.write()
    records.write()
    assert audited(hub) == [("leaf_revoked", kid) for kid in ("a", "b", "c")]


def test_each_decision_that_is_not_recorded_is_logged_once(
    hub: Hub, records: DecisionRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def fails_after_one(*, kid: str, **_facts: str) -> None:
        if written:
            raise AuditUnavailableError("the disk is full")
        written.append(kid)

    monkeypatch.setattr(hub.audit, "write", fails_after_one)
    # Two that are alike are two decisions.
    for kid in ("a", "b", "b"):
        records.add("leaf_revoked", kid=kid)
    for _ in range(3):
        records.write()
    assert unrecorded(hub) == [("the disk is full", "b")]
    written.clear()
    for _ in range(3):
        records.write()
    assert unrecorded(hub) == [("the disk is full", "b")] * 2


def test_beyond_the_bound_a_decision_is_logged_and_those_before_it_stay(
    hub: Hub, records: DecisionRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "MAX_UNRECORDED", 2)
    for kid in ("a", "b", "c"):
        records.add("leaf_revoked", kid=kid)
    assert unrecorded(hub) == [("too many are pending", "c")]
    assert len(hub.lines.entries("leaf_revoked")) == 3
    records.write()
    records.add("leaf_revoked", kid="d")
    records.write()
    assert [kid for _, kid in audited(hub)] == ["a", "b", "d"]
