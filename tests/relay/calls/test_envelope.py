import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.calls.envelope import Call, EnvelopeCheck
from relay.calls.gateway import CallGateway
from relay.settings.config import EnvelopeMode
from schemas.errors import Failure, ToolError
from schemas.process.logs import make_logger
from schemas.projection import (
    META_CORRELATION_ID,
    META_IDEMPOTENCY_KEY,
    META_STEP_ID,
    META_TASK_ID,
    META_TRACEPARENT,
)
from schemas.registry import SchemaRegistry
from tests.fakes.callers import call_of, request_of
from tests.fakes.hub import Hub
from tests.fakes.lines import LogLines
from tests.fakes.routers import ScriptedRouter
from tests.fakes.signer import NODE_ID

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
PING = {"message": "ping"}
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
DOCUMENTS = SchemaRegistry()
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
WOULD = "a call that would be refused"


class Strict:
    """A check in one mode, and what it has logged."""

    def __init__(self, mode: EnvelopeMode = EnvelopeMode.ENFORCE) -> None:
        self.lines = LogLines()
        self.check = EnvelopeCheck(DOCUMENTS, mode, make_logger("relay", self.lines)).check

    def refusal(self, call: Call) -> str | None:
        """Return what a call is refused with; None if it is let through."""
        try:
            self.check(call, "01HZX9K3M4P7Q8R9S0T1V2W3XY")
        except ToolError as error:
            return error.detail if error.failure is Failure.ENVELOPE_INVALID else str(error.failure)
        return None


@pytest.fixture
def strict() -> Strict:
    return Strict()


def message(**members: Any) -> dict[str, Any]:
    good = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": ECHO_NAME, "arguments": PING},
    }
    return {name: value for name, value in (good | members).items() if value is not ...}


def called(**params: Any) -> dict[str, Any]:
    good = {"name": ECHO_NAME, "arguments": PING}
    return message(params={name: value for name, value in (good | params).items() if value is not ...})


def keyed(key: object, **members: Any) -> dict[str, Any]:
    return called(_meta={META_IDEMPOTENCY_KEY: key}) | members


def tracked(token: object) -> dict[str, Any]:
    return called(_meta={"progressToken": token})


def named(name: object) -> dict[str, Any]:
    return called(name=name)


PROGRESS_TOKENS: list[object] = ["", "p-1", 0, -7]
NO_PROGRESS_TOKENS: list[object] = [True, 1.5, None, [], {}]


# --- what is of the form, and what is not ---------------------------------------------------------------

