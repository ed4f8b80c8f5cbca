"""Targets: what a server, a caller or the broker says: answers, tools, their schemas, lines of a log."""

from functools import cache, partial
from typing import Any, Final

from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, ErrorData, Tool
from pydantic import ValidationError

from kubelet.local_agent.toolbox import LentSchema, LentSchemaError
from relay.broker.supervisor import BrokerLines
from relay.client.remote_tools.contracts import ContractTerms, Risk, RiskSource, digest_of
from relay.client.remote_tools.errors import RemoteToolError
from relay.client.remote_tools.failures import FailureTable
from relay.client.remote_tools.redaction import Redaction
from relay.client.remote_tools.servers import WireAttempt
from relay.client.remote_tools.tool_schemas import UnusableSchemaError, compiled
from schemas.errors import MAX_TEXT, ToolError
from schemas.process.logs import make_logger
from schemas.strict_json import StrictJsonError, loads
from tests.fakes.hostile_texts import is_clean, strings_in
from tests.fakes.lines import LogLines
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID
from tests.fuzz import samples
from tests.fuzz.target import REFUSED, Target, text_of, tried

_LIMIT: Final = 1 << 16
_REDACTION: Final = Redaction()
_FAILURES: Final = FailureTable(_REDACTION)
_TERMS: Final = ContractTerms()
_TRUSTING: Final = ContractTerms(trust_annotations=True)


def _value(data: bytes) -> Any:
    return tried(lambda: loads(data, max_bytes=_LIMIT), StrictJsonError)


def remote_result(data: bytes) -> None:
    """A failed result becomes one of the five errors, in short texts that can be shown."""
    try:
        result = CallToolResult.model_validate(_value(data))
    except ValidationError:
        return
    for idempotent in (True, False):
        _check_error(_FAILURES.of_result(result, "echo", idempotent=idempotent))


def remote_error(data: bytes) -> None:
    """So does an error of JSON-RPC, whatever its code, message and data are."""
    value = _value(data)
    try:
        sent = ErrorData.model_validate(value)
    except ValidationError:
        return
    error = MCPError(sent.code, sent.message, sent.data)
    for status in (None, 200, 401, 429, 503):
        wire = WireAttempt(sends=1)
        wire.status = status
        _check_error(_FAILURES.of_jsonrpc(error, wire, idempotent=False))


def _check_error(error: RemoteToolError) -> None:
    for text in (str(error), error.suggested_fix, error.remote_correlation_id or "", str(error.code)):
        assert is_clean(text), ascii(text)
    assert len(str(error)) <= MAX_TEXT + 128
    assert 0 <= (error.retry_after_ms or 0) <= 600_000


def remote_tool(data: bytes) -> None:
    """What a server lists of a tool never lowers its risk, and every change of it changes its digest."""
    value = _value(data)
    try:
        tool = Tool.model_validate(value)
    except ValidationError:
        return
    contract = _TERMS.contract(tool)
    assert (contract.risk, contract.risk_source) == (Risk.ADMIN, RiskSource.DEFAULT)
    assert not contract.idempotent
    assert is_clean(contract.version)
    assert all(map(is_clean, contract.required_scopes))
    assert _TRUSTING.contract(tool).digest == contract.digest == digest_of(tool)
    changed = tool.model_copy(update={"description": f"{tool.description} "})
    assert digest_of(changed) != contract.digest


def redaction(data: bytes) -> None:
    """A secret is not shown whatever stands around it; what is shown is short and printable."""
    value = _value(data)
    assert is_clean(_REDACTION.text(text_of(data)))
    assert all(map(is_clean, strings_in(_REDACTION.value(value if value is not REFUSED else None))))
    around = text_of(data)[:64]
    assert samples.SECRET not in _REDACTION.text(f"{around} Bearer {samples.SECRET} {around}")
    assert samples.SECRET not in str(_REDACTION.value({"a": [{f"{around}token": samples.SECRET}]}))


def tool_schema(data: bytes) -> None:
    """A schema of a stranger is compiled without a network, or refused; it judges any value."""
    schema = _value(data)
    if not isinstance(schema, dict):
        return
    check = tried(lambda: compiled(schema), UnusableSchemaError)
    if check is not REFUSED:
        values: tuple[object, ...] = (schema, {}, [], "", 0, None, {"message": "\ud800"})
        for value in values:
            assert is_clean(check.fault(value) or "")


def lent_schema(data: bytes) -> None:
    """The same of the schema of a lent tool, whose author may be hostile to the node."""
    schema = _value(data)
    if not isinstance(schema, dict):
        return
    made = tried(lambda: LentSchema(schema), LentSchemaError)
    if made is not REFUSED:
        for arguments in (schema, {}, {"message": "x" * 100}):
            tried(partial(made.check, arguments), ToolError)


def broker_line(data: bytes) -> None:
    """A line of the broker's own log is one short printable line of ours, or none."""
    lines, reader = _broker_lines()
    reader.take(data)
    assert is_clean(reader.last())
    lines.seek(0)
    lines.truncate()


@cache
def _broker_lines() -> tuple[LogLines, BrokerLines]:
    lines = LogLines()
    return lines, BrokerLines(make_logger("relay", lines), Seconds(), NODE_ID)


TARGETS: Final = {
    "remote_result": Target(remote_result, samples.TOOL_RESULTS),
    "remote_error": Target(remote_error, samples.RPC_ERRORS),
    "remote_tool": Target(remote_tool, samples.TOOLS),
    "redaction": Target(redaction, samples.TOOL_RESULTS),
    "tool_schema": Target(tool_schema, samples.SCHEMAS),
    "lent_schema": Target(lent_schema, samples.SCHEMAS),
    "broker_line": Target(broker_line, samples.BROKER_LINES, max_bytes=1024),
}
