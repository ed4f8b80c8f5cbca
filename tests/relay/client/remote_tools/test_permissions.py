import pytest

from relay.client.remote_tools.admission import Meter
from relay.remote_tools import Budget, Permissions, Reason, Risk, RiskSource, ToolContract, ToolUnauthorized
from tests.fakes.seconds import Seconds


def refusal(meter: Meter) -> ToolUnauthorized:
    with pytest.raises(ToolUnauthorized) as caught:
        meter.take()
    assert caught.value.reason is Reason.BUDGET
    return caught.value


@pytest.mark.parametrize(
    ("allow", "name", "admitted"),
    [
        ((), "echo", False),
        (("",), "echo", False),
        (("echo",), "echo", True),
        (("echo",), "echo2", False),
        (("ECHO",), "echo", False),
        (("sysecho.*.echo.invoke",), "sysecho.01hz.echo.invoke", True),
        (("sysecho.*",), "sys.01hz", False),
        (("a", "ech?"), "echo", True),
    ],
)
def test_the_allowlist_matches_whole_names_by_globs(
    allow: tuple[str, ...], name: str, *, admitted: bool
) -> None:
    assert Permissions(allow).admits(name) is admitted


def test_a_name_that_is_not_on_the_allowlist_is_refused() -> None:
    with pytest.raises(ToolUnauthorized) as caught:
        Permissions(("echo",)).check_name("add")
    assert caught.value.reason is Reason.ALLOWLIST


def contract(risk: Risk, *scopes: str) -> ToolContract:
    return ToolContract(
        name="echo",
        version="1",
        title="",
        description="",
        input_schema={},
        output_schema=None,
        digest="",
        risk=risk,
        risk_source=RiskSource.DEFAULT,
        safety_class=None,
        required_scopes=frozenset(scopes),
        idempotent=False,
        deadline_s=1.0,
        canonical_name="echo",
    )


@pytest.mark.parametrize("risk", Risk)
@pytest.mark.parametrize("ceiling", Risk)
def test_a_ceiling_admits_its_own_risk_and_those_below(ceiling: Risk, risk: Risk) -> None:
    permissions = Permissions(max_risk=ceiling)
    if risk.level <= ceiling.level:
        permissions.check(contract(risk))
        return
    with pytest.raises(ToolUnauthorized) as caught:
        permissions.check(contract(risk))
    assert caught.value.reason is Reason.RISK


def test_a_tool_requires_scopes_that_were_granted_unless_its_server_checks_them() -> None:
    needs = contract(Risk.READ, "a", "b")
    Permissions(scopes=frozenset({"a", "b", "c"})).check(needs)
    Permissions(scopes=None).check(needs)
    with pytest.raises(ToolUnauthorized) as caught:
        Permissions(scopes=frozenset({"a"})).check(needs)
    assert caught.value.reason is Reason.SCOPE


def test_a_rate_is_restored_by_time_and_states_when() -> None:
    seconds = Seconds()
    meter = Meter(Budget(rate=2, burst=2), seconds)
    meter.take()
    meter.take()
    error = refusal(meter)
    assert (error.retryable, error.retry_after_ms) == (True, 500)
    seconds.now += 0.5
    meter.take()


def test_a_call_that_the_rate_refuses_does_not_count_in_the_total() -> None:
    seconds = Seconds()
    meter = Meter(Budget(calls=2, rate=1), seconds)
    meter.take()
    refusal(meter)
    seconds.now += 1
    meter.take()
    assert refusal(meter).retryable is False
