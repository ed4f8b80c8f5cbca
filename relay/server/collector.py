"""How often the garbage collector looks, for a process whose heap is large and does not change."""

import gc


def calm_collector() -> None:
    """Make the garbage collector look less often at what stays.

    Thousands of nodes are a large heap that does not change, and every call leaves a few cycles behind in
    the SDK. With the default thresholds the collector walks the whole heap so often that calls take nearly
    half as long again; with these, a few megabytes of garbage wait a little longer.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
