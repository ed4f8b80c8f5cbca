from pathlib import Path

import pytest

from relay.mcp_api.followed_resources import MAX_FOLLOWED, FollowedResources
from schemas.registry import SchemaRegistry
from tests.fakes.followed import URI, Followed


@pytest.fixture
def followed(tmp_path: Path, registry: SchemaRegistry) -> Followed:
    return Followed(tmp_path, registry)


async def test_updates_carry_the_uri_that_was_followed(followed: Followed) -> None:
    agent, updated = followed.agent(), list[str]()
    resources = FollowedResources(followed.resource, agent, updated.append)
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


def test_the_number_of_resources_is_limited(followed: Followed) -> None:
    resources = FollowedResources(followed.resource, followed.agent(), lambda _: None)
    uris = [f"{URI}?cap=c{number}" for number in range(MAX_FOLLOWED + 1)]
    assert [resources.add(uri) for uri in uris] == [True] * MAX_FOLLOWED + [False]
    resources.close()
    assert resources.add(uris[-1])
