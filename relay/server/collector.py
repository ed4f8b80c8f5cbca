"""The garbage collector's thresholds, for a process whose heap is large and does not change.

Must not be used but by what serves for long: they hold for the whole process.
"""

import gc


def tune_collector() -> None:
    """Make the garbage collector run less often.

    Thousands of nodes are a large heap that does not change, and a call of the old era leaves a few cycles
    behind in the SDK. With the default thresholds the collector walks the whole heap so often that such calls
    take nearly half as long again; with these, a few megabytes of garbage are collected later.

    All else stops while objects are walked, so the young generations are kept small: thousands of nodes that
    reconnect fill them every second.
    """
    gc.freeze()
    gc.set_threshold(2_000, 20, 500)
