"""uvicorn's WebSocket protocol, for which a text that is no UTF-8 is the peer's fault.

uvicorn logs it with a traceback as an error, and this process would count a fault of its own whenever a
peer sends one. Must not know what a text means.
"""

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

_INVALID_DATA = 1007  # RFC 6455 section 7.4.1


class CheckedTexts(WebSocketsSansIOProtocol):
    """A WebSocket that closes with 1007, without a line in the log, for a text that is no UTF-8."""

    def send_receive_event_to_app(self) -> None:
        """Pass a message on, unless it is such a text."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(_INVALID_DATA)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()
