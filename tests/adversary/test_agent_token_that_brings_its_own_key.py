"""Attacker: the owner of a key and a web server. Tried: headers that tell the verifier where to find the key
(``jku``, ``x5u``), that hold it (``jwk``, ``x5c``), or that ask for an extension (``crit``, ``b64``,
``zip``).

What must happen: 401 and a ``token_refused`` line, with a perfect signature of the relay's own key too: such
a header is not even read. Nothing is fetched.
"""

import socket
from typing import Any

import pytest

from schemas.keys import base64url
from tests.fakes.forged import RELAY_KEY, agent_token
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import key_named

pytestmark = pytest.mark.asyncio(loop_scope="module")

ATTACKERS_KEY = key_named("an attacker's own")
JWK = {"kty": "OKP", "crv": "Ed25519", "x": base64url(bytes(ATTACKERS_KEY.verify_key))}


@pytest.mark.parametrize(
    "key", [ATTACKERS_KEY, RELAY_KEY], ids=["the attacker's signature", "the relay's signature"]
)
@pytest.mark.parametrize(
    "header",
    [
        pytest.param({"jwk": JWK}, id="jwk"),
        pytest.param({"jwk": JWK, "kid": "x"}, id="jwk under a new kid"),
        pytest.param({"x5c": ["AAAA"]}, id="x5c"),
        pytest.param({"x5t": "AAAA"}, id="x5t"),
        pytest.param({"crit": ["exp"]}, id="crit"),
        pytest.param({"crit": []}, id="crit of nothing"),
        pytest.param({"b64": False, "crit": ["b64"]}, id="b64"),
        pytest.param({"zip": "DEF"}, id="zip"),
        pytest.param({"cty": "JWT"}, id="a token in a token"),
        pytest.param({"typ": "at+jwt\x1b[31m"}, id="typ"),
        pytest.param({"x": None}, id="anything"),
    ],
)
async def test_a_header_with_more_in_it_than_a_kid_is_refused(
    relay: ServedRelay, header: dict[str, Any], key: Any
) -> None:
    reply = await relay.mcp("tools/list", token=agent_token(relay.hub, header=header, key=key))
    assert reply.status == 401
    assert relay.refusals() == [("token_refused", HERE, "malformed", 1)]
    assert relay.calls() == []


@pytest.mark.parametrize("name", ["jku", "x5u"])
async def test_an_address_in_a_header_is_not_visited(relay: ServedRelay, name: str) -> None:
    with socket.create_server((HERE, 0)) as own_server:
        own_server.setblocking(False)  # noqa: FBT003 - the standard library's own signature
        url = f"http://{HERE}:{own_server.getsockname()[1]}/keys.json"
        reply = await relay.mcp(
            "tools/list", token=agent_token(relay.hub, header={name: url}, key=ATTACKERS_KEY)
        )
        assert reply.status == 401
        assert relay.refusals() == [("token_refused", HERE, "malformed", 1)]
        with pytest.raises(BlockingIOError):
            own_server.accept()
