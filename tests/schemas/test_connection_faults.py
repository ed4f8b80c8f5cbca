import socket
import ssl
from pathlib import Path

import pytest

from schemas.connection_faults import connection_advice, connection_reason, no_http_reason
from schemas.tls import TlsFilesError

NASTY = "\n\x1b[31m\u202e" * 1000


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
