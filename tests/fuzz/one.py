"""Fuzzes one target, guided by the coverage of our code: ``python -P -m tests.fuzz.one TARGET [OPTION...]``.

The options are those of libFuzzer. A process of its own for each target: libFuzzer ends the process that it
runs in. ``--table MODULE`` names another table than that of the project's targets.
"""

import importlib
import random
import sys
from collections.abc import Sequence
from typing import Any, Final

ATHERIS_IS_MISSING: Final = 69
"""The exit code; EX_UNAVAILABLE of sysexits."""
_OWN_CHANGE: Final = 8
"""One change in so many is of our own making, which takes as long as many an input."""
_INSTRUMENTED: Final = ["schemas", "kubelet", "relay", "tests.fuzz.planted"]


def main(arguments: Sequence[str]) -> int:
    """Run until libFuzzer ends the process; return only if it cannot begin."""
    try:
        # It has no wheel for every Python, and comes from a lock of its own; it is not typed.
        atheris: Any = importlib.import_module("atheris")
    except ImportError:
        print("atheris is not installed: `make fuzz` installs it where it has a wheel", file=sys.stderr)
        return ATHERIS_IS_MISSING
    name, *options = arguments
    table = "tests.fuzz.targets"
    if options[:1] == ["--table"]:
        _, table, *options = options
    # What was imported before is not instrumented.
    with atheris.instrument_imports(include=_INSTRUMENTED):
        target = importlib.import_module(table).TARGETS[name]

    def changed(data: bytes, max_bytes: int, seed: int) -> bytes:
        # Most changes follow what led to new code; some know what documents are made of.
        if seed % _OWN_CHANGE and target.by_lines:
            lines = data.split(b"\n")
            at = seed % len(lines)
            room = max_bytes - len(data) + len(lines[at])
            lines[at] = bytes(atheris.Mutate(lines[at], room)) if room > 0 else b""
            return b"\n".join(lines)[:max_bytes]
        if seed % _OWN_CHANGE:
            return bytes(atheris.Mutate(data, max_bytes))
        return bytes(target.mutated((data, *target.samples), random.Random(seed))[:max_bytes])  # noqa: S311 - a source of changes

    own = [f"-max_len={target.max_bytes}", "-timeout=10", "-rss_limit_mb=1024", "-print_final_stats=1"]
    atheris.Setup([name, *own, *options], target.parse, custom_mutator=changed)
    atheris.Fuzz()
    raise AssertionError("libFuzzer ends the process")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
