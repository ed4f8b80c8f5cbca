"""paho's client with a network thread that is watched.

Must not know what is published or read.
"""

import logging
from collections.abc import Callable
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion


def _is_no_failed_connect(record: logging.LogRecord) -> bool:
    """Return whether a line of paho says more than its callback for a connection that was not made."""
    return not record.getMessage().startswith("Client is not connected")


class WatchedClient(paho.Client):
    """A client of which both must be set before its thread is started.

    Attributes:
        on_turn: called in each turn of the thread, about once a second while there is a connection.
        on_end: called when the thread ends, by ``disconnect`` or by a fault.
    """

    on_turn: Callable[[], None]
    on_end: Callable[[], None]

    def __init__(self, client_id: str) -> None:
        super().__init__(
            CallbackAPIVersion.VERSION2, client_id=client_id, protocol=MQTTProtocolVersion.MQTTv311
        )
        # Else paho drops the exception of a callback.
        log = logging.getLogger("paho")
        log.addFilter(_is_no_failed_connect)
        self.enable_logger(log)

    def disconnect(self, *arguments: Any, **options: Any) -> MQTTErrorCode:
        """Disconnect for good. That its thread then finds the connection closed is no fault."""
        self.disable_logger()
        return super().disconnect(*arguments, **options)

    def loop_stop(self) -> MQTTErrorCode:
        """Wait for the end of paho's thread, and close the sockets that woke it.

        paho leaves them to the garbage collector, which warns of them where it finds them before the client.
        """
        ended = super().loop_stop()
        self._reset_sockets(sockpair_only=True)
        return ended

    def loop_misc(self) -> MQTTErrorCode:
        """Do what paho does in each turn of its thread."""
        self.on_turn()
        return super().loop_misc()

    def loop_forever(self, *arguments: Any, **options: Any) -> MQTTErrorCode:
        """Run paho's thread."""
        try:
            return super().loop_forever(*arguments, **options)
        finally:
            self.on_end()
