import json
from http import HTTPStatus

import pytest

from kubelet.loopback import (
    HEALTH_PATH,
    MANIFEST_PATH,
    READINESS_PATH,
    LoopbackResponse,
    Pages,
    Readiness,
)
from schemas.health import Health
from tests.fakes.loopback_state import ETAG, QUOTED, WIRE, LoopbackState

BOUND_S = 30
HOST = ("Host", "127.0.0.1:8700")
KNOWN = [MANIFEST_PATH, HEALTH_PATH, READINESS_PATH]


@pytest.fixture
def pages(state: LoopbackState) -> Pages:
    return Pages(state.manifest, state.readiness)


def get(pages: Pages, path: str, *headers: tuple[str, str]) -> LoopbackResponse:
    return pages.respond("GET", path, [HOST, *headers])


def test_before_the_first_manifest_there_is_none(pages: Pages, state: LoopbackState) -> None:
    state.published = None
    answer = get(pages, MANIFEST_PATH)
    assert answer.status == HTTPStatus.NOT_FOUND
    assert json.loads(answer.body) == {"error": "no manifest has been published yet"}
    assert answer.body.count(b"\n") == 1


@pytest.mark.parametrize(
    "known", [QUOTED, f"W/{QUOTED}", "*", f'"other", {QUOTED}', f'"other",W/{QUOTED},"third"']
)
def test_a_manifest_that_the_asker_has_is_not_sent_again(pages: Pages, known: str) -> None:
    answer = get(pages, MANIFEST_PATH, ("If-None-Match", known))
    assert (answer.status, answer.body) == (HTTPStatus.NOT_MODIFIED, b"")
    assert answer.headers == {"ETag": QUOTED}


@pytest.mark.parametrize("known", ["", '"other"', ETAG, f'"{ETAG}'])
def test_a_manifest_that_the_asker_has_not_is_sent(pages: Pages, known: str) -> None:
    assert get(pages, MANIFEST_PATH, ("If-None-Match", known)).body == WIRE


def test_the_daemon_is_healthy_while_it_answers(pages: Pages, state: LoopbackState) -> None:
    state.ready = Readiness(ready=False, subsystems={})
    answer = get(pages, HEALTH_PATH)
    assert (answer.status, json.loads(answer.body)) == (HTTPStatus.OK, {"status": "ok"})


def test_the_daemon_is_not_healthy_once_a_loop_of_it_has_stalled(pages: Pages, state: LoopbackState) -> None:
    stalled = Health(started=True, live=False, ready=True)
    state.ready = Readiness(
        ready=True, subsystems={"manifest": Health.passive(ready=False), "relay": stalled}
    )
    answer = get(pages, HEALTH_PATH)
    assert answer.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert json.loads(answer.body) == {"status": "stalled", "stalled": ["relay"]}


@pytest.mark.parametrize(("ready", "status"), [(True, 200), (False, 503)])
def test_readiness_is_told_by_status_and_by_subsystem(
    pages: Pages, state: LoopbackState, *, ready: bool, status: int
) -> None:
    state.ready = Readiness(
        ready=ready,
        subsystems={
            "relay": Health(started=True, live=True, ready=False, state="connecting"),
            "broker": Health.passive(ready=True),
        },
    )
    answer = get(pages, READINESS_PATH)
    assert answer.status == status
    assert json.loads(answer.body) == {
        "ready": ready,
        "subsystems": {
            "relay": {"started": True, "live": True, "ready": False, "state": "connecting"},
            "broker": {"started": True, "live": True, "ready": True},
        },
    }


def test_state_is_read_anew_for_every_request(pages: Pages, state: LoopbackState) -> None:
    get(pages, MANIFEST_PATH)
    state.published = (b"{}", "cd" * 32)
    answer = get(pages, MANIFEST_PATH, ("If-None-Match", QUOTED))
    assert (answer.status, answer.body) == (HTTPStatus.OK, b"{}")


@pytest.mark.parametrize("path", KNOWN)
def test_head_is_answered_like_get(pages: Pages, path: str) -> None:
    assert pages.respond("HEAD", path, [HOST]) == get(pages, path)


@pytest.mark.parametrize("path", KNOWN)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "BREW"])
def test_any_other_method_on_a_known_path_is_not_allowed(pages: Pages, path: str, method: str) -> None:
    answer = pages.respond(method, path, [HOST])
    assert (answer.status, answer.headers) == (HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "*",
        "/healthz/",
        "/HEALTHZ",
        "/.well-known/",
        "/.well-known/../healthz",
        "/%68ealthz",
        "healthz",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_any_other_path_is_not_found(pages: Pages, path: str, method: str) -> None:
    answer = pages.respond(method, path, [HOST])
    assert (answer.status, json.loads(answer.body)) == (HTTPStatus.NOT_FOUND, {"error": "Not Found"})


def test_a_query_does_not_matter(pages: Pages) -> None:
    assert get(pages, HEALTH_PATH + "?verbose=1") == get(pages, HEALTH_PATH)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:1", "localhost", "LocalHost:65535", "[::1]", "[::1]:8700", " localhost "],
)
def test_our_own_names_are_answered(pages: Pages, host: str) -> None:
    assert pages.respond("GET", HEALTH_PATH, [("hOsT", host)]).status == HTTPStatus.OK


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param(["evil.example"], id="rebound"),
        pytest.param(["127.0.0.1:\u0661"], id="digit of another script"),
        pytest.param(["127x0x0x1"], id="dots are dots"),
        pytest.param(["localhost\nx"], id="second line"),
    ],
)
@pytest.mark.parametrize("path", [*KNOWN, "/"])
def test_a_request_under_any_other_name_is_misdirected(pages: Pages, path: str, hosts: list[str]) -> None:
    answer = pages.respond("GET", path, [("Host", host) for host in hosts])
    assert answer.status == HTTPStatus.MISDIRECTED_REQUEST
    assert json.loads(answer.body) == {"error": "Misdirected Request"}


@pytest.mark.parametrize(
    "origin", ["http://localhost", "http://127.0.0.1:8700", "https://[::1]:3000", "HTTP://LOCALHOST"]
)
def test_a_page_from_this_machine_may_ask(pages: Pages, origin: str) -> None:
    assert get(pages, HEALTH_PATH, ("Origin", origin)).status == HTTPStatus.OK