GOOD = [
    pytest.param(message(), id="a call"),
    pytest.param(message(id="a-text"), id="an id that is a text"),
    pytest.param(message(id=0), id="an id of zero"),
    pytest.param(message(id=-1), id="a negative id"),
    pytest.param(message(id=""), id="an empty id"),
    pytest.param(message(meta={}), id="meta"),
    pytest.param(message(idempotencyKey="k"), id="a key of one character"),
    pytest.param(message(idempotencyKey="k" * 128), id="a key of 128 characters"),
    pytest.param(message(idempotencyKey="\U0001f511" * 128), id="a key of 128 that are no ASCII"),
    pytest.param(keyed("k"), id="a key in _meta"),
    pytest.param(keyed("k", idempotencyKey="k"), id="the same key twice"),
    pytest.param(keyed(None), id="no key in _meta"),
    pytest.param(called(_meta=None), id="no _meta"),
    pytest.param(called(_meta=7), id="_meta that MCP would refuse"),
    pytest.param(called(arguments=...), id="no arguments"),
    pytest.param(called(arguments=None), id="arguments of null"),
    pytest.param(called(arguments={}), id="empty arguments"),
    pytest.param(called(arguments={"any": [{}]}), id="arguments that only the tool can judge"),
    pytest.param(called(name="echo"), id="a name that no tool has"),
    pytest.param(called(name=ECHO_NAME.replace(".", "-")), id="an alias"),
    pytest.param(called(more=1), id="params that only MCP can judge"),
    *(pytest.param(tracked(token), id=f"the progress token {token!r}") for token in PROGRESS_TOKENS),
]
BAD = [
    pytest.param({}, "/ violates required", id="nothing"),
    pytest.param(message(id=...), "/ violates required", id="no id"),
    pytest.param(message(id=None), "/id violates type", id="an id of null"),
    pytest.param(message(id=1.5), "/id violates type", id="an id that is a fraction"),
    pytest.param(message(id=True), "/id violates type", id="an id that is a truth"),
    pytest.param(message(id=[1]), "/id violates type", id="an id that is a list"),
    pytest.param(message(jsonrpc=...), "/ violates required", id="no version"),
    pytest.param(message(jsonrpc="1.0"), "/jsonrpc violates const", id="another version"),
    pytest.param(message(jsonrpc=2.0), "/jsonrpc violates const", id="a version that is a number"),
    pytest.param(message(method=...), "/ violates required", id="no method"),
    pytest.param(message(method=""), "/method violates minLength", id="an empty method"),
    pytest.param(message(method=7), "/method violates type", id="a method that is a number"),
    pytest.param(message(params=...), "/tool violates pattern", id="no params, and so no name"),
    pytest.param(message(params=None), "/params violates type", id="params of null"),
    pytest.param(message(params=[ECHO_NAME]), "/params violates type", id="params in a list"),
    pytest.param(message(meta=7), "/meta violates type", id="meta that is no object"),
    pytest.param(message(result={}), "/ violates additionalProperties", id="a result besides"),
    pytest.param(
        message(Method="tools/list"), "/ violates additionalProperties", id="another method besides"
    ),
    pytest.param(message(idempotencyKey=None), "/idempotencyKey violates type", id="a key of null"),
    pytest.param(message(idempotencyKey=7), "/idempotencyKey violates type", id="a key that is a number"),
    pytest.param(message(idempotencyKey=""), "/idempotencyKey violates minLength", id="an empty key"),
    pytest.param(message(idempotencyKey="k" * 129), "/idempotencyKey violates maxLength", id="a long key"),
    pytest.param(keyed(7), "/idempotencyKey violates type", id="in _meta a key that is a number"),
    pytest.param(keyed(""), "/idempotencyKey violates minLength", id="in _meta an empty key"),
    pytest.param(keyed("k" * 129), "/idempotencyKey violates maxLength", id="in _meta a long key"),
    pytest.param(keyed("k", idempotencyKey="l"), "two idempotency keys", id="two keys"),
    pytest.param(keyed(7, idempotencyKey="7"), "two idempotency keys", id="two keys of two types"),
    pytest.param(called(name=...), "/tool violates pattern", id="no name"),
    pytest.param(called(name=None), "/tool violates pattern", id="a name of null"),
    pytest.param(called(name=""), "/tool violates pattern", id="an empty name"),
    pytest.param(called(name=["echo"]), "/tool violates pattern", id="a name in a list"),
    pytest.param(called(name="\necho"), "/tool violates pattern", id="a name behind a line feed"),
    pytest.param(called(name="\ud800"), "/ violates text", id="a name that is no text"),
    pytest.param(called(arguments=[]), "/input violates type", id="arguments in a list"),
    pytest.param(called(arguments="ping"), "/input violates type", id="a text for arguments"),
    pytest.param(called(arguments=False), "/input violates type", id="a truth for arguments"),
    pytest.param(called(arguments=0), "/input violates type", id="zero for arguments"),
    *(
        pytest.param(
            tracked(token),
            "/params/_meta/progressToken must be of type string or integer",
            id=f"the progress token {token!r}",
        )
        for token in NO_PROGRESS_TOKENS
    ),
]


@pytest.mark.holds("ENVELOPE/applied")
@pytest.mark.parametrize("document", GOOD)
def test_a_call_of_the_form_is_let_through(document: dict[str, Any]) -> None:
    for mode in EnvelopeMode:
        strict = Strict(mode)
        assert strict.refusal(Call(document)) is None
        assert strict.lines.entries() == []


@pytest.mark.holds("ENVELOPE/applied", "ENVELOPE/canonical-tool-id")
@pytest.mark.parametrize(("document", "reason"), BAD)
def test_a_call_that_is_not_of_the_form_is_told_the_rule_that_it_breaks(
    strict: Strict, document: dict[str, Any], reason: str
) -> None:
    assert strict.refusal(Call(document)) == f"The request is not a call: {reason}."


def test_nothing_of_the_call_gets_into_the_refusal(strict: Strict) -> None:
    secret = "\x1b[31m correct horse"
    for document in (
        message(**{secret: secret}),
        message(id={secret: secret}),
        message(idempotencyKey=secret * 20),
        called(name=f"\n{secret}"),
        called(arguments=[secret]),
    ):
        told = strict.refusal(Call(document))
        assert told is not None
        assert "horse" not in told
        assert told.isprintable()


