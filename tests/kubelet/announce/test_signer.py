import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kubelet.announce.signer import RESERVED_MS, ClockNotSetError, ManifestSigner
from schemas.manifest import MAX_FUTURE_MS, etag_of
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.times import FIRST_CREDIBLE_MS
from schemas.violations import ViolationError
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.node import HARDWARE, signer_of
from tests.fakes.signer import DAY_MS, ECHO, NOW_MS, TTL_MS, SimulatedNode

GREATEST = 2**53 - 1

MakeSigner = Callable[..., ManifestSigner]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "last_issued_ms"


@pytest.fixture
def ticks() -> FakeClock:
    return FakeClock(1_000_000)


@pytest.fixture
def make(  # noqa: PLR0913, PLR0917 - the fixtures that it bundles
    node: SimulatedNode,
    clock: FakeClock,
    ticks: FakeClock,
    registry: SchemaRegistry,
    log: LogLines,
    file: Path,
) -> MakeSigner:
    def make(
        *,
        capabilities: Sequence[Mapping[str, Any]] = (ECHO,),
        last_issued: Path | None = file,
        ttl_ms: int = TTL_MS,
    ) -> ManifestSigner:
        return signer_of(
            node,
            clock,
            registry,
            make_logger("kubelet", log),
            capabilities=capabilities,
            last_issued=last_issued,
            ttl_ms=ttl_ms,
            ticks_ms=ticks,
        )

    return make


def test_a_manifest_says_when_it_was_signed_and_when_it_ends(make: MakeSigner) -> None:
    manifest = make().sign()
    document = json.loads(manifest.wire)
    assert (document["issued_at_ms"], document["expires_at_ms"]) == (NOW_MS, NOW_MS + TTL_MS)
    assert (manifest.issued_at_ms, manifest.expires_at_ms) == (NOW_MS, NOW_MS + TTL_MS)
    assert manifest.etag == etag_of(manifest.wire)


def test_a_manifest_is_what_a_second_implementation_signs(make: MakeSigner, node: SimulatedNode) -> None:
    assert make().sign().wire == node.manifest(hw_fingerprint=HARDWARE, capabilities=[ECHO])


@pytest.mark.parametrize(
    ("passed_ms", "issued_at_ms"),
    [
        pytest.param(60_000, NOW_MS + 60_000, id="the clock goes on"),
        pytest.param(0, NOW_MS + 1, id="the clock stands still"),
        pytest.param(-3_600_000, NOW_MS + 1, id="the clock is set back"),
    ],
)
def test_every_manifest_is_newer_than_the_one_before(
    make: MakeSigner, clock: FakeClock, passed_ms: int, issued_at_ms: int
) -> None:
    signer = make()
    signer.sign()
    clock.advance(passed_ms)
    manifest = signer.sign()
    assert (manifest.issued_at_ms, manifest.expires_at_ms) == (issued_at_ms, issued_at_ms + TTL_MS)


@pytest.mark.parametrize("passed_ms", [60_000, 3_000, 0, -3_600_000])
def test_after_a_restart_too(make: MakeSigner, clock: FakeClock, passed_ms: int) -> None:
    signer = make()
    signer.sign()
    clock.advance(2_000)
    last = signer.sign()
    clock.advance(passed_ms)
    first = make().sign()
    assert first.issued_at_ms > last.issued_at_ms
    # No further ahead of the clock than was reserved.
    assert first.issued_at_ms <= max(clock(), NOW_MS + RESERVED_MS + 1)


@pytest.mark.parametrize(
    ("mark_ms", "issued_at_ms"),
    [
        pytest.param(NOW_MS + 5_000, NOW_MS + 5_001, id="a mark ahead of the clock is passed by one"),
        pytest.param(NOW_MS, NOW_MS + 1, id="a mark at the clock too"),
        pytest.param(NOW_MS - 1, NOW_MS, id="a mark behind the clock changes nothing"),
        pytest.param(0, NOW_MS, id="no mark"),
        pytest.param(NOW_MS + MAX_FUTURE_MS, NOW_MS + MAX_FUTURE_MS + 1, id="as far ahead as may be"),
        pytest.param(NOW_MS + MAX_FUTURE_MS + 1, NOW_MS, id="a mark further ahead is refused"),
        pytest.param(NOW_MS + 30 * DAY_MS, NOW_MS, id="a month ahead too"),
        pytest.param(GREATEST, NOW_MS, id="a mark that nothing can pass"),
    ],
)
def test_overtaking_signs_after_the_mark(make: MakeSigner, mark_ms: int, issued_at_ms: int) -> None:
    signer = make()
    signer.advance_past(mark_ms)
    assert signer.sign().issued_at_ms == issued_at_ms


def test_a_node_that_restarts_all_the_time_does_not_move_ahead_of_its_clock(
    make: MakeSigner, clock: FakeClock, file: Path
) -> None:
    for _ in range(100):
        issued = make().sign().issued_at_ms
        assert issued <= int(file.read_text()) <= clock() + RESERVED_MS + 1
        clock.advance(1_000)


def test_a_clock_that_was_once_far_ahead_does_not_silence_the_node(
    make: MakeSigner, clock: FakeClock
) -> None:
    signer = make()
    clock.advance(DAY_MS)
    assert signer.sign().issued_at_ms == NOW_MS + DAY_MS
    clock.advance(-DAY_MS)
    assert signer.sign().issued_at_ms == NOW_MS + DAY_MS + 1
    signer.advance_past(NOW_MS - 1)
    assert signer.sign().issued_at_ms == NOW_MS
    assert make().sign().issued_at_ms == NOW_MS + RESERVED_MS + 1


