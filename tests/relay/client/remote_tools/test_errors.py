from relay.client.remote_tools.errors import ERROR_TYPES, Reason
from relay.remote_tools import RemoteToolError
from schemas.errors import Failure

WORDS = {"timeout", "unauthorized", "tool_not_found", "invalid_arguments", "provider_failure"}


def test_there_is_one_type_for_each_word_of_the_specification_and_of_the_table() -> None:
    assert set(ERROR_TYPES) == WORDS
    assert {failure.value.remote_tool for failure in Failure} <= WORDS
    assert set(ERROR_TYPES.values()) == set(RemoteToolError.__subclasses__())


def test_an_error_of_a_local_check_states_that_nothing_ran() -> None:
    error = ERROR_TYPES["unauthorized"]("No.", reason=Reason.RISK, suggested_fix="Ask.")
    assert (error.may_have_run, error.retryable, error.code, error.correlation_id) == (False, False, None, "")
    assert str(error) == "No."
