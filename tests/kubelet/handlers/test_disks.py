import asyncio
import io
import threading
from collections.abc import Callable, Iterator

import pytest

from kubelet.handlers.disks import (
    INTERVAL_S,
    MAX_DISKS,
    MAX_THREADS,
    DaemonThreadPool,
    Disk,
    Disks,
    Mount,
    Space,
    disk_of,
    distinct,
    start_daemon_thread,
)
from schemas.process.logs import make_logger
from schemas.strict_json import MAX_SAFE_INTEGER
from tests.fakes.lines import LogLines
from tests.fakes.polling import until

BOUND_S = 10
LOG = make_logger("kubelet", io.StringIO())
ROOT = Mount("/dev/sda1", "/", "ext4")
STICK = Mount("/dev/sdb1", "/media/stick", "vfat")
SPACE = Space(1000, 400)
ROOT_DISK = Disk("/", "ext4", 1000, 400)
STICK_DISK = Disk("/media/stick", "vfat", 1000, 400)


class Machine:
    """Disks of which some may be broken, and some hang until the test's end."""

    def __init__(self, *mounts: Mount) -> None:
        self.mounted: list[Mount] | OSError = list(mounts)
        self.spaces: dict[str, Space | OSError] = {mount.path: SPACE for mount in mounts}
        self.hanging: set[str] = set()
        self.release = threading.Event()
        self.asked: list[str] = []
        self.threads: set[threading.Thread] = set()

    def mounts(self) -> list[Mount]:
        self.threads.add(threading.current_thread())
        if isinstance(self.mounted, OSError):
            raise self.mounted
        return self.mounted

    def space(self, path: str) -> Space:
        self.threads.add(threading.current_thread())
        self.asked.append(path)
        if path in self.hanging:
            assert self.release.wait(BOUND_S)
        space = self.spaces[path]
        if isinstance(space, OSError):
            raise space
        return space


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(ROOT, STICK)
    yield machine
    machine.release.set()


def disks_of(machine: Machine) -> Disks:
    return Disks(machine.mounts, machine.space, LOG, timeout_s=BOUND_S)


def test_a_device_that_is_mounted_twice_is_one_disk_at_its_first_place() -> None:
    bind = Mount("/dev/sda1", "/var/lib/app", "ext4")
    assert distinct([ROOT, bind, STICK, ROOT]) == [ROOT, STICK]


def test_images_of_read_only_file_systems_are_no_disks() -> None:
    assert distinct([Mount("/dev/loop1", "/snap/core/1", "squashfs"), ROOT]) == [ROOT]


def test_at_most_64_disks_are_asked() -> None:
    many = [Mount(f"/dev/disk{n}", f"/mnt/{n}", "ext4") for n in range(MAX_DISKS + 1)]
    assert distinct(many) == many[:64]


def test_a_name_from_a_stick_is_made_printable_and_cut() -> None:
    disk = disk_of(Mount("/dev/sdb1", "/media/\x1b[2J\n\u202e\udcff" + "x" * 300, "f" * 40), SPACE)
    assert disk.mount.startswith("/media/\\x1b[2J\\n\\u202e\\udcffxxx")
    assert disk.mount.isascii()
    assert disk.mount.isprintable()
    assert len(disk.mount) == 256
    assert disk.fs_type == "f" * 32


def test_sizes_that_a_stick_made_up_stay_within_what_json_can_carry() -> None:
    disk = disk_of(STICK, Space(2**64, 2**70))
    assert (disk.total_bytes, disk.available_bytes) == (MAX_SAFE_INTEGER, MAX_SAFE_INTEGER)
    assert disk_of(STICK, Space(10, 20)).available_bytes == 10


async def test_the_list_is_in_the_order_of_mounting(machine: Machine) -> None:
    disks = disks_of(machine)
    await disks.refresh()
    assert disks.latest == [ROOT_DISK, STICK_DISK]
    assert disks.first.is_set()


def test_before_the_first_answers_there_is_no_list(machine: Machine) -> None:
    assert disks_of(machine).latest is None


async def test_nothing_is_read_on_the_event_loop_or_in_a_thread_that_keeps_the_daemon_from_ending(
    machine: Machine,
) -> None:
    await disks_of(machine).refresh()
    assert machine.threads
    assert threading.main_thread() not in machine.threads
    assert all(thread.daemon for thread in machine.threads)


async def test_a_node_without_disks_has_an_empty_list() -> None:
    disks = disks_of(Machine())
    await disks.refresh()
    assert disks.latest == []


async def test_a_disk_that_hangs_delays_no_other_disk(machine: Machine) -> None:
    machine.hanging = {"/"}
    disks = disks_of(machine)
    task = asyncio.create_task(disks.refresh())
    await until(lambda: disks.latest == [STICK_DISK])
    assert not task.done()
    machine.release.set()
    await asyncio.wait_for(task, BOUND_S)
    assert disks.latest == [ROOT_DISK, STICK_DISK]


async def test_a_disk_that_hangs_is_waited_for_only_so_long_and_not_asked_again(machine: Machine) -> None:
    machine.hanging = {"/"}
    disks = Disks(machine.mounts, machine.space, LOG, timeout_s=0.01)
    for _ in range(3):
        await asyncio.wait_for(disks.refresh(), BOUND_S)
    assert disks.first.is_set()
    assert machine.asked.count("/") == 1
    await until(lambda: disks.latest == [STICK_DISK])


