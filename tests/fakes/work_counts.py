"""Counts what is done with manifests: how often JSON that holds one is parsed, encoded and validated.

The real functions run; each is counted on its way.
"""

import json
from collections import Counter
from typing import Any

import pytest
import rfc8785

from schemas.registry import Validator

_SIGNED = "node_attestation"


class WorkCounts:
    """The counts since it was made, until ``patch`` is undone.

    Attributes:
        counts: how often a manifest was ``parsed``, ``encoded`` and ``validated``.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        decode, encode, dumps = json.JSONDecoder.raw_decode, json.JSONEncoder.encode, rfc8785.dumps
        is_valid = Validator.is_valid

        def counted_decode(decoder: json.JSONDecoder, text: str, idx: int = 0) -> tuple[Any, int]:
            self._count("parsed", _SIGNED in text)
            return decode(decoder, text, idx)

        def counted_encode(encoder: json.JSONEncoder, value: Any) -> str:
            text = encode(encoder, value)
            self._count("encoded", _SIGNED in text)
            return text

        def counted_dumps(value: Any) -> bytes:
            data = dumps(value)
            self._count("encoded", _SIGNED.encode() in data)
            return data

        def counted_is_valid(validator: Validator, value: object) -> bool:
            self._count("validated", isinstance(value, dict) and _SIGNED in value)
            return is_valid(validator, value)

        patch.setattr(json.JSONDecoder, "raw_decode", counted_decode)
        patch.setattr(json.JSONEncoder, "encode", counted_encode)
        patch.setattr(rfc8785, "dumps", counted_dumps)
        patch.setattr(Validator, "is_valid", counted_is_valid)

    def _count(self, work: str, is_of_a_manifest: bool) -> None:  # noqa: FBT001 - private, and named at no call
        if is_of_a_manifest:
            self.counts[work] += 1
