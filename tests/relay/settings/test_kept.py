"""Settings that the relay was given are kept, and nothing else is read as that."""

from pathlib import Path

import pytest

from relay.settings.kept import KeptSettings, KeptSettingsError, read_kept, write_kept
from schemas.files import UntrustedFileError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "settings.json"


def test_nothing_is_kept_at_first(path: Path) -> None:
    assert read_kept(path) == KeptSettings()


def test_what_is_kept_is_read_back(path: Path) -> None:
    kept = KeptSettings(public_url="https://relay.example", broker="mqtts://mqtt.example", tenant="acme")
    write_kept(path, kept)
    assert read_kept(path) == kept
    assert path.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "7", "{", '{"tenant": 7}', '{"other": "x"}', '{"tenant": null}'),
        pytest.param('{"tenant": "a", "tenant": "b"}', id="twice"),
        pytest.param("[" * 16_000, id="deep"),
    ],
)
def test_a_damaged_file_is_named_and_not_half_read(path: Path, content: str) -> None:
    write_kept(path, KeptSettings())
    path.write_text(content)
    with pytest.raises(KeptSettingsError, match=r"settings\.json is damaged"):
        read_kept(path)


def test_a_file_that_others_can_write_is_not_used(path: Path) -> None:
    write_kept(path, KeptSettings())
    path.chmod(0o666)
    with pytest.raises(UntrustedFileError):
        read_kept(path)
