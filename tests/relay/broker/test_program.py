import os
from pathlib import Path

import pytest

from relay.broker.program import ProgramError, find_nats_server

pytestmark = pytest.mark.integration


def on_path(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str | None) -> Path:
    """Put a program called nats-server onto a PATH that has nothing else; None: an empty PATH."""
    program = directory / "nats-server"
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n", "ascii")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))
    return program


def test_the_program_on_path_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = on_path(monkeypatch, tmp_path, "echo nats-server: v2.11.0")
    assert find_nats_server() == program


def test_without_one_on_path_the_extras_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_path(monkeypatch, tmp_path, None)
    found = find_nats_server()
    assert found.is_absolute()
    assert os.access(found, os.X_OK)


def test_with_neither_the_error_names_the_three_ways_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_path(monkeypatch, tmp_path, None)
    monkeypatch.setattr("relay.broker.program._DISTRIBUTION", "no-such-distribution")
    with pytest.raises(ProgramError) as error:
        find_nats_server()
    for way in ("edge-kubelet[broker]", "--broker", "--no-broker"):
        assert way in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param("echo hello", "does not say that it is nats-server", id="another program"),
        pytest.param("echo 'not nats-server: v2.11.0'", "does not say", id="the name elsewhere"),
        pytest.param("exit 0", "does not say", id="no answer"),
        pytest.param(
            "echo 'fatal error: out of memory' >&2; exit 2", "status 2: fatal error: out", id="failed"
        ),
        pytest.param("kill -9 $$", "ended by signal 9: no output. Check .* memory", id="killed"),
        pytest.param("echo nats-server: v2.10.29", "is nats-server 2.10, older than 2.11", id="too old"),
        pytest.param("/usr/bin/head -c 100000 /dev/zero", "does not say", id="no text"),
    ],
)
def test_another_program_of_that_name_is_refused_and_nothing_else_is_taken_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reason: str
) -> None:
    program = on_path(monkeypatch, tmp_path, script)
    with pytest.raises(ProgramError, match=reason) as error:
        find_nats_server()
    assert str(error.value).startswith(str(program))
    assert "\n" not in str(error.value)


def test_a_program_that_cannot_be_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = on_path(monkeypatch, tmp_path, "")
    program.write_bytes(b"\x7fELF")
    with pytest.raises(ProgramError, match="cannot be run"):
        find_nats_server()


def test_a_program_that_never_answers_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_path(monkeypatch, tmp_path, "exec /bin/sleep 60")
    monkeypatch.setattr("relay.broker.program._TIMEOUT_S", 0.05)
    with pytest.raises(ProgramError, match="does not say"):
        find_nats_server()