# --- modes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("document", "reason"), BAD)
def test_in_shadow_mode_what_would_be_refused_is_logged_with_its_reason_and_when_it_is_off_nothing_is(
    document: dict[str, Any], reason: str
) -> None:
    shadow, off = Strict(EnvelopeMode.SHADOW), Strict(EnvelopeMode.OFF)
    assert shadow.refusal(Call(document)) is off.refusal(Call(document)) is None
    (line,) = shadow.lines.entries()
    assert (line["event"], line["level"], line["reason"]) == (WOULD, "warning", reason)
    assert off.lines.entries() == []


def served(hub: Hub, mode: EnvelopeMode) -> tuple[CallGateway, ScriptedRouter]:
    hub.connect(hub.ca.issue())
    router = ScriptedRouter()
    return hub.gateway(router, mode=mode), router


@pytest.mark.parametrize("mode", EnvelopeMode)
@pytest.mark.parametrize(
    ("name", "arguments", "failure"),
    [
        pytest.param(ECHO_NAME, {}, Failure.ARGUMENTS_INVALID, id="an argument is missing"),
        pytest.param(ECHO_NAME, {"message": 7}, Failure.ARGUMENTS_INVALID, id="an argument of another type"),
        pytest.param("echo", PING, Failure.NAME_UNKNOWN, id="no such tool"),
    ],
)
async def test_a_tools_own_schema_and_its_name_count_in_every_mode(
    hub: Hub, mode: EnvelopeMode, name: str, arguments: object, failure: Failure
) -> None:
    gateway, router = served(hub, mode)
    answer = await gateway.call(call_of(hub.token(), name, arguments))
    assert answer.error is not None
    assert answer.error["code"] == failure.value.code
    words = "Argument `" if failure is Failure.ARGUMENTS_INVALID else failure.value.message.removesuffix(".")
    assert answer.error["message"].startswith(words)
    assert answer.text.startswith(f'{{"message":"{words}')
    assert router.commands == []


@pytest.mark.parametrize("mode", EnvelopeMode)
async def test_a_result_that_does_not_fit_is_refused_in_every_mode(hub: Hub, mode: EnvelopeMode) -> None:
    gateway, router = served(hub, mode)
    router.answer = lambda _: {"ok": True, "result": {}}
    answer = await gateway.call(call_of(hub.token(), ECHO_NAME, PING))
    assert answer.error is not None
    assert answer.error["message"] == Failure.RESULT_INVALID.value.message


@pytest.mark.parametrize("mode", [EnvelopeMode.OFF, EnvelopeMode.SHADOW])
@pytest.mark.parametrize("arguments", [["ping"], "ping", 7], ids=str)
async def test_where_the_form_is_not_enforced_the_tool_refuses_arguments_that_are_no_object(
    hub: Hub, mode: EnvelopeMode, arguments: object
) -> None:
    gateway, router = served(hub, mode)
    answer = await gateway.call(call_of(hub.token(), ECHO_NAME, arguments))
    assert answer.error is not None
    assert answer.error["message"].startswith("The whole of the arguments must be of type object.")
    assert router.commands == []


@pytest.mark.parametrize("mode", EnvelopeMode)
@pytest.mark.parametrize(
    "document",
    [*map(named, (None, 7, [ECHO_NAME], {})), message(id=...), message(id=None)],
    ids=["no name", "a number", "a list", "an object", "no id", "an id of null"],
)
async def test_without_a_name_or_an_id_nothing_is_called_in_any_mode(
    hub: Hub, mode: EnvelopeMode, document: dict[str, Any]
) -> None:
    gateway, router = served(hub, mode)
    answer = await gateway.call(request_of(hub.token(), document))
    assert answer.error is not None
    assert answer.error["suggested_fix"] == Failure.ENVELOPE_INVALID.value.suggested_fix
    assert router.commands == []
    assert [line["decision"] for line in hub.audited()] == ["deny"]


@pytest.mark.parametrize(
    ("mode", "commands"), [(EnvelopeMode.ENFORCE, 0), (EnvelopeMode.SHADOW, 1), (EnvelopeMode.OFF, 1)]
)
async def test_only_the_mode_decides_whether_a_call_with_a_member_too_many_is_made(
    hub: Hub, mode: EnvelopeMode, commands: int
) -> None:
    gateway, router = served(hub, mode)
    answer = await gateway.call(request_of(hub.token(), message(more=1)))
    assert (answer.error is None) is (commands == 1)
    assert len(router.commands) == commands
    assert len(hub.lines.entries(WOULD)) == (mode is EnvelopeMode.SHADOW)
    assert hub.audited()[0]["decision"] == ("allow" if commands else "deny")


