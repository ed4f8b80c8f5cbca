import hmac
import json
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from schemas.enrolment import NODE, RELAY, JoinToken, JoinTokenError, is_proven, proven
from schemas.keys import base64url, from_base64url

JOIN_ID = "01HZX9K3M4P7Q8R9S0T1V2W3XY"
KEY = bytes(range(32))
TOKEN = JoinToken(JOIN_ID, KEY, b"\xff" * 32)
MESSAGE: dict[str, Any] = {"join_id": JOIN_ID, "nonce": "n" * 43, "own_root": True, "server_time_ms": 7}


def test_a_token_is_one_word_that_an_operator_can_carry() -> None:
    kind, join_id, key, fingerprint = TOKEN.text().split(".")
    assert (kind, join_id) == ("ekj1", JOIN_ID)
    assert (from_base64url(key), from_base64url(fingerprint)) == (KEY, b"\xff" * 32)


@given(key=st.binary(min_size=32, max_size=32), fingerprint=st.binary(min_size=32, max_size=32))
def test_every_token_comes_back_as_it_was(key: bytes, fingerprint: bytes) -> None:
    token = JoinToken(JOIN_ID, key, fingerprint)
    assert JoinToken.parse(token.text()) == token
    assert JoinToken.parse(f"  {token.text()}\n") == token


def test_a_token_does_not_show_its_key() -> None:
    shown = repr(TOKEN) + str(TOKEN) + f"{TOKEN}"
    assert JOIN_ID in shown
    assert base64url(KEY) not in shown
    assert repr(KEY) not in shown


def other_spelling(text: str) -> str:
    """Return ``text`` with a stray bit at the end of its key, which a lax reader would overlook."""
    kind, join_id, key, fingerprint = text.split(".")
    return ".".join((kind, join_id, key[:-1] + chr(ord(key[-1]) + 1), fingerprint))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("ekj1", id="the prefix alone"),
        pytest.param(TOKEN.text()[:-1], id="cut short"),
        pytest.param(TOKEN.text() + "A", id="too long"),
        pytest.param(TOKEN.text().replace("ekj1", "ekj2"), id="another version"),
        pytest.param(TOKEN.text().lower(), id="in lower case"),
        pytest.param(TOKEN.text().replace(".", " "), id="torn apart"),
        pytest.param(TOKEN.text().replace(JOIN_ID, JOIN_ID[:-1] + "U"), id="no ulid"),
        pytest.param(TOKEN.text().replace(JOIN_ID, JOIN_ID[:-1] + "\u0661"), id="a digit of another script"),
        pytest.param(other_spelling(TOKEN.text()), id="another spelling of the same bytes"),
        pytest.param(TOKEN.text() + "\n" + TOKEN.text(), id="two"),
    ],
)
def test_what_is_no_token_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(JoinTokenError) as caught:
        JoinToken.parse(text)
    assert len(text) < 20 or text not in str(caught.value)
    assert base64url(KEY)[:20] not in str(caught.value)


@given(text=st.text(max_size=200) | st.from_regex(r"ekj1(\.[A-Za-z0-9_-]{20,45}){3}", fullmatch=True))
def test_whatever_the_text_it_is_a_token_or_refused(text: str) -> None:
    try:
        token = JoinToken.parse(text)
    except JoinTokenError:
        return
    assert token.text() == text.strip()


@pytest.mark.parametrize(
    ("speaker", "line"),
    [(NODE, b"edge-kubelet enrol request\n"), (RELAY, b"edge-kubelet enrol response\n")],
)
def test_a_second_implementation_makes_the_same_proof(speaker: bytes, line: bytes) -> None:
    said = proven(MESSAGE, KEY, speaker)
    expected = hmac.new(KEY, line + rfc8785.dumps(MESSAGE), "sha256").digest()
    assert said == {**MESSAGE, "proof": base64url(expected)}
    assert is_proven(said, KEY, speaker)


def test_a_proof_outlives_the_way_over_the_wire_in_any_order_of_members() -> None:
    said = proven(MESSAGE, KEY, NODE)
    shuffled = json.loads(json.dumps(dict(reversed(said.items())), indent=3))
    assert is_proven(shuffled, KEY, NODE)


def test_a_proof_under_another_key_is_none() -> None:
    assert not is_proven(proven(MESSAGE, bytes(32), NODE), KEY, NODE)


def test_what_one_end_said_cannot_be_sent_back_to_it() -> None:
    assert not is_proven(proven(MESSAGE, KEY, NODE), KEY, RELAY)
    assert not is_proven(proven(MESSAGE, KEY, RELAY), KEY, NODE)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"join_id": JOIN_ID[:-1] + "Z"}, id="another token"),
        pytest.param({"own_root": False}, id="another trust"),
        pytest.param({"own_root": 1}, id="another type"),
        pytest.param({"server_time_ms": 8}, id="another time"),
        pytest.param({"more": "x"}, id="a member more"),
        pytest.param({"proof": "p" * 42 + "o"}, id="a proof out of thin air"),
        pytest.param({"proof": "!" * 43}, id="a proof of another alphabet"),
        pytest.param({"proof": ""}, id="an empty proof"),
    ],
)
def test_whatever_is_changed_shows(change: dict[str, Any]) -> None:
    assert not is_proven({**proven(MESSAGE, KEY, RELAY), **change}, KEY, RELAY)


def test_whatever_is_left_out_shows() -> None:
    said = proven(MESSAGE, KEY, RELAY)
    for name in MESSAGE:
        assert not is_proven({member: said[member] for member in said if member != name}, KEY, RELAY), name
