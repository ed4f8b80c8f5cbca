import pytest

from relay.streams.caller_tools.session import PendingRequest, SessionRequests
from schemas.payloads import CallerToolResult

KIB = 1024


def request(number: int = 0) -> PendingRequest:
    return PendingRequest(f"r{number}", "tool", "correlation", arrived=0.0)


def payload(number: int = 0) -> CallerToolResult:
    return {"session_id": "s", "request_id": f"r{number}", "result": number}


def ended(count: int, size: int) -> SessionRequests:
    requests = SessionRequests()
    for number in range(count):
        requests.add(request(number))
        requests.end(f"r{number}", payload(number), size, float(number))
    return requests


def test_a_request_is_pending_until_it_ends() -> None:
    requests, pending = SessionRequests(), request()
    requests.add(pending)
    assert (len(requests), list(requests), requests.find("r0")) == (1, [pending], pending)
    assert requests.is_known("r0")
    assert requests.answer_to("r0") is None
    requests.end("r0", payload(), 10, 1.0)
    assert (len(requests), requests.find("r0")) == (0, None)
    assert requests.is_known("r0")
    assert requests.answer_to("r0") == payload()


def test_a_request_that_is_withdrawn_is_known_and_has_no_answer() -> None:
    requests = SessionRequests()
    assert requests.withdraw("r0") is None
    requests.add(request())
    withdrawn = requests.withdraw("r0")
    assert withdrawn is not None
    assert requests.is_known("r0")
    assert requests.answer_to("r0") is None
    assert requests.kept_answers() == []


def test_answers_are_kept_in_order_until_they_are_old() -> None:
    requests = ended(3, 10)
    assert [answer["result"] for answer in requests.kept_answers()] == [0, 1, 2]
    requests.forget_before(2.0)
    assert not requests.is_known("r1")
    assert [answer["result"] for answer in requests.kept_answers()] == [2]


def test_the_oldest_answers_make_space_for_newer_ones_and_stay_known() -> None:
    requests = ended(3, 200 * KIB)
    assert [answer["result"] for answer in requests.kept_answers()] == [1, 2]
    assert requests.is_known("r0")


def test_a_bounded_number_is_known() -> None:
    requests = ended(300, 10)
    assert not requests.is_known("r43")
    assert requests.is_known("r44")


@pytest.mark.parametrize(
    ("delivered", "streams", "reached"), [(False, 0, False), (False, 1, True), (True, 0, True)]
)
def test_a_request_has_reached_its_caller_by_an_answer_or_by_a_stream(
    *, delivered: bool, streams: int, reached: bool
) -> None:
    pending = request()
    pending.delivered = delivered
    pending.streams.update(range(streams))
    assert pending.has_reached_caller is reached
