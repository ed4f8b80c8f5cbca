"""How a node opens a session: the upgrade, the challenge and the token."""

import pytest

from kubelet.ceiling import OutsideCeilingError
from kubelet.session.link import LinkState
from schemas.frames import SUBPROTOCOL, SUBPROTOCOL_1_1, SUBPROTOCOL_1_2, SUBPROTOCOLS, FrameReader
from schemas.session import CloseCode
from tests.fakes.frames import PAYLOADS
from tests.fakes.node_link import FIRST_WAIT_S, HOUR_MS, Rig, World, claims_of
from tests.fakes.played_relay import PlayedRelay
from tests.fakes.signer import NODE_ID, NOW_MS

pytestmark = pytest.mark.integration


async def test_the_upgrade_contains_only_the_path_and_the_protocol(rig: Rig) -> None:
    async with rig.running():
        end = await rig.relay.next()
        request = end.socket.request
        assert request is not None
        assert request.path == "/devices/connect"
        assert end.socket.subprotocol == SUBPROTOCOL
        assert not {"authorization", "cookie", "user-agent", "sec-websocket-extensions"} & {
            name.lower() for name in request.headers
        }
        whole = str(request)
        assert NODE_ID not in whole


@pytest.mark.parametrize(
    ("spoken", "gets_echo"), [(SUBPROTOCOL_1_2, True), (SUBPROTOCOL_1_1, True), (SUBPROTOCOL, False)]
)
async def test_the_node_speaks_the_newest_subprotocol_of_its_relay(
    world: World, reader: FrameReader, spoken: str, *, gets_echo: bool
) -> None:
    spoken_by_relay = SUBPROTOCOLS[SUBPROTOCOLS.index(spoken) :]
    async with PlayedRelay(reader, subprotocols=spoken_by_relay).running() as relay:
        rig = world.rig(relay)
        async with rig.running():
            end = await rig.opened()
            assert end.socket.subprotocol == spoken
            assert rig.link.flow.gets_echo is gets_echo


@pytest.mark.parametrize(("spoken", "mark"), [(SUBPROTOCOL_1_2, "owner"), (SUBPROTOCOL_1_1, None)])
async def test_what_the_owner_denies_is_marked_for_a_relay_that_knows_the_mark(
    world: World, reader: FrameReader, spoken: str, mark: str | None
) -> None:
    spoken_by_relay = SUBPROTOCOLS[SUBPROTOCOLS.index(spoken) :]
    async with PlayedRelay(reader, subprotocols=spoken_by_relay).running() as relay:
        rig = world.rig(relay)
        rig.worker.failure = OutsideCeilingError("linux.units", "units !ssh*")
        async with rig.running():
            end = await rig.opened()
            await end.send("cmd")
            answer = (await end.receive("cmd_ack")).payload
    assert (answer["error"]["code"], answer.get("denied_by")) == ("E_SAFETY_DENIED", mark)
    [line] = rig.log.entries("outside the ceiling")
    assert (line["kind"], line["rule"]) == ("linux.units", "units !ssh*")
    assert line["correlation_id"] == answer["error"]["correlation_id"]


@pytest.mark.holds("RFC-0005/5/device-scope")
async def test_the_node_proves_who_it_is(rig: Rig) -> None:
    async with rig.running():
        end = await rig.relay.next()
        challenge = await end.challenge()
        auth = await end.receive()
    assert (auth.type, auth.in_reply_to) == ("auth", challenge)
    assert auth.payload["node_id"] == NODE_ID
    assert auth.payload["certificate"] == rig.node.leaf_pem + rig.node.root_pem
    assert "resume" not in auth.payload
    claims = claims_of(rig, auth.payload["token"])
    assert len(claims.pop("jti")) == 26
    assert claims == {
        "iss": NODE_ID,
        "sub": NODE_ID,
        "aud": rig.relay.url,
        "nonce": PAYLOADS["challenge"]["nonce"],
        "iat": NOW_MS // 1000,
        "exp": NOW_MS // 1000 + 60,
        "scope": "device:connect",
        "token_class": "device_runtime",
    }


@pytest.mark.parametrize("off_ms", [-HOUR_MS, HOUR_MS], ids=["an hour behind", "an hour ahead"])
async def test_a_token_lives_by_the_clock_of_the_relay(rig: Rig, off_ms: int) -> None:
    async with rig.running():
        end = await rig.relay.next()
        await end.challenge(server_time_ms=NOW_MS + off_ms)
        auth = await end.receive()
    claims = claims_of(rig, auth.payload["token"], now_s=(NOW_MS + off_ms) // 1000)
    assert claims["iat"] == (NOW_MS + off_ms) // 1000


async def test_every_challenge_is_answered_with_a_token_of_its_own(rig: Rig) -> None:
    tokens = []
    async with rig.running():
        for nonce in ("a" * 43, "b" * 43):
            end = await rig.relay.next()
            await end.challenge(nonce=nonce)
            tokens.append(claims_of(rig, (await end.receive()).payload["token"]))
            end.drop()
            (await rig.waits.next()).end()
    assert [claims["nonce"] for claims in tokens] == ["a" * 43, "b" * 43]
    assert tokens[0]["jti"] != tokens[1]["jti"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("https://relay.example", id="another host"),
        pytest.param("{url}/", id="a slash more"),
        pytest.param("{url}0", id="another port"),
        pytest.param("{url}.evil.example", id="ours as a prefix"),
        pytest.param("HTTP://127.0.0.1", id="another spelling"),
        pytest.param("https://127.0.0.1", id="another scheme"),
    ],
)
async def test_a_challenge_under_another_name_is_never_answered(rig: Rig, name: str) -> None:
    async with rig.running():
        end = await rig.relay.next()
        await end.challenge(audience=name.format(url=rig.relay.url))
        assert await end.rest() == ([], CloseCode.NORMAL)
        assert (await rig.waits.next()).seconds == FIRST_WAIT_S
        assert rig.link.state is LinkState.WRONG_AUDIENCE
        (line,) = rig.log.entries("relay names another audience")
        assert (line["named"], line["pinned"]) == (name.format(url=rig.relay.url), rig.relay.url)
