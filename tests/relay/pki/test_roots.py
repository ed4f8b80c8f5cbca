"""Roots and keys as files: made, rotated, damaged, cut short."""

import os
import stat
from pathlib import Path

import pytest
from nacl.signing import SigningKey

from relay.pki.errors import AuthorityError, AuthorityOptionError, AuthorityStateError
from relay.pki.issuing import make_root
from relay.pki.roots import (
    ED25519,
    RootFiles,
    load_or_create_server_key,
    make_server_key,
    read_server_key,
)
from relay.state.key_files import KeyFileError
from schemas.certificates import endorse
from schemas.files import PRIVATE, read_private, write_atomic
from schemas.keys import private_key_to_pem
from tests.fakes.signer import NOW_MS, key_named

Roots = RootFiles[SigningKey]
FIRST_KEY, SECOND_KEY = key_named("the first root"), key_named("the second root")
FIRST = make_root(FIRST_KEY, "first", NOW_MS, 3650, 1)
SECOND = make_root(SECOND_KEY, "second", NOW_MS, 3650, 2)
UNTIL_MS = NOW_MS + 1000


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    roots = RootFiles(tmp_path, ED25519)
    roots.create(FIRST, FIRST_KEY)
    return roots


@pytest.fixture
def rotated(roots: Roots) -> Roots:
    roots.rotate(SECOND, SECOND_KEY, UNTIL_MS, endorse(FIRST_KEY, SECOND))
    return roots


def test_after_a_rotation_both_are_there_with_their_keys(rotated: Roots) -> None:
    assert rotated.current() == SECOND
    assert rotated.trusted(UNTIL_MS - 1) == [SECOND, FIRST]
    assert rotated.trusted(UNTIL_MS) == [SECOND]
    assert (rotated.key_of(SECOND), rotated.key_of(FIRST)) == (SECOND_KEY, FIRST_KEY)
    names = ["root.pem", "previous.pem", "root.key", "previous.key"]
    assert [path.name for path in rotated.files] == names


def test_the_root_before_has_endorsed_the_one_that_issues(roots: Roots) -> None:
    assert roots.endorsement() is None
    roots.rotate(SECOND, SECOND_KEY, UNTIL_MS, endorse(FIRST_KEY, SECOND))
    assert roots.endorsement() == endorse(FIRST_KEY, SECOND)
    roots.certificate.with_name("previous.key").unlink()  # as one may when its time is up
    assert roots.endorsement() == endorse(FIRST_KEY, SECOND)


def test_a_rotation_that_was_cut_short_has_endorsed_nothing(
    roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def cut(self: Path, target: Path) -> Path:
        if target.name == "root.pem":
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", cut)
        with pytest.raises(KeyboardInterrupt):
            roots.rotate(SECOND, SECOND_KEY, UNTIL_MS, endorse(FIRST_KEY, SECOND))
    assert (roots.current(), roots.endorsement()) == (FIRST, None)
    third_key = key_named("the third root")
    third = make_root(third_key, "third", NOW_MS, 3650, 3)
    roots.rotate(third, third_key, UNTIL_MS, endorse(FIRST_KEY, third))
    assert roots.endorsement() == endorse(FIRST_KEY, third)


def test_a_rotation_of_the_first_version_counts_and_has_endorsed_nothing(
    rotated: Roots,
) -> None:
    rotated.certificate.with_name("previous.pem").write_text(f"trusted-until-ms: {UNTIL_MS}\n{FIRST}")
    assert (rotated.trusted(NOW_MS), rotated.endorsement()) == ([SECOND, FIRST], None)


def test_text_around_a_certificate_is_no_part_of_it(roots: Roots) -> None:
    roots.certificate.write_text(f"our root\n{FIRST}what follows\n{SECOND}")
    assert roots.current() == FIRST


def test_a_key_that_was_not_put_in_its_place_yet_is_found(rotated: Roots) -> None:
    key = rotated.certificate.with_name("root.key")
    key.rename(key.with_name("next.key"))
    assert rotated.key_of(SECOND) == SECOND_KEY
    assert rotated.key_of(FIRST) == FIRST_KEY


def test_a_key_is_found_while_a_rotation_gives_it_its_name(
    rotated: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, next_key = (rotated.certificate.with_name(name) for name in ("root.key", "next.key"))
    key.rename(next_key)
    write_atomic(key, private_key_to_pem(FIRST_KEY), PRIVATE)
    seen: list[str] = []

    def then_renamed(path: Path) -> str:
        text = read_private(path)
        if not seen:
            next_key.replace(key)
        seen.append(path.name)
        return text

    monkeypatch.setattr("relay.state.key_files.read_private", then_renamed)
    assert rotated.key_of(SECOND) == SECOND_KEY
    assert seen[0] == "root.key"


@pytest.mark.parametrize(("root", "name"), [(SECOND, "root.key"), (FIRST, "previous.key")])
def test_a_key_that_is_not_there_is_an_error_that_names_it(rotated: Roots, root: str, name: str) -> None:
    rotated.certificate.with_name(name).unlink()
    with pytest.raises(AuthorityError, match=name):
        rotated.key_of(root)


@pytest.mark.parametrize("content", [b"", b"no key", b"\xff\xfe"])
def test_a_damaged_key_is_an_error_that_does_not_show_it(roots: Roots, content: bytes) -> None:
    roots.certificate.with_name("root.key").write_bytes(content)
    with pytest.raises(AuthorityError, match=r"root\.key is damaged: it holds no key$"):
        roots.key_of(FIRST)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param(f"trusted-until-ms: {UNTIL_MS}\n", id="no root"),
        pytest.param(FIRST, id="no time"),
        pytest.param(f"trusted-until-ms: -1\n{FIRST}", id="no time that can be"),
        pytest.param(f"trusted-until-ms: {'9' * 16}\n{FIRST}", id="no time that will be"),
        pytest.param(f"{FIRST}trusted-until-ms: {UNTIL_MS}\n", id="the time behind"),
    ],
)
def test_a_damaged_previous_root_is_an_error_that_names_it(rotated: Roots, content: str) -> None:
    rotated.certificate.with_name("previous.pem").write_text(content)
    with pytest.raises(AuthorityError, match=r"previous\.pem is damaged"):
        rotated.trusted(NOW_MS)


@pytest.mark.parametrize("content", [b"", b"no root", b"\xff\xfe", b"x" * 20_000], ids=len)
def test_a_root_that_cannot_be_read_back_is_damaged(roots: Roots, content: bytes) -> None:
    roots.certificate.write_bytes(content)
    with pytest.raises(AuthorityError, match=r"root\.pem is damaged"):
        roots.current()


def test_a_root_is_never_overwritten_nor_made_beside_a_key_of_another(roots: Roots) -> None:
    with pytest.raises(AuthorityOptionError, match="holds a CA already"):
        roots.create(SECOND, SECOND_KEY)
    roots.certificate.unlink()
    with pytest.raises(AuthorityStateError, match=r"root\.key is there without its root"):
        roots.create(SECOND, SECOND_KEY)
    with pytest.raises(AuthorityStateError, match="relay ca init"):
        roots.current()


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
