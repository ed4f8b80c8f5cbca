"""From when on ``linux.health`` has a finding: the thresholds, each with the reason of its default.

    ["linux.health"]
    disk_warning_pct = 80

Must not know how a value is read.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Threshold(NamedTuple):
    """A number that the board's owner may set, from ``least`` to ``most``. ``why`` is a sentence."""

    default: float
    least: float
    most: float
    why: str


THRESHOLDS: Mapping[str, Threshold] = MappingProxyType(
    {
        "disk_warning_pct": Threshold(
            90, 1, 100, "Disks fill slowly, and a person needs time to come: a tenth is left."
        ),
        "disk_error_pct": Threshold(97, 1, 100, "Programs begin to fail before the last block is taken."),
        "memory_low_pct": Threshold(
            5, 0, 100, "Of memory available: below it the kernel begins to look for a process to kill."
        ),
        "stalled_warning_pct": Threshold(
            10, 0, 100, "Of the last minute, in which every process waited for memory: people notice it."
        ),
        "stalled_error_pct": Threshold(40, 0, 100, "Nearly half of the time nothing runs."),
        "swap_pages_per_s": Threshold(
            1000,
            1,
            1_000_000,
            "4 MB that are needed again after they were swapped out: much for a card.",
        ),
        "killed_for_memory_h": Threshold(
            1, 0.1, 720, "The kernel counts since the boot: it is news for an hour after the last one."
        ),
        "hot_c": Threshold(
            80, 20, 150, "A Raspberry Pi lowers its clock there; other machines state their limit."
        ),
        "below_critical_c": Threshold(5, 0, 50, "So near to the limit of its driver a machine may stop."),
        "load_per_core": Threshold(
            4, 0.5, 1000, "Over five minutes: four processes for each core are more than a burst."
        ),
        "restarts": Threshold(
            3, 1, 1000, "In an hour: a unit that is restarted for the third time has not failed by chance."
        ),
        "storage_worn_pct": Threshold(
            90, 10, 110, "The card states tenths of its life: less than a fifth of it is left."
        ),
        "link_changes": Threshold(6, 1, 1000, "In an hour: a cable that was unplugged once makes two."),
        "throttle_events": Threshold(
            10, 1, 1_000_000, "In an hour, on x86: one burst of work may make a few of them."
        ),
        "certificate_left_pct": Threshold(
            25, 1, 33, "It is renewed when a third of its time is left: since then renewing has failed."
        ),
        "security_updates_days": Threshold(
            14, 1, 365, "A person who looks at a board each week has missed them twice."
        ),
        "updates_days": Threshold(
            60, 1, 3650, "Not urgent, but the more there are, the harder an upgrade is."
        ),
        "unclean_boot_h": Threshold(
            24, 0.1, 720, "After that the reason is not found in the log of last night any more."
        ),
    }
)
DEFAULTS: Mapping[str, float] = MappingProxyType({name: each.default for name, each in THRESHOLDS.items()})
