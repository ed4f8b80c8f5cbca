"""The relay is told what is wrong with the board, when that changes and at each new session."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from kubelet.daemon.findings_report import FindingsReport
from kubelet.handlers.base import FindingSource, Handler
from kubelet.session.relay_frames import RelayFrames
from schemas.frames import SUBPROTOCOL_1_1, SUBPROTOCOL_1_2
from schemas.payloads import OpenFinding
from schemas.process.logs import make_logger
from tests.fakes.lines import LogLines

HOT: OpenFinding = {"code": "hot", "severity": "warning", "count": 1, "since_ms": None}


class Source(Handler, FindingSource):
    """Finds what a test says."""

    @property
    def capability(self) -> Mapping[str, Any]:
        return {"kind": "linux.health"}

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        raise AssertionError((verb, arguments))


class Spoken:
    """A channel on which ``version`` is spoken, and what was said on it."""

    is_open = True

    def __init__(self, version: str) -> None:
        self._version = version
        self.said: list[Sequence[OpenFinding]] = []

    def speaks(self, version: str) -> bool:
        return version <= self._version

    def encoded(self, type_: str, payload: Mapping[str, Any]) -> str:
        assert type_ == "findings"
        self.said.append(payload["findings"])
        return ""

    async def send_text(self, text: str) -> bool:
        assert not text
        return True


@pytest.fixture
def frames() -> RelayFrames:
    return RelayFrames(make_logger("kubelet", LogLines()))


def connected(frames: RelayFrames, version: str = SUBPROTOCOL_1_2) -> Spoken:
    spoken = Spoken(version)
    frames.attach(cast("Any", spoken), resumed=False)
    return spoken


async def test_a_finding_is_told_when_it_begins_and_when_it_ends(frames: RelayFrames) -> None:
    source = Source()
    FindingsReport([source], frames)
    spoken = connected(frames)
    assert spoken.said == []  # nothing was looked at yet
    for findings in ([], [HOT], [HOT], []):
        source.on_findings(findings)
    assert spoken.said == [[], [HOT], []]


async def test_a_time_that_is_another_by_a_moment_is_not_told_again(frames: RelayFrames) -> None:
    source = Source()
    FindingsReport([source], frames)
    spoken = connected(frames)
    first, moved, later = ({**HOT, "since_ms": since} for since in (5_000, 5_001, 65_000))
    for finding in (first, moved, first, later, HOT):
        source.on_findings([cast("OpenFinding", finding)])
    assert spoken.said == [[first], [later], [HOT]]


async def test_each_new_session_is_told_what_is_open(frames: RelayFrames) -> None:
    source = Source()
    FindingsReport([source], frames)
    source.on_findings([HOT])
    assert connected(frames).said == [[HOT]]
    frames.detach()
    source.on_findings([])
    assert connected(frames).said == [[]]


async def test_a_relay_of_an_earlier_version_is_told_nothing(frames: RelayFrames) -> None:
    source = Source()
    FindingsReport([source], frames)
    spoken = connected(frames, SUBPROTOCOL_1_1)
    source.on_findings([HOT])
    assert spoken.said == []
