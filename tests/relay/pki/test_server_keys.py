import os
import stat
from pathlib import Path

import pytest

from relay.pki.server_keys import (
    load_or_create_server_key,
    make_server_key,
    read_server_key,
    server_key_to_pem,
)
from relay.state.key_files import KeyFileError
from schemas.files import ExposedFileError
from schemas.keys import private_key_to_pem
from tests.fakes.signer import key_named

ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


def secret_of(random: bytes) -> int:
    return make_server_key(lambda size: random.rjust(size, b"\0")).private_numbers().private_value


def test_every_secret_is_between_one_and_the_order() -> None:
    assert secret_of(b"") == 1
    assert secret_of((ORDER - 2).to_bytes(40, "big")) == ORDER - 1
    assert secret_of((ORDER - 1).to_bytes(40, "big")) == 1


def test_a_key_is_made_once_and_read_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "tls" / "server.key"
    made = load_or_create_server_key(path, os.urandom)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create_server_key(path, os.urandom).private_numbers() == made.private_numbers()
    assert read_server_key(path).public_key() == made.public_key()


@pytest.mark.parametrize("content", ["", "a secret", private_key_to_pem(key_named("a node"))])
def test_what_is_no_such_key_is_neither_shown_nor_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "server.key"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(KeyFileError, match=r"server\.key") as caught:
        load_or_create_server_key(path, os.urandom)
    assert "secret" not in str(caught.value)
    assert path.read_text() == content


def test_a_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "server.key"
    path.write_text(server_key_to_pem(make_server_key(os.urandom)))
    path.chmod(0o640)
    with pytest.raises(ExposedFileError):
        read_server_key(path)
