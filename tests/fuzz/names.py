"""Targets: names, addresses, durations, and what a URL or a resource's URI selects."""

from functools import cache, partial
from typing import Final

from relay.auth.permissions import Rights
from relay.calls.envelope import Call
from relay.calls.stream_port import TelemetryQueryError
from relay.fleet.fleet import Fleet
from relay.fleet.node_names import UnknownNodeError
from relay.fleet.tools import Position
from relay.mcp_api.resources import FleetResources, ResourceQueryError
from relay.mcp_api.tool_list import CursorError, ToolEntry, page_of
from relay.mcp_api.url_options import MAX_VALUES, UrlOptionError, UrlOptionReader
from relay.streams.telemetry.resource import TelemetryResource
from schemas import projection, topics
from schemas.addresses import (
    AddressError,
    BrokerAddress,
    collector_url,
    is_loopback,
    mcp_url,
    normal_url,
    parse_broker,
    parse_host_port,
    parse_mcp_url,
)
from schemas.keys import base64url
from schemas.kinds import KindRegistry
from schemas.labels import (
    MAX_LABEL,
    MAX_TAGS,
    NameRuleError,
    NodeName,
    check_tags,
    folded,
    id_prefix_of,
    kept_form,
    label_of,
    legible,
    node_id_of,
    typed_form,
)
from schemas.projection import META_TRACEPARENT
from schemas.registry import SchemaRegistry
from schemas.times import DurationError, duration_text, parse_duration_ms, parse_duration_s
from tests.fakes.hostile_texts import is_clean
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, TENANT
from tests.fuzz import samples
from tests.fuzz.scratch import directory
from tests.fuzz.target import REFUSED, Target, text_of, tried

_TURNS: Final = 10_000
_RIGHTS = Rights.of(TENANT, ())
_OPTIONS = UrlOptionReader(KindRegistry())


@cache
def hub() -> Hub:
    """Return a relay's parts around one node that is connected, has names, and belongs to one tenant."""
    made = Hub(directory() / "named-fleet", SchemaRegistry(), ca=samples.CA)
    made.connect(samples.NODE)
    made.fleet.rename({NODE_ID: NodeName(TENANT, samples.LABEL, ("gateway", "site=north"))})
    return made


def _fleet() -> Fleet:
    return hub().fleet


def tool_name(data: bytes) -> None:
    """A name is a tool's under its canonical form or its alias, and under nothing else."""
    text = text_of(data)
    name = projection.parse(text)
    assert name is None or text in {name.canonical, name.alias}


def topic(data: bytes) -> None:
    """A topic says whose it is in one way."""
    text = text_of(data)
    parsed = topics.parse(text)
    assert parsed is None or text == "$devices/{}/{}".format(*parsed)


def address(data: bytes) -> None:
    """What an address is read as is read as the same again."""
    text = text_of(data)
    for parse in (parse_broker, parse_host_port, normal_url, collector_url):
        parsed = tried(partial(parse, text), AddressError)
        if parsed is REFUSED:
            continue
        assert is_clean(str(parsed))
        if isinstance(parsed, BrokerAddress | str):
            assert parse(str(parsed)) == parsed
        if isinstance(parsed, BrokerAddress):
            assert is_loopback(parsed.host) in {True, False}
    found = tried(partial(parse_mcp_url, text), AddressError)
    assert found is REFUSED or parse_mcp_url(mcp_url(*found)) == found