# --- the parts of a call --------------------------------------------------------------------------------


@pytest.mark.holds("ENVELOPE/canonical-tool-id")
@pytest.mark.parametrize(
    ("name", "tool_id"),
    [
        pytest.param(ECHO_NAME, f"mcp.tool:{ECHO_NAME}", id="canonical"),
        pytest.param(ECHO_NAME.replace(".", "-"), f"mcp.tool:{ECHO_NAME}", id="alias"),
        pytest.param("echo", "mcp.tool:echo", id="no tool's"),
        pytest.param("", "mcp.tool:", id="empty"),
        pytest.param(7, "mcp.tool:", id="no text"),
    ],
)
def test_a_tool_has_one_id_by_whichever_of_its_names_it_is_called(name: object, tool_id: str) -> None:
    assert Call(called(name=name)).tool_id == tool_id


@pytest.mark.parametrize(
    ("document", "key"),
    [
        pytest.param(message(), None, id="none"),
        pytest.param(message(idempotencyKey="a"), "a", id="at the top"),
        pytest.param(keyed("b"), "b", id="in _meta"),
        pytest.param(keyed("b", idempotencyKey="a"), "a", id="the one at the top first"),
    ],
)
def test_a_key_stands_at_the_top_or_in_meta(document: dict[str, Any], key: str | None) -> None:
    assert Call(document).idempotency_key == key


@pytest.mark.parametrize(
    ("value", "label"),
    [
        pytest.param("task-7", "task-7", id="a text"),
        pytest.param("x" * 128, "x" * 128, id="of 128 characters"),
        pytest.param("x" * 129, None, id="longer"),
        pytest.param(7, None, id="a number"),
        pytest.param(None, None, id="null"),
    ],
)
@pytest.mark.parametrize("name", [META_TASK_ID, META_STEP_ID])
def test_a_label_is_a_short_text_or_none(name: str, value: object, label: str | None) -> None:
    assert Call(called(_meta={name: value})).label(name) == label
    assert Call(message()).label(name) is None


# --- the trace ------------------------------------------------------------------------------------------


def traced(in_meta: object, header: str | None) -> str | None:
    """Return what the relay would send on in a span of its own."""
    meta = {} if in_meta is ... else {META_TRACEPARENT: in_meta}
    trace = Call(called(_meta=meta), header).trace
    return trace.traceparent("00f067aa0ba902b7") if trace else None


OTHER_TRACE = f"00-{'1' * 32}-{'2' * 16}-00"


@pytest.mark.parametrize(
    ("in_meta", "header", "trace_id"),
    [
        pytest.param(..., None, None, id="nowhere"),
        pytest.param(TRACEPARENT, None, TRACE_ID, id="in _meta"),
        pytest.param(..., TRACEPARENT, TRACE_ID, id="in the header"),
        pytest.param(TRACEPARENT, OTHER_TRACE, TRACE_ID, id="in both: _meta comes first"),
    ],
)
def test_the_trace_is_that_of_meta_or_else_that_of_the_header(
    in_meta: object, header: str | None, trace_id: str | None
) -> None:
    sent = traced(in_meta, header)
    assert (sent.split("-")[1] if sent else None) == trace_id


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("x", id="no traceparent"),
        pytest.param(f"00-{'0' * 32}-{SPAN_ID}-01", id="a trace id of zeros"),
        pytest.param(f"00-{TRACE_ID}-{'0' * 16}-01", id="a span id of zeros"),
        pytest.param(f"ff-{TRACE_ID}-{SPAN_ID}-01", id="the version that there cannot be"),
        pytest.param(TRACEPARENT.upper(), id="upper case"),
        pytest.param(f"00-{TRACE_ID[1:]}-{SPAN_ID}-01", id="a digit too few"),
        pytest.param(f"00-{TRACE_ID}-{SPAN_ID}", id="no flags"),
        pytest.param(f"{TRACEPARENT}-more", id="more than there is in this version"),
        pytest.param(f"{TRACEPARENT}\n", id="a line feed behind it"),
        pytest.param(f" {TRACEPARENT}", id="a space before it"),
        pytest.param(f"00-{TRACE_ID.replace('0', chr(0x660))}-{SPAN_ID}-01", id="other people's digits"),
    ],
)
def test_what_is_no_traceparent_is_no_trace_and_no_reason_to_refuse(strict: Strict, text: str) -> None:
    assert traced(text, None) is None
    assert traced(..., text) is None
    assert strict.refusal(Call(called(_meta={META_TRACEPARENT: text}), text)) is None


