import json
from typing import Any

import pytest

from relay.calls.stream_port import TelemetryQueryError
from relay.fleet.node_names import UnknownNodeError
from schemas.labels import NodeName
from schemas.times import dated, iso
from tests.fakes.followed import FOLLOWED, SUBSCRIBE, URI, Followed
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT


def read(followed: Followed, uri: str = URI, **agent: Any) -> Any:
    text = followed.resource.content(followed.agent(**agent), uri)
    return None if text is None else json.loads(text)


async def test_the_latest_sample_is_read_with_the_parts_that_the_agent_wants(followed: Followed) -> None:
    await followed.subscribe(followed.agent("narrow"), include=["cpu"])
    await followed.subscribe(followed.agent("wide"))
    followed.sample()
    assert read(followed, sub="narrow").keys() == {"ts_ms", "ts", "node_id", "uptime_s", "cpu"}
    assert read(followed, sub="wide").keys() == {"ts_ms", "ts", "node_id", "uptime_s", "cpu", "load"}
    assert read(followed, sub="no-subscriber") == read(followed, sub="wide")


async def test_right_after_the_call_its_own_sample_is_the_latest(followed: Followed) -> None:
    answer = await followed.subscribe(followed.agent())
    # A resource is text for a model, and of no schema.
    assert read(followed) == dated(answer.result)


async def test_the_history_has_what_was_sampled_after_a_time(followed: Followed) -> None:
    await followed.subscribe(followed.agent())
    for _ in range(3):
        followed.sample()
    times = [sample["ts_ms"] for sample in read(followed, f"{URI}?since_ms=0")["samples"]]
    assert times[0] == NOW_MS
    assert read(followed, f"{URI}?since_ms=0")["samples"][0]["ts"] == iso(NOW_MS)
    assert len(times) == 4
    later = read(followed, f"{URI}?since_ms={times[2]}")["samples"]
    assert [sample["ts_ms"] for sample in later] == times[3:]


async def test_of_a_history_that_is_too_long_the_oldest_samples_are_lost(followed: Followed) -> None:
    agent = followed.agent()
    await followed.subscribe(agent)
    for _ in range(10):
        followed.sample()
    whole = json.loads(followed.resource.content(agent, f"{URI}?since_ms=0") or "null")
    cut = json.loads(followed.resource.content(agent, f"{URI}?since_ms=0", 500) or "null")
    assert 1 <= len(cut["samples"]) < len(whole["samples"])
    assert cut["samples"] == whole["samples"][-len(cut["samples"]) :]
    assert cut["lost"] == len(whole["samples"]) - len(cut["samples"])


async def test_an_agent_that_reads_too_seldom_is_told_how_many_samples_it_has_lost(
    followed: Followed,
) -> None:
    agent = followed.agent()
    await followed.subscribe(agent)
    for _ in range(350):
        followed.sample()
    history = json.loads(followed.resource.content(agent, f"{URI}?since_ms=0") or "")
    assert (len(history["samples"]), history["lost"]) == (300, 50)
    followed.sample()
    assert json.loads(followed.resource.content(agent, f"{URI}?since_ms=0") or "")["lost"] == 0


async def test_samples_after_the_nodes_clock_was_set_back_are_read_once(followed: Followed) -> None:
    await followed.subscribe(followed.agent())
    followed.sample()
    last_ms = read(followed, f"{URI}?since_ms=0")["samples"][-1]["ts_ms"]
    for times in ([NOW_MS - 3000, NOW_MS - 2000], [NOW_MS - 1000], []):
        for ts_ms in times:
            followed.sample(ts_ms=ts_ms)
        history = read(followed, f"{URI}?since_ms={last_ms}")
        assert ([sample["ts_ms"] for sample in history["samples"]], history["lost"]) == (times, 0)


async def test_a_node_without_a_subscriber_has_no_telemetry(followed: Followed) -> None:
    assert read(followed) is None
    await followed.subscribe(followed.agent())
    with pytest.raises(UnknownNodeError):
        read(followed, URI.replace(NODE_ID, OTHER_NODE_ID))


@pytest.mark.parametrize("reference", [NODE_ID, NODE_ID[:8], "greenhouse%20pi"])
async def test_a_node_is_named_by_its_id_the_beginning_of_it_or_its_label(
    followed: Followed, reference: str
) -> None:
    followed.hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi")})
    agent, notified = followed.agent(), []
    await followed.subscribe(agent)
    uri = URI.replace(NODE_ID, reference)
    assert followed.resource.follow(agent, uri, lambda: notified.append(1)) is not None
    followed.sample()
    assert notified == [1]
    assert read(followed, uri)["node_id"] == NODE_ID


async def test_reading_needs_the_same_rights_as_calling(followed: Followed) -> None:
    await followed.subscribe(followed.agent())
    with pytest.raises(UnknownNodeError):
        read(followed, tenant="elsewhere")
    assert followed.resource.follow(followed.agent(tenant="elsewhere"), URI, print) is None
    assert read(followed, scopes=["tools:call:reversible"]) is None
    assert followed.resource.follow(followed.agent(scopes=["tools:call:reversible"]), URI, print) is None


async def test_of_several_capabilities_the_agents_own_is_read_or_the_one_that_it_names(
    followed: Followed,
) -> None:
    other = {**FOLLOWED, "cap_id": "another"}
    followed.hub.connect(
        followed.node, capabilities=[FOLLOWED, other], issued_at_ms=followed.hub.clock.advance(1)
    )
    await followed.subscribe(followed.agent("a"), tool=SUBSCRIBE.replace("sysmetrics", "another"))
    await followed.subscribe(followed.agent("b"))
    followed.sample(cap_id="another", uptime_s=11)
    followed.sample(uptime_s=22)
    assert read(followed, sub="a")["uptime_s"] == 11
    assert read(followed, sub="b")["uptime_s"] == 22
    assert read(followed, f"{URI}?cap=sysmetrics", sub="a")["uptime_s"] == 22
    assert read(followed, f"{URI}?cap=none", sub="a") is None


@pytest.mark.parametrize(
    "uri",
    [
        pytest.param(f"{URI}/more", id="a longer path"),
        pytest.param(f"{URI}?since_ms={'9' * 5000}", id="a huge number"),
        pytest.param(f"{URI}?since_ms=\u0661", id="a digit of another script"),
        pytest.param("node://a/b/telemetry", id="a path"),
        pytest.param(URI.upper(), id="in upper case"),
    ],
)
async def test_other_uris_name_nothing(followed: Followed, uri: str) -> None:
    await followed.subscribe(followed.agent())
    assert read(followed, uri) is None


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("since_ms=-1", "since_ms must be a time in milliseconds since 1970, 0 or more"),
        ("since_ms=1e3", "since_ms must be a time in milliseconds since 1970, 0 or more"),
        ("format=csv", "the parameters of this resource are since_ms and cap"),
    ],
)
async def test_a_query_that_is_none_is_an_error_that_says_what_is_allowed(
    followed: Followed, query: str, said: str
) -> None:
    with pytest.raises(TelemetryQueryError, match=said):
        read(followed, f"{URI}?{query}")


async def test_a_resource_can_be_followed_before_there_is_a_stream(followed: Followed) -> None:
    agent, notified = followed.agent(), []
    stop = followed.resource.follow(agent, URI, lambda: notified.append(1))
    assert stop is not None
    assert followed.resource.follow(agent, "fleet://nodes", print) is None
    await followed.subscribe(followed.agent("another-agent"))
    followed.sample()
    assert notified == []  # it has subscribed nothing itself
    await followed.subscribe(agent)
    followed.sample()
    assert notified == [1]
