"""Compiles the schemas of a server's tools, and checks values against them: offline, bounded, self-contained.

A server chooses its schemas, so compiling and applying one must neither open a connection nor take unbounded
time: at most 32 KiB, no reference out of the document, few references that multiply, patterns with a limit
of backtracking, and a limit of how often the parts of a schema are applied to those of a value.

A check holds the interpreter's lock, so that a thread which runs it cannot be ended. One that may take more
than a moment all the same runs in a process of its own, this file as a program, which is kept for the next
and killed at the deadline.
"""

import asyncio
import faulthandler
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, BinaryIO

import jsonschema_rs
from attrs import define, field

from relay.client.remote_tools.errors import Reason, ToolProviderFailure, ToolTimeout
from schemas.error_roots import PeerError
from schemas.schema_references import Extent, SchemaReferencesError, extent_of
from schemas.text import nearest, printable

MAX_SCHEMA_BYTES = 32 * 1024
MAX_DEPTH = 64

MAX_REFERENCES = 4096
"""The references that one schema applies, each counted as often as it is reached."""
MAX_PATTERN_SIZE = 1 << 20
"""The bytes of a compiled pattern where the time that it takes is limited."""
MAX_MEMORY_BYTES = 1 << 30
"""The addresses of the process that checks; a value of the largest size takes less than half of them."""
_QUICK_APPLICATIONS = 1_000_000
"""How many objects are applied to all parts of a value in a fraction of a second."""
_BACKTRACK_LIMIT = 10_000
_LONGEST_ANSWER = 64 * 1024
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_MARGIN_S = 5.0
"""How much longer than this process the other waits, to end by itself if this one is gone."""
_LONGEST_S = 86_400.0
"""How long it waits at most, also where there is no deadline: its timer takes no such time."""


class UnusableSchemaError(PeerError):
    """A schema is not compiled; the text, printable, states why."""


@define(eq=False, repr=False)
class ValueCheck:
    """One compiled schema. ``is_linear``: its patterns are small, and matched without backtracking."""

    _compiled: Any
    _extent: Extent
    schema: Mapping[str, Any]
    _is_linear: bool = field(kw_only=True)

    def is_quick(self, value: object, size: int) -> bool:
        """Return whether the fault of ``value``, of ``size`` bytes as JSON, is found in a moment.

        Where not, finding it holds the interpreter's lock meanwhile, and no deadline ends it.
        """
        return (
            self._is_linear
            and self._extent.may_be_matched(size)
            and self._extent.may_be_judged(value, _QUICK_APPLICATIONS)
        )

    def fault(self, value: object, *, is_arguments: bool = False) -> str | None:
        """Return which rule ``value`` breaks where, printable and without the value; None if it fits.

        Of a large value, or where references form a circle, only that it breaks one: the search for it
        would take memory for every fault there is, and time that doubles with each level of the value.

        ``is_arguments``: for the one who has written them, whose own words their names are. Then an argument
        is named that is missing, or is not known, and the nearest that is.
        """
        if not self._extent.may_be_judged(value):
            return "it has too many parts for this schema"
        try:
            if self._compiled.is_valid(value):
                return None
            if not self._extent.may_be_explained(value):
                return "a rule is violated"
            error: jsonschema_rs.ValidationError = next(self._compiled.iter_errors(value))
        except (ValueError, StopIteration):
            return "it is not JSON, or a pattern takes too long"
        return self._explained(error) if is_arguments else _broken_rule(error)

    def _explained(self, error: jsonschema_rs.ValidationError) -> str:
        match error.kind.name:
            case "required":
                return f"{_named(error, error.kind.value)} is missing"
            case "additionalProperties" | "unevaluatedProperties":
                name = error.kind.value[0]
                return f"there is no argument {_named(error, name)}{nearest(name, self._known(error))}"
            case _:
                return _broken_rule(error)

    def _known(self, error: jsonschema_rs.ValidationError) -> Iterable[str]:
        """Return the members that the schema has where it allows no other."""
        part: Any = self.schema
        try:
            for step in error.schema_path[:-1]:
                part = part[step]
            return sorted(part["properties"])
        except (KeyError, IndexError, TypeError):
            return ()  # it has none, or is not reached so: a schema may give its parts other names


def as_json(value: object) -> str | None:
    """Return ``value`` as compact JSON; None if it is none: the SDK lets through what is no number."""
    try:
        return _ENCODER.encode(value)
    except (ValueError, RecursionError):
        return None


def _place(error: jsonschema_rs.ValidationError) -> str:
    return printable("/" + "/".join(str(part) for part in error.instance_path), 128)


def _broken_rule(error: jsonschema_rs.ValidationError) -> str:
    rule = str(error.schema_path[-1]) if error.schema_path else "schema"
    return f"{_place(error)} violates {printable(rule, 64)}"


def _named(error: jsonschema_rs.ValidationError, name: str) -> str:
    """Return an argument's name, or, within another, where it is."""
    inside = f"{_place(error)}/" if error.instance_path else ""
    return inside + printable(name, 64)


