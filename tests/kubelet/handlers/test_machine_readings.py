import os
from pathlib import Path

import psutil
import pytest

from kubelet.handlers.system_metrics import CpuTimes, LinuxReadings, MemoryReading, sum_times

STAT = """\
cpu  3000 0 1000 6000 0 0 0 0 0 0
cpu0 1000 0 500 8000 500 0 0 0 0 0
cpu1 2000 100 500 7000 0 100 200 300 400 50
ctxt 1
"""
MEMINFO = """\
MemTotal:        8000 kB
MemFree:         1000 kB
MemAvailable:    6000 kB
Buffers:          100 kB
Cached:           200 kB
Shmem:             10 kB
Active:            10 kB
Inactive:          10 kB
SwapTotal:       2048 kB
SwapFree:        1536 kB
"""


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stat").write_text(STAT)
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "vmstat").write_text("pswpin 0\npswpout 0\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("proc")
def test_every_logical_cpu_is_read_and_not_their_sum() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    first, second = LinuxReadings().cpu_times()
    assert first == pytest.approx((1500 / ticks, 10_000 / ticks))
    # work: 2000-400 user, 100-50 nice, 500 system, 100 irq, 200 softirq; and 300 stolen, 450 of guests.
    assert second == pytest.approx((2450 / ticks, 10_200 / ticks))


def test_waiting_for_io_is_idling_and_a_guests_time_counts_once() -> None:
    times = psutil.cpu_times()
    waiting = sum_times(_times(times, iowait=10.0))
    assert waiting == CpuTimes(0.0, 10.0)
    guest = sum_times(_times(times, user=10.0, guest=10.0, nice=4.0, guest_nice=4.0, idle=6.0))
    assert guest == CpuTimes(0.0, 20.0)


def _times(like: object, **seconds: float) -> psutil._ntuples.scputimes:
    nothing = dict.fromkeys(type(like)._fields, 0.0)  # type: ignore[attr-defined]
    return type(like)(**{**nothing, **seconds})  # type: ignore[return-value]


@pytest.mark.usefixtures("proc")
def test_memory_is_read_in_bytes() -> None:
    assert LinuxReadings().memory() == MemoryReading(
        total=8000 * 1024, available=6000 * 1024, swap_total=2048 * 1024, swap_free=1536 * 1024
    )


def test_uptime_is_whole_seconds_cut_and_not_rounded(tmp_path: Path) -> None:
    (tmp_path / "uptime").write_text("936.99 1798.76\n")
    assert LinuxReadings(tmp_path).uptime_s() == 936


def test_space_is_counted_in_fragments_and_without_the_superusers_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # f_bsize, f_frsize, f_blocks, f_bfree, f_bavail, f_files, f_ffree, f_favail, f_flag, f_namemax
    stat = os.statvfs_result((1 << 20, 4096, 1000, 500, 400, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", {str(tmp_path): stat}.__getitem__)
    assert LinuxReadings().space(str(tmp_path)) == (4_096_000, 1_638_400)


def test_mounts_name_device_place_and_type_with_their_escapes_undone(proc: Path) -> None:
    (proc / "filesystems").write_text("nodev\ttmpfs\n\text4\n\tvfat\n")
    (proc / "self").mkdir()
    (proc / "self" / "mounts").write_text(
        "tmpfs /run tmpfs rw 0 0\n/dev/sda1 / ext4 rw 0 0\n/dev/sdb1 /media/my\\040stick vfat rw 0 0\n"
    )
    assert LinuxReadings().mounts() == [
        ("/dev/sda1", "/", "ext4"),
        ("/dev/sdb1", "/media/my stick", "vfat"),
    ]


def test_a_name_that_its_owner_chose_is_one_field_of_one_line(proc: Path) -> None:
    (proc / "filesystems").write_text("\tvfat\n")
    (proc / "self").mkdir()
    (proc / "self" / "mounts").write_bytes(b"/dev/sdb1 /media/a\rb\x0bc\xff\\134\\012d vfat rw 0 0\n")
    assert LinuxReadings().mounts() == [("/dev/sdb1", "/media/a\rb\x0bc\udcff\\\nd", "vfat")]


def test_this_machine_can_be_read() -> None:
    readings = LinuxReadings()
    assert all(0 <= work <= total for work, total in readings.cpu_times())
    assert len(readings.cpu_times()) == os.cpu_count()
    assert 0 < readings.memory().available <= readings.memory().total
    assert min(readings.load()) >= 0
    assert readings.uptime_s() > 0
    for mount in readings.mounts():
        assert Path(mount.path).exists()
        assert readings.space(mount.path).total > 0
