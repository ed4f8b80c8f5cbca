"""What a limiter allows. Must not know how it is enforced, nor what is limited."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a limiter allows: ``rate`` a second, after ``burst`` at once, and ``concurrency`` at a time."""

    rate: float
    burst: float
    concurrency: int
