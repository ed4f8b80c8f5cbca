import threading

import pytest

from schemas.threads import NoThreadError, started


def test_a_thread_that_can_be_started_runs() -> None:
    ran = threading.Event()
    started(threading.Thread(target=ran.set)).join(10)
    assert ran.is_set()


def test_a_system_without_a_thread_left_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_thread_left(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread_left)
    with pytest.raises(NoThreadError, match="raise TasksMax="):
        started(threading.Thread(target=print))
