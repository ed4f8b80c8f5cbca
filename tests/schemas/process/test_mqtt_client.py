"""What paho's client logs besides what it calls back with."""

import pytest

from schemas.process.mqtt_client import WatchedClient


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
