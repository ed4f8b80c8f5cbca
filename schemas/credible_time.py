"""The earliest time that a clock of this system can read. Must not import anything: commands load it."""

FIRST_CREDIBLE_MS = 1_700_000_000_000
"""2023-11-14: a clock that reads less has not been set, and nothing is published or accepted by it."""