def test_what_was_advanced_past_is_not_forgotten_by_a_restart(make: MakeSigner) -> None:
    signer = make()
    signer.advance_past(NOW_MS + MAX_FUTURE_MS)
    signer.sign()
    assert make().sign().issued_at_ms == NOW_MS + MAX_FUTURE_MS + 2


def test_a_mark_that_is_refused_is_told(make: MakeSigner, log: LogLines) -> None:
    signer = make()
    assert signer.advance_past(NOW_MS + MAX_FUTURE_MS) is True
    assert log.entries("the relay's mark is too far ahead of this clock") == []
    assert signer.advance_past(NOW_MS + DAY_MS) is False
    assert log.entries("the relay's mark is too far ahead of this clock")[0]["level"] == "error"


def test_signing_again_waits_until_a_second_has_passed(make: MakeSigner, ticks: FakeClock) -> None:
    signer = make()
    assert signer.wait_s() == 0
    signer.sign()
    assert signer.wait_s() == 1
    ticks.advance(999)
    assert signer.wait_s() == pytest.approx(0.001)
    ticks.advance(1)
    assert signer.wait_s() == 0


def test_a_relay_that_moves_its_mark_gets_one_write_in_ten_seconds(
    make: MakeSigner, clock: FakeClock, ticks: FakeClock, file: Path
) -> None:
    signer = make()
    written = []
    for _ in range(60):
        if signer.wait_s() <= 0:
            issued = signer.sign().issued_at_ms
            assert int(file.read_text()) >= issued
            signer.advance_past(clock() + MAX_FUTURE_MS)
            written.append(file.stat().st_mtime_ns)
        clock.advance(1_000)
        ticks.advance(1_000)
    assert len(set(written)) == 6


@pytest.mark.parametrize("now_ms", [0, FIRST_CREDIBLE_MS - 1])
def test_a_clock_that_is_not_set_signs_nothing(
    make: MakeSigner, clock: FakeClock, file: Path, now_ms: int
) -> None:
    clock.now_ms = now_ms
    signer = make()
    signer.advance_past(NOW_MS)
    with pytest.raises(ClockNotSetError, match="the clock is not set"):
        signer.sign()
    assert not file.exists()


def test_a_clock_is_believed_from_the_first_credible_moment_on(make: MakeSigner, clock: FakeClock) -> None:
    clock.now_ms = FIRST_CREDIBLE_MS
    assert make().sign().issued_at_ms == FIRST_CREDIBLE_MS


@pytest.mark.parametrize(
    ("members", "rule"),
    [
        pytest.param({"cap_id": "Echo"}, "pattern", id="a bad id"),
        pytest.param({"kind": "system.shell"}, "enum", id="an unregistered kind"),
        pytest.param({"safety_class": "physical_actuation"}, "const", id="beyond the clamp of its kind"),
        pytest.param({"note": "hello"}, "additionalProperties", id="an unknown member"),
    ],
)
def test_a_capability_that_the_document_refuses_is_never_signed_off(
    make: MakeSigner, file: Path, members: Mapping[str, Any], rule: str
) -> None:
    signer = make(capabilities=[{**ECHO, **members}])
    with pytest.raises(ViolationError) as refusal:
        signer.sign()
    assert refusal.value.rule == rule
    assert not file.exists()


def test_a_node_without_capabilities_has_nothing_to_sign(make: MakeSigner) -> None:
    with pytest.raises(ViolationError, match="minItems"):
        make(capabilities=[]).sign()


def test_the_file_holds_a_time_that_is_not_reached_and_nothing_else_is_left(
    make: MakeSigner, file: Path, clock: FakeClock
) -> None:
    signer = make()
    signer.sign()
    clock.advance(60_000)
    signer.sign()
    assert file.read_text() == f"{NOW_MS + 60_000 + RESERVED_MS}\n"
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"yesterday\n", id="words"),
        pytest.param(f"{NOW_MS + DAY_MS}"[:-1].encode(), id="a number that is torn"),
        pytest.param(f"{NOW_MS + DAY_MS}".encode(), id="a line without its end"),
        pytest.param(b"1760000000000.5\n", id="a fraction"),
        pytest.param(b"1760000000001 1760000000002\n", id="two numbers"),
        pytest.param(b"\x00" * 14, id="a block that the card lost"),
        pytest.param("١٧٦٠٠٠٠٠٠٠٠٠١".encode(), id="digits of another script"),
        pytest.param(b"\xff\xfe", id="not text"),
        pytest.param(b"-1\n", id="negative"),
        pytest.param(b"9" * 30, id="a number beyond every manifest"),
        pytest.param(
            str(GREATEST - TTL_MS).encode(), id="the first number after which nothing can be signed"
        ),
        pytest.param(b"9" * 10_000, id="a number too long to be read"),
    ],
)
def test_a_damaged_file_is_as_good_as_none(make: MakeSigner, file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert make().sign().issued_at_ms == NOW_MS
    assert file.read_text() == f"{NOW_MS + RESERVED_MS}\n"


def test_a_file_that_cannot_be_written_does_not_stop_the_signing(
    make: MakeSigner, log: LogLines, tmp_path: Path
) -> None:
    signer = make(last_issued=tmp_path / "gone" / "last_issued_ms")
    assert [signer.sign().issued_at_ms, signer.sign().issued_at_ms] == [NOW_MS, NOW_MS + 1]
    lines = log.entries("the time of the newest manifest is not kept")
    assert [line["level"] for line in lines] == ["warning"]


def test_a_node_without_disk_writes_nothing(make: MakeSigner, tmp_path: Path) -> None:
    signer = make(last_issued=None)
    assert [signer.sign().issued_at_ms, signer.sign().issued_at_ms] == [NOW_MS, NOW_MS + 1]
    assert signer.wait_s() == 1
    assert list(tmp_path.iterdir()) == []
