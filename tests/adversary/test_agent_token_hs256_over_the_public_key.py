"""Attacker: any client, for the relay's public key is public. Tried: a MAC over the token, keyed with that
key, in the hope that the verifier takes the algorithm from the token and the key from its own store.

What must happen: 401, nothing called, a ``token_refused`` line; whatever form of the key was used.
"""

import hmac

import pytest

from schemas.keys import base64url
from tests.fakes.forged import RELAY_KEY, agent_claims, jws, kid_of
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import NODE_ID

pytestmark = pytest.mark.asyncio(loop_scope="module")

PUBLIC_KEY = bytes(RELAY_KEY.verify_key)
FORMS = {
    "raw": PUBLIC_KEY,
    "hex": PUBLIC_KEY.hex().encode(),
    "base64url": base64url(PUBLIC_KEY).encode(),
    "nothing": b"",
}


@pytest.mark.parametrize("alg", ["HS256", "HS384", "HS512"])
@pytest.mark.parametrize("form", FORMS)
async def test_a_mac_that_is_keyed_with_the_public_key_is_refused(
    relay: ServedRelay, alg: str, form: str
) -> None:
    def sign(data: bytes) -> bytes:
        return hmac.digest(FORMS[form], data, alg.replace("HS", "sha"))

    token = jws({"alg": alg, "kid": kid_of(RELAY_KEY), "typ": "JWT"}, agent_claims(relay.hub), sign)
    reply = await relay.call(f"sysecho.{NODE_ID}.echo.invoke", token)
    assert reply.status == 401
    assert relay.refusals() == [("token_refused", HERE, "malformed", 1)]
    assert relay.calls() == []


async def test_a_mac_that_calls_itself_eddsa_is_refused(relay: ServedRelay) -> None:
    def sign(data: bytes) -> bytes:
        return hmac.digest(PUBLIC_KEY, data, "sha512")

    token = jws({"alg": "EdDSA", "kid": kid_of(RELAY_KEY), "typ": "JWT"}, agent_claims(relay.hub), sign)
    assert (await relay.mcp("tools/list", token=token)).status == 401
    assert relay.refusals() == [("token_refused", HERE, "signature", 1)]
