"""What paho's client logs besides what it calls back with, and what it leaves open."""

import psutil
import pytest

from kubelet.announce.mqtt import WatchedClient
from tests.fakes.ports import unused_port


@pytest.mark.integration
def test_a_turn_without_a_connection_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    # paho takes one after each connect that failed, of which the program has logged the reason.
    client = WatchedClient("edge-test")
    assert client.loop(0.0) == 4  # MQTT_ERR_NO_CONN
    assert caplog.records == []


def test_the_exception_of_a_callback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_arguments: object) -> None:
        raise LookupError("a fault of ours")

    client = WatchedClient("edge-test")
    client.on_publish = broken
    with pytest.raises(LookupError):
        client._do_on_publish(1, None, None)  # type: ignore[arg-type]  # noqa: SLF001 - as paho's thread calls
    assert [record.name for record in caplog.records] == ["paho"]


@pytest.mark.integration
def test_nothing_of_it_is_open_once_its_thread_has_ended() -> None:
    process = psutil.Process()
    before = process.num_fds()
    client = WatchedClient("edge-test")
    client.on_turn = client.on_end = lambda: None
    client.connect_async("127.0.0.1", unused_port())
    client.loop_start()
    assert process.num_fds() > before
    client.disconnect()
    client.loop_stop()
    assert process.num_fds() <= before
