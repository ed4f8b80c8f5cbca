import socket
import ssl
from pathlib import Path

import pytest

from schemas.faults import (
    OncePerPlace,
    connection_advice,
    connection_reason,
    no_http_reason,
    place_of,
    summary,
    traceback_text,
    without_secrets,
)
from schemas.tls import TlsFilesError

SECRET = "aGVsbG8gaSBhbSBhIHNlY3JldCB0b2tlbg_-0123456789"
NASTY = "\n\x1b[31m\u202e" * 1000


def raised(error: Exception) -> Exception:
    secret = SECRET  # a variable of the frame
    try:
        raise error  # noqa: TRY301 - what is looked at is its traceback
    except Exception as caught:  # noqa: BLE001 - whatever it is given
        assert secret
        return caught


def test_a_traceback_has_its_places_and_neither_variables_nor_raw_text() -> None:
    text = traceback_text(raised(ValueError(NASTY)))
    first, *frames = text.splitlines()
    assert first.startswith("ValueError: \\n\\x1b[31m\\u202e")
    assert len(first) <= 200
    assert "test_faults.py" in frames[0]
    assert "in raised: raise error" in frames[0]
    assert all(line.isprintable() and line.isascii() for line in text.splitlines())
    assert SECRET not in text


def test_long_opaque_words_of_a_message_are_left_out() -> None:
    assert summary(KeyError(f"Bearer {SECRET}")) == "KeyError: 'Bearer (left out)'"
    assert without_secrets("Session 0123456789abcdef0123456789abcdef crashed") == "Session (left out) crashed"
    assert (
        without_secrets("a word of 26: 01m7xw30dcjkqtrje56azxhjse")
        == "a word of 26: 01m7xw30dcjkqtrje56azxhjse"
    )


def test_what_an_exception_came_from_is_in_its_traceback() -> None:
    try:
        try:
            int("x")
        except ValueError as error:
            raise KeyError("outer") from error
    except KeyError as error:
        text = traceback_text(error)
    assert text.index("KeyError: 'outer'") < text.index("ValueError: invalid literal")


def test_a_group_is_told_with_what_is_in_it() -> None:
    group = raised(ExceptionGroup("some", [raised(ValueError("one")), raised(KeyError("two"))]))
    text = traceback_text(group)
    assert "ValueError: one" in text
    assert "KeyError: 'two'" in text
    assert place_of(group).endswith(" ValueError")


def test_a_chain_without_an_end_and_a_recursion_make_a_text_of_a_few_lines() -> None:
    one, other = raised(ValueError("one")), raised(ValueError("other"))
    one.__cause__, other.__cause__ = other, one

    def recurse() -> None:
        recurse()

    with pytest.raises(RecursionError) as deep:
        recurse()
    assert len(traceback_text(one).splitlines()) == 4
    assert len(traceback_text(deep.value).splitlines()) < 40


def test_an_exception_that_cannot_be_read_is_told_all_the_same() -> None:
    class Crooked(Exception):  # noqa: N818 - what it is called does not matter
        def __str__(self) -> str:
            raise RuntimeError

    assert "its message cannot be read" in summary(Crooked())
    assert summary(ValueError()) == "ValueError"


def test_a_place_is_where_it_was_raised_and_the_type() -> None:
    assert place_of(raised(ValueError("a"))) == place_of(raised(ValueError("b")))
    assert place_of(raised(ValueError())) != place_of(raised(KeyError()))
    assert place_of(ValueError("never raised")) == "? ValueError"


def test_a_place_is_told_of_once_a_minute_with_the_count_of_the_others() -> None:
    once = OncePerPlace()
    assert [once.suppressed_before("a", now) for now in (0.0, 0.1, 59.9)] == [0, None, None]
    assert once.suppressed_before("b", 1.0) == 0
    assert [once.suppressed_before("a", now) for now in (60.0, 61.0, 121.0)] == [2, None, 1]


def test_places_that_are_made_up_without_end_take_no_room() -> None:
    once = OncePerPlace()
    for number in range(1000):
        assert once.suppressed_before(str(number), float(number)) == 0
    assert once.suppressed_before("999", 1000.0) is None
    assert once.suppressed_before("0", 1000.0) == 0, "the oldest was forgotten"


def wrapped(cause: Exception) -> Exception:
    """Return ``cause`` as libraries hand it on: in a group, and in an error that says less."""
    outer = ConnectionError("All connection attempts failed")
    outer.__cause__ = ExceptionGroup("attempts", [cause])
    last = RuntimeError("cannot connect")
    last.__cause__ = outer
    return last


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 9)"), "Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (TlsFilesError("SSL_CERT_FILE names /nope"), "SSL_CERT_FILE names /nope"),
        (OSError(NASTY), NASTY.encode("unicode_escape").decode()[:40]),
    ],
    ids=["system", "name", "file", "hostile"],
)
def test_the_reason_of_a_failed_connection_is_what_the_system_reported(cause: Exception, reason: str) -> None:
    text = connection_reason(wrapped(cause))
    assert text.startswith(reason)
    assert text.isprintable()
    assert len(text) <= 200


def test_a_failed_connection_without_a_report_of_the_system_has_its_own_text() -> None:
    assert connection_reason(RuntimeError("no")) == "no"
    assert connection_reason(TimeoutError()) == "no answer in time"


def ssl_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}] (_ssl.c:1006)")
    error.reason = reason
    return error


def untrusted(code: int) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, "why"
    return error


def test_waiting_for_the_other_end_is_no_fault() -> None:
    error = ssl_error("WRONG_VERSION_NUMBER")
    error.__context__ = ssl.SSLWantReadError()
    assert connection_reason(wrapped(error)) == "what answers does not speak TLS"


def test_what_speaks_no_tls_is_told_apart() -> None:
    error = wrapped(ssl_error("WRONG_VERSION_NUMBER"))
    assert connection_reason(error) == "what answers does not speak TLS"
    assert "http://" in (connection_advice(error) or "")


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (20, "Name the root of its certificate with --root"),
        (9, "Set this machine's clock"),
        (62, "Use a name"),
        (64, "Use a name or address"),
    ],
)
def test_a_certificate_that_is_not_trusted_is_answered_with_what_to_change(code: int, advice: str) -> None:
    assert (connection_advice(wrapped(untrusted(code))) or "").startswith(advice)
    assert connection_reason(untrusted(code)) == "the certificate is not trusted: why"


def test_the_root_that_is_not_its_root_is_named() -> None:
    advice = connection_advice(untrusted(20), Path("/etc/a\x1b.pem")) or ""
    assert advice.startswith("/etc/a\\x1b.pem is not the root of its certificate")
    assert "--servers" in advice


@pytest.mark.parametrize(
    "error",
    [ConnectionRefusedError(111, "no"), ssl_error("BAD_RECORD_MAC"), RuntimeError("no")],
)
def test_other_faults_have_no_advice(error: Exception) -> None:
    assert connection_advice(error) is None


def test_only_a_url_without_tls_may_need_it() -> None:
    assert "https://" in no_http_reason("http://127.0.0.1:8700/mcp")
    assert "https://" not in no_http_reason("https://127.0.0.1:8700/mcp")