def compiled(schema: Mapping[str, Any]) -> ValueCheck:
    """Return the compiled ``schema``.

    Raises:
        UnusableSchemaError: it is too large or too deep, refers to something outside, or is no JSON Schema.
    """
    if (shown := as_json(schema)) is None:
        raise UnusableSchemaError("the schema is not JSON")
    size = len(shown)
    if size > MAX_SCHEMA_BYTES:
        raise UnusableSchemaError(f"the schema has {size} bytes, more than {MAX_SCHEMA_BYTES}")
    _check_depth(schema, 0)
    try:
        extent = extent_of(schema, MAX_REFERENCES)
        try:
            size = extent.size_for_a_pattern()
            linear = jsonschema_rs.RegexOptions(size_limit=size, dfa_size_limit=2 * size)
            return ValueCheck(_validator(schema, linear), extent, schema, is_linear=True)
        except ValueError:
            size = extent.size_for_a_pattern(MAX_PATTERN_SIZE)
            backtracking = jsonschema_rs.FancyRegexOptions(
                backtrack_limit=_BACKTRACK_LIMIT, size_limit=size, dfa_size_limit=size
            )
            return ValueCheck(_validator(schema, backtracking), extent, schema, is_linear=False)
    except SchemaReferencesError as error:
        raise UnusableSchemaError(f"the schema is refused: {error}") from None
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        reason = printable(str(error).partition("\n")[0], 128)
        raise UnusableSchemaError(f"the schema is not valid: {reason}") from None


def _validator(schema: Mapping[str, Any], patterns: Any) -> Any:
    return jsonschema_rs.validator_for(
        dict(schema), offline=True, pattern_options=patterns, validate_formats=False
    )


def _check_depth(schema: object, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise UnusableSchemaError(f"the schema is nested deeper than {MAX_DEPTH} levels")
    parts = schema if isinstance(schema, list) else schema.values() if isinstance(schema, Mapping) else ()
    for part in parts:
        _check_depth(part, depth + 1)


def answer(requests: BinaryIO, answers: BinaryIO) -> None:
    """Find the fault of each value of ``requests``, one JSON object on each line, until they end.

    Each has a schema that was compiled before, a value, whether it is the arguments of a call, and the
    seconds after which this process ends by itself, for its parent may be gone.
    """
    known = lru_cache(maxsize=64)(lambda schema: compiled(json.loads(schema)))
    for line in requests:
        request = json.loads(line)
        faulthandler.dump_traceback_later(request["seconds"], exit=True)
        check = known(request["schema"])
        found = check.fault(request["value"], is_arguments=request["is_arguments"])
        answers.write(json.dumps(found).encode() + b"\n")
        answers.flush()
        faulthandler.cancel_dump_traceback_later()


def limit_memory() -> None:
    """End this process rather than take all memory: what a value takes here is many times its text."""
    import resource  # noqa: PLC0415 - Unix alone has it, and the client runs elsewhere too

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MAX_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@define(eq=False, repr=False)
class CheckProcess:
    """The checks of one client. The process is started by the first that needs it."""

    _process: Process | None = field(init=False, default=None)
    _lock: asyncio.Lock = field(init=False, factory=asyncio.Lock)

    async def fault(
        self, check: ValueCheck, value: object, deadline_at: float, *, is_arguments: bool = False
    ) -> str | None:
        """Return ``check.fault(value)`` by ``deadline_at``, a time of the event loop.

        Raises:
            ToolTimeout: it was not found by then.
            ToolProviderFailure: the process cannot be started, or has ended by itself.
        """
        shown = as_json(value)
        if shown is None:
            return "it is not JSON that can be checked"
        if check.is_quick(value, len(shown)):
            return check.fault(value, is_arguments=is_arguments)
        try:
            async with asyncio.timeout_at(deadline_at), self._lock:
                left_s = deadline_at - asyncio.get_running_loop().time()
                request = {
                    "schema": json.dumps(check.schema),
                    "value": value,
                    "is_arguments": is_arguments,
                    "seconds": min(left_s, _LONGEST_S) + _MARGIN_S,
                }
                found: str | None = json.loads(await self._answer(json.dumps(request).encode() + b"\n"))
        except TimeoutError:
            raise ToolTimeout(
                "The check against the schema of the tool did not end within the deadline.",
                reason=Reason.DEADLINE,
                suggested_fix="Report the schema to the operator of the server, or allow more time.",
                may_have_run=not is_arguments,
            ) from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ToolProviderFailure(
                "The process that checks a value against the schema of the tool did not run or has ended.",
                reason=Reason.CONTRACT,
                suggested_fix="Permit this program to start its own Python interpreter, with enough memory.",
                may_have_run=not is_arguments,
            ) from error
        return found

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _answer(self, request: bytes) -> bytes:
        try:
            if self._process is None or self._process.returncode is not None:
                self._process = await _started()
            process = self._process
            assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 - both are pipes
            process.stdin.write(request)
            await process.stdin.drain()
            return await process.stdout.readuntil(b"\n")
        except BaseException:
            # Whatever it still computes is of no use.
            await self.close()
            raise


async def _started() -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        __file__,
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        limit=_LONGEST_ANSWER,
        # No other variable: it needs no credential.
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


if __name__ == "__main__":
    limit_memory()
    answer(sys.stdin.buffer, sys.stdout.buffer)
