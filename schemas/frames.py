"""The frames of the session between relay and node: one JSON object each, closed schemas.

Must not know in which state a session is: that is ``session``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.registry import SchemaRegistry, Validator
from schemas.strict_json import StrictJsonError, loads

SUBPROTOCOL = "edge-kubelet.v1"
CONNECT_PATH = "/devices/connect"
MAX_FRAME_BYTES = 256 * 1024
MAX_FRAME_BYTES_BEFORE_WELCOME = 8 * 1024

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

FRAME_TYPES = (
    "challenge",
    "auth",
    "welcome",
    "announce",
    "announce_ack",
    "heartbeat",
    "heartbeat_ack",
    "cmd",
    "cmd_ack",
    "cmd_cancel",
    "renew",
    "renew_ack",
    "retire",
    "retire_ack",
    "bye",
)


class FrameError(ValueError):
    """Bytes that are not a frame. ``type`` is the frame's type where it could be told."""

    def __init__(self, reason: str, type_: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.type = type_


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a session. ``msg_id`` and ``in_reply_to`` are ULIDs in upper case."""

    type: str
    msg_id: str
    payload: Mapping[str, Any]
    in_reply_to: str | None = None

    def encode(self) -> str:
        """Return the frame as the text that travels: ASCII, no spaces.

        Raises:
            ValueError: the payload holds a number that JSON has no word for.
        """
        message: dict[str, Any] = {"type": self.type, "msg_id": self.msg_id}
        if self.in_reply_to is not None:
            message["in_reply_to"] = self.in_reply_to
        message["payload"] = self.payload
        return _ENCODER.encode(message)


class FrameReader:
    """Turns texts into frames. Compiles a frame's document when one of its type first comes in.

    Each end receives only some of the types, and a compiled document takes a quarter of a mebibyte.
    """

    def __init__(self, registry: SchemaRegistry) -> None:
        self._registry = registry
        self._validators: dict[str, Validator] = {}

    def read(self, text: str | bytes, max_bytes: int) -> Frame:
        """Return the frame that ``text``, of at most ``max_bytes``, holds.

        Raises:
            FrameError: too large, not strict JSON, an unknown type, or not of that type's schema.
        """
        try:
            message = loads(text, max_bytes=max_bytes)
        except StrictJsonError as error:
            raise FrameError(error.reason) from None
        type_ = message.get("type") if isinstance(message, dict) else None
        if type_ not in FRAME_TYPES:
            raise FrameError("an unknown frame type")
        if not self._validator(type_).is_valid(message):
            raise FrameError("does not fit the schema of its type", type_)
        return Frame(message["type"], message["msg_id"], message["payload"], message.get("in_reply_to"))

    def _validator(self, type_: str) -> Validator:
        known = self._validators.get(type_)
        if known is None:
            known = self._validators[type_] = self._registry.load(f"session.{type_}@1.0.0")
        return known