@pytest.mark.parametrize("value", [None, 7, [], {}, "x"], ids=str)
def test_what_is_no_trace_in_meta_leaves_it_to_the_header(value: object) -> None:
    assert traced(value, None) is None
    assert traced(value, TRACEPARENT) == traced(..., TRACEPARENT) is not None


@pytest.mark.parametrize(
    ("flags", "passed_on"), [("00", "00"), ("01", "01"), ("02", "02"), ("03", "03"), ("fd", "01")]
)
@pytest.mark.parametrize("version", ["00", "01", "fe"])
def test_the_trace_goes_on_in_the_relays_span_and_version_with_the_flags_that_mean_something(
    version: str, flags: str, passed_on: str
) -> None:
    sent = traced(f"{version}-{TRACE_ID}-{SPAN_ID}-{flags}", None)
    assert sent == f"00-{TRACE_ID}-00f067aa0ba902b7-{passed_on}"


# --- the caller's own id --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_meta", "header", "given"),
    [
        pytest.param(None, None, None, id="nowhere"),
        pytest.param("order-17", None, "order-17", id="in _meta"),
        pytest.param(None, "order-17", "order-17", id="in the header"),
        pytest.param("order-17", "order-18", "order-17", id="in both: _meta comes first"),
        pytest.param("a" * 64, None, "a" * 64, id="the longest"),
        pytest.param("a" * 65, "order-17", "", id="too long"),
        pytest.param("", None, "", id="empty"),
        pytest.param(None, "\n", "", id="a header that was sent twice"),
        pytest.param('a","sub":"root', None, "", id="what would end a member of the audit"),
        pytest.param("\u0661\u00e9", None, "", id="other people's digits"),
        pytest.param(17, None, "", id="a number"),
        pytest.param(["order-17"], None, "", id="a list"),
    ],
)
def test_the_id_that_a_caller_gives_is_that_of_meta_or_else_that_of_the_header(
    in_meta: object, header: str | None, given: str | None
) -> None:
    call = Call(called(_meta={META_CORRELATION_ID: in_meta}), None, header)
    assert call.given_id == call.part().given_id == given


# --- anything at all ------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec=None), max_size=20)
NAMES = st.sampled_from(
    ["id", "jsonrpc", "method", "params", "meta", "_meta", "name", "idempotencyKey", META_IDEMPOTENCY_KEY]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.sampled_from(["2.0", ECHO_NAME]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | TEXT, inner, max_size=4),
    max_leaves=12,
)
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "name": VALUES | st.just(ECHO_NAME),
        "arguments": VALUES,
        "_meta": VALUES,
    },
)
MESSAGES = st.dictionaries(NAMES | TEXT, VALUES, max_size=6) | st.fixed_dictionaries(
    {"jsonrpc": st.just("2.0"), "id": st.just(1), "method": st.just("tools/call"), "params": PARTS | VALUES},
    optional={"idempotencyKey": VALUES},
)
CHECKS = {mode: Strict(mode) for mode in EnvelopeMode}


@pytest.mark.holds("ENVELOPE/applied")
@given(MESSAGES, st.none() | TEXT)
def test_no_document_makes_the_check_do_anything_but_refuse_or_let_through(
    document: dict[str, Any], header: str | None
) -> None:
    call = Call(document, header)
    told = CHECKS[EnvelopeMode.ENFORCE].refusal(call)
    assert told is None or told.isprintable()
    assert CHECKS[EnvelopeMode.SHADOW].refusal(call) is None
    assert CHECKS[EnvelopeMode.OFF].refusal(call) is None
    for part in (call.name, call.arguments, call.idempotency_key, call.tool_id, call.label(META_TASK_ID)):
        assert part is None or part is not ...
    assert call.trace is None or len(call.trace.trace_id) == 32


@given(MESSAGES)
def test_what_is_accepted_has_what_the_gateway_relies_on(document: dict[str, Any]) -> None:
    call = Call(json.loads(json.dumps(document)))
    if CHECKS[EnvelopeMode.ENFORCE].refusal(call) is None:
        assert isinstance(call.name, str)
        assert call.name
        assert isinstance(call.arguments, dict)
        key = call.idempotency_key
        assert key is None or 1 <= len(key) <= 128
