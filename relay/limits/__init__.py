"""Rates, and how holders share one; also the usual allowance of an agent. Nothing else knows what is limited.

Use::

    limiters = KeyedLimiters[str](time.monotonic)
    with limiters.held("agent", Allowance(rate=10, burst=20, concurrency=4)):
        ...  # or ToolError: RATE_LIMITED, with a retry time
"""
