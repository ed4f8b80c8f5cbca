import pytest

from schemas import topics

NODE_ID = "01hzx9k3m4p7q8r9s0t1v2w3xy"
CHANNELS = {
    "identity": (topics.identity, topics.ALL_IDENTITIES),
    "announce": (topics.announce, topics.ALL_ANNOUNCES),
    "heartbeat": (topics.heartbeat, topics.ALL_HEARTBEATS),
}


@pytest.mark.parametrize("channel", CHANNELS)
def test_every_channel_has_a_topic_below_the_node(channel: str) -> None:
    topic_of, subscription = CHANNELS[channel]
    assert topic_of(NODE_ID) == f"$devices/{NODE_ID}/{channel}"
    assert subscription == f"$devices/+/{channel}"
    assert topics.parse(topic_of(NODE_ID)) == (NODE_ID, channel)


def test_a_channel_that_is_new_is_still_told_apart_from_the_node() -> None:
    assert topics.parse(f"$devices/{NODE_ID}/telemetry") == (NODE_ID, "telemetry")


@pytest.mark.parametrize(
    "topic",
    [
        pytest.param("", id="nothing"),
        pytest.param("$devices", id="the root"),
        pytest.param(f"$devices/{NODE_ID}", id="no channel"),
        pytest.param(f"$devices/{NODE_ID}/announce/more", id="a level more"),
        pytest.param(f"/$devices/{NODE_ID}/announce", id="a level before"),
        pytest.param(f"devices/{NODE_ID}/announce", id="another root"),
        pytest.param(f"$DEVICES/{NODE_ID}/announce", id="the root in capitals"),
        pytest.param(f"$devices/{NODE_ID.upper()}/announce", id="the id in capitals"),
        pytest.param(f"$devices/{NODE_ID[:-1]}/announce", id="an id too short"),
        pytest.param(f"$devices/{NODE_ID}0/announce", id="an id too long"),
        pytest.param(f"$devices/{NODE_ID[:-1]}u/announce", id="a letter that no ULID has"),
        pytest.param(f"$devices/{NODE_ID}\n/announce", id="a line break in the id"),
        pytest.param("$devices/+/announce", id="a wildcard"),
        pytest.param("$devices//announce", id="an empty id"),
    ],
)
def test_any_other_topic_names_no_node(topic: str) -> None:
    assert topics.parse(topic) is None