async def test_of_many_disks_most_may_hang_and_the_others_are_still_read() -> None:
    many = [Mount(f"/dev/disk{n}", f"/mnt/{n}", "ext4") for n in range(MAX_DISKS)]
    machine = Machine(*many)
    machine.hanging = {mount.path for mount in many[: MAX_THREADS - 1]}
    disks = Disks(machine.mounts, machine.space, LOG, timeout_s=0.01)
    try:
        for _ in range(3):
            await asyncio.wait_for(disks.refresh(), BOUND_S)
        await until(lambda: len(disks.latest or ()) == MAX_DISKS - len(machine.hanging))
        assert len(machine.threads) >= MAX_THREADS
        assert sum(thread.is_alive() for thread in machine.threads) <= MAX_THREADS
    finally:
        machine.release.set()


async def test_a_table_of_mounts_that_hangs_leaves_the_last_list_standing(machine: Machine) -> None:
    held, answers = threading.Event(), 0

    def mounts() -> list[Mount]:
        nonlocal answers
        answers += 1
        if answers == 2:
            assert held.wait(BOUND_S)
            return [ROOT]
        return machine.mounts()

    disks = Disks(mounts, machine.space, LOG, timeout_s=0.05)
    for _ in range(4):
        await asyncio.wait_for(disks.refresh(), BOUND_S)
    assert (answers, disks.latest) == (2, [ROOT_DISK, STICK_DISK])
    held.set()
    await disks.refresh()
    assert disks.latest == [ROOT_DISK]


async def test_a_system_without_a_thread_left_costs_readings_and_nothing_else(
    machine: Machine, log: LogLines
) -> None:
    left = [3]  # threads that the system still has

    def start(work: Callable[[], None]) -> None:
        if left[0] == 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start_daemon_thread(work)

    disks = Disks(
        machine.mounts,
        machine.space,
        make_logger("kubelet", log),
        threads=DaemonThreadPool(start),
        timeout_s=0.05,
    )
    await disks.refresh()
    await until(lambda: disks.latest == [ROOT_DISK, STICK_DISK])
    # A thread that has not ended yet would take the next reading.
    await until(lambda: not any(thread.is_alive() for thread in machine.threads))
    left[0] = 0
    machine.spaces["/"] = Space(1000, 1)
    for _ in range(3):
        await asyncio.wait_for(disks.refresh(), BOUND_S)
    assert disks.latest == [ROOT_DISK, STICK_DISK]
    assert [line["level"] for line in log.entries("disks are not read")] == ["warning"]
    left[0] = 100
    await disks.refresh()
    await until(lambda: disks.latest == [Disk("/", "ext4", 1000, 1), STICK_DISK])


async def test_a_disk_that_begins_to_hang_keeps_its_last_numbers_until_it_answers(machine: Machine) -> None:
    disks = disks_of(machine)
    await disks.refresh()
    machine.hanging = {"/"}
    machine.spaces = {"/": Space(1000, 1), STICK.path: Space(1000, 2)}
    task = asyncio.create_task(disks.refresh())
    await until(lambda: disks.latest == [ROOT_DISK, Disk("/media/stick", "vfat", 1000, 2)])
    machine.release.set()
    await asyncio.wait_for(task, BOUND_S)
    assert disks.latest == [Disk("/", "ext4", 1000, 1), Disk("/media/stick", "vfat", 1000, 2)]


async def test_a_disk_that_breaks_leaves_the_list(machine: Machine) -> None:
    disks = disks_of(machine)
    await disks.refresh()
    machine.spaces[STICK.path] = OSError("input/output error")
    await disks.refresh()
    assert disks.latest == [ROOT_DISK]


async def test_a_disk_that_is_unmounted_leaves_the_list(machine: Machine) -> None:
    disks = disks_of(machine)
    await disks.refresh()
    machine.mounted = [ROOT]
    await disks.refresh()
    assert disks.latest == [ROOT_DISK]


async def test_a_disk_that_comes_back_does_not_bring_its_old_numbers(machine: Machine) -> None:
    disks = disks_of(machine)
    await disks.refresh()
    machine.mounted = [ROOT]
    await disks.refresh()
    machine.mounted = [ROOT, STICK]
    machine.hanging = {STICK.path}
    task = asyncio.create_task(disks.refresh())
    await until(lambda: machine.asked.count(STICK.path) == 2)
    assert disks.latest == [ROOT_DISK]
    machine.release.set()
    await asyncio.wait_for(task, BOUND_S)
    assert disks.latest == [ROOT_DISK, STICK_DISK]


async def test_a_mount_table_that_cannot_be_read_leaves_the_last_list_standing(machine: Machine) -> None:
    disks = disks_of(machine)
    await disks.refresh()
    machine.mounted = OSError()
    await disks.refresh()
    assert disks.latest == [ROOT_DISK, STICK_DISK]


async def test_the_list_is_refreshed_again_and_again(machine: Machine) -> None:
    pauses: asyncio.Queue[float] = asyncio.Queue()
    disks = Disks(machine.mounts, machine.space, LOG, sleep=pauses.put, timeout_s=BOUND_S)
    task = asyncio.create_task(disks.run())
    for _ in range(2):
        assert await asyncio.wait_for(pauses.get(), BOUND_S) == INTERVAL_S
    machine.spaces["/"] = Space(1000, 1)
    await until(lambda: disks.latest == [Disk("/", "ext4", 1000, 1), STICK_DISK])
    task.cancel()


def test_an_answer_after_the_loop_has_closed_is_dropped_in_silence(machine: Machine) -> None:
    # An exception in a thread fails a test here, because every warning does.
    machine.hanging = {"/"}
    asyncio.run(Disks(machine.mounts, machine.space, LOG, timeout_s=0.01).refresh())
    machine.release.set()
    for thread in machine.threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
