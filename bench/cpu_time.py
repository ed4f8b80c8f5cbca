"""The CPU time of another process. Must not judge."""

import time


def cpu_s(pid: int) -> float:
    """Return how much CPU time a process has used, in seconds, with its threads that have ended.

    By its clock, which counts nanoseconds: ``/proc`` has hundredths of seconds.
    """
    return time.clock_gettime(_clock_of(pid))


def _clock_of(pid: int) -> int:
    """Return what clock_getcpuclockid(3) returns on Linux; Python has it for threads alone."""
    return ~pid << 3 | 2