def duration(data: bytes) -> None:
    """A duration has one normal form, which means the same."""
    text = text_of(data)
    ms = tried(lambda: parse_duration_ms(text), DurationError)
    if ms is REFUSED:
        return
    assert ms > 0
    assert parse_duration_ms(duration_text(ms)) == ms
    assert tried(lambda: parse_duration_s(text), DurationError) in {ms // 1000, REFUSED}


def node_name(data: bytes) -> None:
    """A label or a tag can be shown anywhere, and is not readable as an id."""
    text = text_of(data)
    label = tried(lambda: label_of(text), NameRuleError)
    if label is not REFUSED:
        assert legible(label) == label
        assert is_clean(kept_form(label))
        assert label_of(kept_form(label)) == label
        assert len(label) <= MAX_LABEL
        assert node_id_of(typed_form(label)) is None
        assert id_prefix_of(typed_form(label)) is None or label[0] not in "01234567"
        assert not set(label) & set('=*:<>`"\\')
    tags = text.split(",")
    if tried(lambda: check_tags(tags), NameRuleError) is not REFUSED:
        assert len(tags) <= MAX_TAGS
        assert all(map(is_clean, tags))


def node_reference(data: bytes) -> None:
    """A reference names the one node of the tenant by its id, a prefix or its label, and no other node."""
    text = text_of(data)
    node_id = tried(lambda: _fleet().names.resolve(TENANT, text), UnknownNodeError)
    if node_id is not REFUSED:
        assert node_id == NODE_ID
        assert NODE_ID.startswith(text.lower()) or folded(text) == folded(samples.LABEL)
    assert tried(lambda: _fleet().names.resolve("another", text), UnknownNodeError) is REFUSED


def url_query(data: bytes) -> None:
    """A query selects what it says or is refused, and is never wider: what is given more than once counts."""
    text = text_of(data)
    options = tried(lambda: _OPTIONS.read(text), UrlOptionError)
    if options is REFUSED:
        return
    selection = options.selection
    assert max(map(len, (selection.nodes, selection.kinds, selection.tags))) <= MAX_VALUES
    for name, narrowed in (("nodes", selection.nodes), ("kinds", selection.kinds), ("tags", selection.tags)):
        assert narrowed or not f"&{text}".count(f"&{name}=")
    check_tags(selection.tags[:1])
    tried(lambda: selection.node_ids(_fleet().reach, _RIGHTS), UnknownNodeError)


def cursor(data: bytes) -> None:
    """A cursor is a place behind which a page can begin, or refused."""
    given: list[Position] = []

    def listed(after: Position, _count: int) -> list[ToolEntry]:
        given.append(after)
        return []

    for text in (text_of(data), base64url(data)):
        if tried(partial(page_of, listed, text), CursorError) is not REFUSED:
            turn, name = given.pop()
            assert 0 <= turn < _TURNS
            assert is_clean(name)


def resource(data: bytes) -> None:
    """A resource's query is answered from the tenant's own nodes, or refused without repeating it."""
    text = text_of(data)
    path, _, query = text.partition("?")
    errors = (ResourceQueryError, TelemetryQueryError, UnknownNodeError)
    fleet, principal = FleetResources(_fleet()), hub().authenticator.identify(_token())
    found = tried(lambda: fleet.read(_RIGHTS, path, query), *errors)
    assert found in {None, REFUSED} or path in {"nodes", "changes"}
    assert NODE_ID not in str(tried(lambda: fleet.read(Rights.of("another", ()), path, query), *errors))
    telemetry = TelemetryResource(hub().telemetry, _fleet())
    uri = f"node://{path}/telemetry" + (f"?{query}" if query else "")
    assert tried(lambda: telemetry.content(principal, uri), *errors) in {None, REFUSED}


@cache
def _token() -> str:
    return hub().token()


def trace_parent(data: bytes) -> None:
    """A trace context is passed on in its own form, or ignored."""
    text = text_of(data)
    call = Call({"params": {"_meta": {META_TRACEPARENT: text}}}, text)
    if call.trace is not None:
        again = Call({}, call.trace.traceparent("1" * 16)).trace
        assert again is not None
        assert (again.trace_id, again.flags) == (call.trace.trace_id, call.trace.flags)
        assert call.trace.trace_id in text


TARGETS: Final = {
    "tool_name": Target(tool_name, samples.NAMES, max_bytes=128),
    "topic": Target(topic, samples.TOPICS, max_bytes=256),
    "address": Target(address, samples.ADDRESSES, max_bytes=512),
    "duration": Target(duration, samples.DURATIONS, max_bytes=128),
    "node_name": Target(node_name, samples.NODE_NAMES, max_bytes=1024),
    "node_reference": Target(node_reference, samples.REFERENCES, max_bytes=256),
    "url_query": Target(url_query, samples.QUERIES),
    "cursor": Target(cursor, samples.CURSORS, max_bytes=256),
    "resource": Target(resource, samples.RESOURCES, max_bytes=512),
    "trace_parent": Target(trace_parent, samples.TRACES, max_bytes=128),
}
