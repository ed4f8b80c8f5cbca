from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from relay.auth.agent_tokens import AgentName, Principal
from relay.mcp_api.change_streams import MAX_FOLLOWED, PER_AGENT, FollowedResources
from relay.state.names import NodeName
from schemas.registry import SchemaRegistry
from tests.fakes.followed import URI, Followed
from tests.fakes.signer import NODE_ID, TENANT


@pytest.fixture
def followed(tmp_path: Path, registry: SchemaRegistry) -> Followed:
    return Followed(tmp_path, registry)


class Streams:
    """The streams of agents that follow resources of one relay."""

    def __init__(self, followed: Followed) -> None:
        self.followed = followed
        self.held = Counter[AgentName]()

    def opened(
        self, agent: Principal | None = None, updated: Callable[[str], None] = lambda _: None
    ) -> FollowedResources:
        agent = agent or self.followed.agent()
        return FollowedResources(self.followed.resource, agent, updated, self.held)


@pytest.fixture
def streams(followed: Followed) -> Streams:
    return Streams(followed)


def capabilities(count: int) -> list[str]:
    return [f"{URI}?cap=c{number}" for number in range(count)]


async def test_updates_carry_the_uri_that_was_followed(followed: Followed, streams: Streams) -> None:
    agent, updated = followed.agent(), list[str]()
    resources = streams.opened(agent, updated.append)
    query = f"{URI}?cap=sysmetrics"
    assert [resources.add(uri) for uri in (URI, URI, query, "fleet://nodes")] == [True, True, True, False]
    await followed.subscribe(agent)
    followed.sample()
    assert updated == [URI, query]
    resources.remove(URI)
    resources.remove(URI)
    followed.sample()
    assert updated == [URI, query, query]
    resources.close()
    assert followed.counted("telemetry_subscriptions") == 0


async def test_a_resource_is_followed_once_however_it_is_spelled(
    followed: Followed, streams: Streams
) -> None:
    agent, updated = followed.agent(), list[str]()
    resources = streams.opened(agent, updated.append)
    spellings = [f"node://{NODE_ID[:length]}/telemetry" for length in range(6, 27)]
    spellings += [f"node://%{ord(NODE_ID[0]):02X}{NODE_ID[1:]}/telemetry", f"{URI}?since_ms=5", f"{URI}?"]
    assert all(resources.add(uri) for uri in spellings)
    await followed.subscribe(agent)
    followed.sample()
    assert updated == spellings[:1]
    resources.remove(spellings[-1])
    assert followed.counted("telemetry_subscriptions") == 0
    assert not streams.held


def test_what_was_followed_by_a_label_can_be_ended_by_it_when_it_names_another_node(
    followed: Followed, streams: Streams
) -> None:
    fleet, uri = followed.hub.fleet, "node://greenhouse/telemetry"
    fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse")})
    resources = streams.opened()
    assert resources.add(uri)
    fleet.rename({NODE_ID: NodeName(TENANT, "shed")})
    resources.remove(uri)
    assert not streams.held


def test_the_number_of_resources_is_limited(streams: Streams) -> None:
    resources, uris = streams.opened(), capabilities(MAX_FOLLOWED + 1)
    assert [resources.add(uri) for uri in uris] == [True] * MAX_FOLLOWED + [False]
    resources.close()
    assert resources.add(uris[-1])


def test_the_number_that_one_agent_follows_by_all_of_its_streams_is_limited(
    followed: Followed, streams: Streams
) -> None:
    opened = [streams.opened() for _ in range(64)]
    followed_by_one = [resources.add(uri) for resources in opened for uri in capabilities(MAX_FOLLOWED)]
    assert followed_by_one.count(True) == PER_AGENT
    assert streams.opened(followed.agent("agent-2")).add(URI)
    opened[0].close()
    assert opened[-1].add(URI)
