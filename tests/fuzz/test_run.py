"""A run with coverage guidance finds a planted fault, counts, and keeps what it found."""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fuzz import corpus
from tests.fuzz.frame_counts import FILE_VARIABLE, count_in
from tests.fuzz.one import ATHERIS_IS_MISSING
from tests.fuzz.run import AtherisMissingError, Runner

ROOT = Path(__file__).parents[2]
BOUND_S = 110

needs_atheris = pytest.mark.skipif(
    find_spec("atheris") is None, reason="atheris is not installed: make fuzz installs it"
)


def one(*arguments: str, without: Sequence[str] = ()) -> "subprocess.CompletedProcess[str]":
    """Run ``tests.fuzz.one``; it finds none of the modules ``without``."""
    hidden = "".join(f"sys.modules[{name!r}] = None; " for name in without)
    start = f"import sys; {hidden}from tests.fuzz.one import main; sys.exit(main({list(arguments)!r}))"
    return subprocess.run(
        [sys.executable, "-P", "-c", start],
        check=False,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        cwd=ROOT,
    )


@needs_atheris
def test_a_planted_fault_that_chance_does_not_find_is_found(tmp_path: Path) -> None:
    options = ("-seed=1", "-runs=3000000", f"-artifact_prefix={tmp_path}/")
    done = one("planted", "--table", "tests.fuzz.planted", *options)
    assert "ZeroDivisionError: planted" in done.stdout + done.stderr
    assert done.returncode != 0
    [found] = tmp_path.iterdir()
    assert found.read_bytes().startswith(b"flaw")


def test_without_atheris_nothing_runs_and_the_reason_is_told() -> None:
    done = one("topic", without=["atheris"])
    assert (done.returncode, done.stdout) == (ATHERIS_IS_MISSING, "")
    assert "make fuzz" in done.stderr


class PlayedRunner(Runner):
    """A runner whose processes are played: each says and leaves what the test says."""

    def __init__(self, directory: Path, said: str, code: int = 0, left: Sequence[bytes] = ()) -> None:
        super().__init__(directory, directory / "kept")
        self._said, self._code, self._left = said, code, left

    def start(
        self, target: str, options: Sequence[str], timeout_s: float
    ) -> "subprocess.CompletedProcess[str]":
        assert timeout_s > 0
        assert str(self.corpus(target)) in options
        for number, data in enumerate(self._left):
            (self.corpus(target) / f"{number:040x}").write_bytes(data)
        return subprocess.CompletedProcess([], self._code, "a traceback\n", self._said)


def test_a_run_is_counted(tmp_path: Path) -> None:
    said = "#9 DONE cov: 12 ft: 30 corp: 2/9b\nstat::number_of_executed_units: 1234\n"
    outcome = PlayedRunner(tmp_path, said, left=[b"a", b"b"]).run("topic", 5)
    assert (outcome.inputs, outcome.edges, outcome.kept, outcome.finding) == (1234, 12, 2, "")
    assert outcome.frames == 0


def test_the_frames_that_a_process_has_read_are_counted_though_it_ends_without_a_word(tmp_path: Path) -> None:
    counted = tmp_path / "frames"
    read = "CountingReader(SchemaRegistry()).read(frame_text('heartbeat'), 1024)"
    names = (
        "tests.fuzz.frame_counts import CountingReader",
        "schemas.registry import SchemaRegistry",
        "tests.fakes.frames import frame_text",
    )
    program = "\n".join((*(f"from {name}" for name in names), read, read, "import os", "os._exit(0)"))
    subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"],
        check=True,
        timeout=BOUND_S,
        env={**os.environ, FILE_VARIABLE: str(counted)},
    )
    assert count_in(counted) == 2
    assert count_in(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("said", "finding"),
    [("artifact_prefix='x'; Test unit written to /x/crash-1\n", "/x/crash-1"), ("killed\n", "exit code 77")],
    ids=["an input", "none"],
)
def test_a_process_that_fails_is_a_finding_and_tells_why(tmp_path: Path, said: str, finding: str) -> None:
    outcome = PlayedRunner(tmp_path, said, code=77).run("topic", 5)
    assert outcome.finding == finding
    assert outcome.report == f"{said.strip()}\na traceback"


def test_what_is_kept_is_bounded_and_a_found_input_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "KEPT", tmp_path / "kept")
    found = tmp_path / "corpus"
    for directory in (tmp_path / "kept" / "topic", found / "topic"):
        directory.mkdir(parents=True)
    (tmp_path / "kept" / "topic" / "found-1").write_bytes(b"found")
    for size in range(1, 200):
        (found / "topic" / f"{size:040x}").write_bytes(b"x" * size)
    count = corpus.keep(found, ["topic", "frame"])
    kept = corpus.inputs_of("topic")
    assert count == len(kept)
    assert [file.read_bytes() for file in kept if file.name == "found-1"] == [b"found"]
    assert 1 < len(kept) <= 17
    assert max(file.stat().st_size for file in kept) > 100
    assert corpus.keep(found / "nothing", ["topic"]) == count


def test_a_missing_atheris_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = subprocess.CompletedProcess([], ATHERIS_IS_MISSING, "", "not installed\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: missing)
    with pytest.raises(AtherisMissingError, match="not installed"):
        Runner(tmp_path, tmp_path).run("topic", 5)


def test_a_process_that_does_not_end_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("x", 5, stderr=b"cov: 12 ft: 30\n")

    monkeypatch.setattr(subprocess, "run", hangs)
    outcome = Runner(tmp_path, tmp_path).run("topic", 5)
    assert (outcome.finding, outcome.edges) == ("exit code 124", 12)
    assert outcome.report.endswith("it did not end")
