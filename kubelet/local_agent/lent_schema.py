"""The input schema of a lent tool: compiled without any network, or refused.

The caller wrote it, and the caller may be hostile: a reference would be fetched, a pattern or a web of
references could take minutes to evaluate. Must not change a schema: it is shown as it was lent.
"""

from collections.abc import Mapping
from typing import Any

import jsonschema_rs

from schemas.caller_tools import MAX_SCHEMA_BYTES, size_of
from schemas.error_roots import PeerError
from schemas.errors import Failure, ToolError
from schemas.schema_references import SchemaReferencesError, extent_of
from schemas.text import printable

MAX_REFERENCES = 512
"""The references that one schema applies, each counted as often as it is reached."""


class LentSchemaError(PeerError):
    """A schema is refused; the text is a constant of ours."""


class LentSchema:
    """The compiled schema of one lent tool.

    Raises:
        LentSchemaError: it is refused.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        if size_of(schema) > MAX_SCHEMA_BYTES:
            raise LentSchemaError(f"larger than {MAX_SCHEMA_BYTES} bytes")
        if schema.get("type") != "object":
            # One tool with another would make clients refuse the whole list.
            raise LentSchemaError("its type is not object")
        try:
            self._extent = extent_of(schema, MAX_REFERENCES)
        except SchemaReferencesError as error:
            raise LentSchemaError(str(error)) from None
        # In linear time, without backtracking. Without a limit a pattern of ten characters may take 15 MiB.
        size = self._extent.size_for_a_pattern()
        patterns = jsonschema_rs.RegexOptions(size_limit=size, dfa_size_limit=2 * size)
        try:
            # offline: nothing is fetched.
            self._compiled = jsonschema_rs.validator_for(schema, offline=True, pattern_options=patterns)
        except (jsonschema_rs.ValidationError, ValueError):
            raise LentSchemaError("no JSON Schema that can be compiled") from None

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Return when ``arguments`` fit.

        Raises:
            ToolError: they do not; it names the member and the rule, unless that takes too long to find.
        """
        if not self._extent.may_be_judged(arguments):
            detail = "The arguments have too many parts for the schema of the caller."
            raise ToolError(Failure.ARGUMENTS_INVALID, detail)
        try:
            if not self._extent.may_be_matched(size_of(arguments)):
                detail = "The arguments are too large for so many patterns as the schema of the caller has."
                raise ToolError(Failure.ARGUMENTS_INVALID, detail)
            fault = self._fault(arguments)
        except ValueError:
            raise ToolError(Failure.ARGUMENTS_INVALID, "A text in the arguments is not Unicode.") from None
        if fault is not None:
            detail = f"The arguments do not fit the schema of the caller{fault}."
            raise ToolError(Failure.ARGUMENTS_INVALID, detail)

    def _fault(self, arguments: Mapping[str, Any]) -> str | None:
        """Return which rule is broken where, as the end of a sentence; None if none is.

        Empty where searching for it could take too long.
        """
        if self._compiled.is_valid(arguments):
            return None
        searched = self._extent.may_be_explained(arguments)
        error = next(self._compiled.iter_errors(arguments), None) if searched else None
        if error is None:
            return ""
        where = printable("/" + "/".join(str(part) for part in error.instance_path), 128)
        # The keyword alone: what the schema contains beside it is the caller's text.
        rule = str(error.schema_path[-1]) if error.schema_path else "schema"
        return f": {where} violates {printable(rule, 64)}"
