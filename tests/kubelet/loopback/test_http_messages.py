import io
import string
from http import HTTPStatus
from http.client import parse_headers

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubelet.loopback import BadRequestError, read_request

LINE = b"GET /readyz HTTP/1.1\r\n"


def test_a_request_is_its_method_its_target_and_its_headers() -> None:
    request = read_request(io.BytesIO(b"GET /readyz?x=1 HTTP/1.1\r\nHost: localhost\r\nX: 1\r\nX: 2\r\n\r\n"))
    assert request is not None
    assert (request.method, request.target) == ("GET", "/readyz?x=1")
    assert list(request.headers) == [("Host", "localhost"), ("X", "1"), ("X", "2")]


def test_a_connection_that_is_closed_at_once_is_no_request() -> None:
    assert read_request(io.BytesIO(b"")) is None


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET  / HTTP/1.1\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET / x HTTP/1.1\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET /\x00 HTTP/1.1\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET /\xff HTTP/1.1\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (b"\r\n", HTTPStatus.BAD_REQUEST),
        (b"GET / HTTP/2.0\r\n\r\n", HTTPStatus.HTTP_VERSION_NOT_SUPPORTED),
        (b"GET /" + b"x" * 65537, HTTPStatus.REQUEST_URI_TOO_LONG),
        (LINE + b"no colon\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (LINE + b"Host : localhost\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (LINE + b"Host: localhost\r\n continued\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (LINE + b"Host: localhost\rX: 1\r\n\r\n", HTTPStatus.BAD_REQUEST),
        (LINE + b"Host: localhost\r\n", HTTPStatus.BAD_REQUEST),
        (LINE + b"Host: local", HTTPStatus.BAD_REQUEST),
        (LINE + b"X: 1\r\n" * 101, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE),
    ],
)
def test_what_is_no_request_has_a_status(head: bytes, status: HTTPStatus) -> None:
    with pytest.raises(BadRequestError) as refused:
        read_request(io.BytesIO(head))
    assert refused.value.status == status


@given(
    st.lists(
        st.tuples(
            st.text(string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~", min_size=1),
            st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_categories=["Cc"])),
        )
    )
)
def test_the_standard_library_reads_the_same_headers(fields: list[tuple[str, str]]) -> None:
    section = "".join(f"{name}: {value}\r\n" for name, value in fields).encode("latin-1") + b"\r\n"
    request = read_request(io.BytesIO(LINE + section))
    assert request is not None
    theirs = parse_headers(io.BytesIO(section)).items()
    assert [(name, value.strip(" \t")) for name, value in theirs] == list(request.headers)


@given(st.binary(max_size=200), st.sampled_from([b"", LINE]))
def test_any_bytes_are_a_request_or_refused(rest: bytes, beginning: bytes) -> None:
    data = beginning + rest
    try:
        request = read_request(io.BytesIO(data))
    except BadRequestError:
        return
    assert request is None or data.startswith(request.method.encode())
