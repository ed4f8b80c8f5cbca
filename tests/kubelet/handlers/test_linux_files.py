"""Files below the directories that a board's owner names: what is read, and what no name leads to."""

import asyncio
import io
import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kubelet.ceiling import OutsideCeilingError, table_of
from kubelet.handlers.base import OwnFiles, ToolFault
from kubelet.handlers.beneath import KERNELS_OWN, open_beneath
from kubelet.handlers.linux_files import FilesHandler
from kubelet.handlers.machine import BlockingCalls
from schemas.kind_packages import read_shipped
from schemas.process.logs import make_logger
from schemas.registry import read_contract
from tests.fakes.board import asked
from tests.fakes.polling import BOUND_S, before_asking_again
from tests.fakes.signer import NODE_ID, NOW_MS


def allow(files: FilesHandler, *directories: object) -> None:
    """Let the board's owner name ``directories``, or with ``!`` what is kept back."""
    text = json.dumps({"directories": list(map(str, directories))})
    files.ceiling.replace({"linux.files": table_of("linux.files", text)})


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    directory = tmp_path / "logs"
    directory.mkdir()
    return directory


@pytest.fixture
def files(tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch) -> FilesHandler:
    # The files of tests may lie in /dev/shm.
    kernels_own = [each for each in KERNELS_OWN if not tmp_path.is_relative_to(each)]
    monkeypatch.setattr("kubelet.handlers.beneath.KERNELS_OWN", kernels_own)
    row = read_contract(("linux.files",)).kinds.get("linux.files")
    assert row is not None
    assert row.capability is not None
    handler = FilesHandler(row.capability, NODE_ID, lambda: NOW_MS, make_logger("kubelet", io.StringIO()))
    state = tmp_path / "state"
    (state / "tls").mkdir(parents=True)
    (state / "tls/node.key").write_text("a key\n", encoding="ascii")
    handler.own = OwnFiles(state, (state,))
    allow(handler, logs)
    return handler


async def get(files: FilesHandler, path: object, **arguments: Any) -> dict[str, Any]:
    return await asked(files, "get", path=str(path), **arguments)


def texts(answer: dict[str, Any]) -> list[str]:
    return [each["text"] for each in answer["lines"]]


async def refused(files: FilesHandler, verb: str, path: object) -> None:
    """See that the board's owner does not allow it."""
    with pytest.raises(OutsideCeilingError):
        await asked(files, verb, path=str(path))


async def fault(files: FilesHandler, verb: str, path: object, **arguments: Any) -> str:
    with pytest.raises(ToolFault) as caught:
        await asked(files, verb, path=str(path), **arguments)
    assert caught.value.code in read_shipped("linux.files").kind.faults
    return caught.value.code


async def test_a_file_is_read_page_by_page_from_the_start_and_from_its_end(
    files: FilesHandler, logs: Path
) -> None:
    file = logs / "app.log"
    file.write_text("".join(f"line {number}\n" for number in range(10)), encoding="ascii")
    first = await get(files, file, lines=4)
    assert (texts(first), first["offset"], first["next"]) == ([f"line {n}" for n in range(4)], 0, 28)
    rest = await get(files, file, offset=first["next"])
    assert (texts(rest), rest["offset"], rest["next"]) == ([f"line {n}" for n in range(4, 10)], 28, None)
    last = await get(files, file, tail=2)
    assert (texts(last), last["offset"], last["next"]) == (["line 8", "line 9"], 56, None)
    assert texts(await get(files, file, offset=70)) == []
    assert await fault(files, "get", file, offset=1, tail=1) == "offset_and_tail"


async def test_a_page_begins_with_a_line_so_that_no_offset_hides_what_is_a_secret(
    files: FilesHandler, logs: Path
) -> None:
    file = logs / "app.log"
    file.write_text("password=hunter2\nafter\n", encoding="ascii")
    for offset in range(17):
        answer = await get(files, file, offset=offset)
        assert "hunter" not in json.dumps(answer)
        assert texts(answer)[-1] == "after"


async def test_a_line_longer_than_what_is_read_or_skipped_is_not_shown_from_within(
    files: FilesHandler, logs: Path
) -> None:
    file = logs / "app.log"
    head, secret = '{"password":"', "hunter2-hunter2"
    rest = f'{secret}","body":"{"y" * 64 * 1024}'[: 64 * 1024 - 1] + "\n"
    file.write_text(f"first\n{head}{rest}", encoding="ascii")
    last = await get(files, file, tail=1)
    assert (last["lines"], last["offset"], last["next"]) == ([], file.stat().st_size, None)
    file.write_text(f"first\n{rest}", encoding="ascii")
    assert len(texts(await get(files, file, tail=1))) == 1, "it begins where the reading does"
    blanks = " " * (8 * 1024 * 1024 + 1 - len(head))
    file.write_text(f"{blanks}{head}{rest}last\n", encoding="ascii")
    page = await get(files, file, offset=1)
    assert (page["lines"], page["offset"], page["next"]) == ([], 8 * 1024 * 1024 + 1, page["offset"])
    assert texts(await get(files, file, offset=page["next"])) == ["last"]


async def test_no_line_of_a_private_key_is_shown_wherever_a_page_begins(
    files: FilesHandler, logs: Path
) -> None:
    file, inner = logs / "key", ["c2hvcnQ=", "bGluZXM=", "b2Yga2V5"]
    lines = ["before", "-----BEGIN PRIVATE KEY-----", *inner, "-----END PRIVATE KEY-----", "after"]
    file.write_text("\n".join(lines) + "\n", encoding="ascii")
    for offset in range(file.stat().st_size):
        answer = await get(files, file, offset=offset)
        assert not set(inner) & set(texts(answer))
    assert texts(await get(files, file, tail=3)) == ["[redacted]", "[redacted]", "after"]


async def test_lines_of_any_length_are_bounded_and_paged_over(files: FilesHandler, logs: Path) -> None:
    file = logs / "long"
    file.write_bytes(b"\x1b" * 1024 * 1024 + b"\nnext\n" + b"\x01x" * 100)
    first = await get(files, file)
    assert (len(first["lines"]), first["next"]) == (1, 1024 * 1024 + 1)
    assert first["lines"][0]["text"].endswith("[cut]")
    many = logs / "many"
    many.write_bytes((b"  " * 2048 + b"\n") * 500)
    answer = await get(files, many, lines=500)
    assert 0 < len(json.dumps(answer)) <= 192 * 1024
    assert answer["next"] == 4097 * len(answer["lines"])


async def test_what_is_no_text_and_what_is_no_file_is_not_read(files: FilesHandler, logs: Path) -> None:
    (logs / "image").write_bytes(b"\x7fELF\0\0")
    (logs / "inner").mkdir()
    os.mkfifo(logs / "pipe")
    assert await fault(files, "get", logs / "image") == "not_text"
    for name in ("inner", "pipe", "nothing"):
        assert await fault(files, "get", logs / name) == "no_such_file"
    assert await fault(files, "snapshot", logs / "image") == "no_such_file"


async def test_a_node_without_openat2_opens_nothing_and_does_not_announce_the_kind(
    files: FilesHandler, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a unit whose RestrictSUIDSGID= has not been taken back."""
    (logs / "app.log").write_text("text\n", encoding="ascii")
    before = files.missing
    # A system call that no kernel has stands for one that is refused.
    monkeypatch.setattr("kubelet.handlers.beneath._OPENAT2", 999_999)
    assert (before, files.missing) == (None, "there is no openat2: Function not implemented")
    assert await fault(files, "get", logs / "app.log") == "no_openat2"


async def test_a_directory_is_listed_without_following_what_is_in_it(files: FilesHandler, logs: Path) -> None:
    (logs / "a.log").write_text("text", encoding="ascii")
    (logs / "inner").mkdir()
    (logs / "out").symlink_to("/etc/passwd")
    (logs / "token=abcdefgh \x1b[31m").touch()
    os.mkfifo(logs / "pipe")
    answer = await asked(files, "snapshot", path=str(logs))
    assert [(each["type"], each["size"]) for each in answer["entries"]] == [
        ("file", 4),
        ("directory", None),
        ("link", None),
        ("other", None),
        ("file", 0),
    ]
    first = await asked(files, "snapshot", path=str(logs), limit=2)
    rest = await asked(files, "snapshot", path=str(logs), limit=100, start=first["next"])
    assert first["entries"] + rest["entries"] == answer["entries"]
    roots = await asked(files, "snapshot")
    assert [each["name"] for each in roots["entries"]] == [str(logs)]


async def test_nothing_is_shown_where_the_owner_names_no_directory(files: FilesHandler, logs: Path) -> None:
    (logs / "app.log").touch()
    allow(files)
    assert (await asked(files, "snapshot"))["entries"] == []
    await refused(files, "get", logs / "app.log")


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "{logs}/../other/file",
        "{logs}/./app.log",
        "{logs}x/file",
        "{logs}/out",
        "{logs}/up/file",
        "{logs}/absolute/file",
        "{logs}/root/proc/self/environ",
        "{logs}/magic/root/etc/passwd",
    ],
)
async def test_no_name_and_no_link_leads_out_of_a_directory(
    files: FilesHandler, logs: Path, tmp_path: Path, path: str
) -> None:
    other = tmp_path / "other"
    for directory in (other, Path(f"{logs}x")):
        directory.mkdir()
        (directory / "file").write_text("outside", encoding="ascii")
    (logs / "out").symlink_to("../other/file")
    (logs / "up").symlink_to("../other")
    (logs / "absolute").symlink_to(other)
    (logs / "root").symlink_to("/")
    (logs / "magic").symlink_to("/proc/self")
    await refused(files, "get", path.format(logs=logs))
    await refused(files, "snapshot", path.format(logs=logs))


async def test_a_link_that_stays_within_its_directory_is_followed(files: FilesHandler, logs: Path) -> None:
    (logs / "app.log.1").write_text("text\n", encoding="ascii")
    (logs / "current").symlink_to("app.log.1")
    assert texts(await get(files, logs / "current")) == ["text"]


async def test_what_is_the_daemons_own_is_kept_back_by_device_and_inode(
    files: FilesHandler, logs: Path, tmp_path: Path
) -> None:
    allow(files, tmp_path)
    os.link(tmp_path / "state/tls/node.key", logs / "harmless")
    for path in ("state", "state/tls", "state/tls/node.key", "state/nothing", "logs/harmless"):
        await refused(files, "get", tmp_path / path)
    listed = await asked(files, "snapshot", path=str(tmp_path))
    assert ([each["name"] for each in listed["entries"]], listed["withheld"]) == (["logs"], 1)
    assert (await asked(files, "snapshot", path=str(logs)))["withheld"] == 1


@pytest.mark.parametrize(
    "path", ["/proc/self/status", "/sys/kernel/notes", "/dev/null", "/run", "/proc", "/run/none"]
)
async def test_what_is_the_kernels_own_is_kept_back_although_its_owner_names_it(
    files: FilesHandler, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kubelet.handlers.beneath.KERNELS_OWN", KERNELS_OWN)
    allow(files, "/", "/proc", "/sys", "/dev", "/run")
    for verb in ("get", "snapshot"):
        await refused(files, verb, path)


async def test_what_the_owner_keeps_back_is_refused_the_same_whether_it_exists_or_not(
    files: FilesHandler, logs: Path
) -> None:
    (logs / "private").mkdir()
    (logs / "private/file").touch()
    (logs / "link").symlink_to("private")
    allow(files, logs, f"!{logs}/private")
    for name in ("private/file", "private/none", "link/file", "link/none", "link/none/none"):
        await refused(files, "get", logs / name)
    listed = await asked(files, "snapshot", path=str(logs))
    assert ([each["name"] for each in listed["entries"]], listed["withheld"]) == (["link"], 1)


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_what_is_kept_back_is_not_shown_by_a_link_while_it_is_removed_or_replaced(
    files: FilesHandler, logs: Path, monkeypatch: pytest.MonkeyPatch, *, is_replaced: bool
) -> None:
    secret = logs / "secret.log"
    secret.write_text("hunter2\n", encoding="ascii")
    (logs / "link").symlink_to("secret.log")
    allow(files, logs, f"!{secret}")

    def opened(directory: int, path: str) -> int:
        place = open_beneath(directory, path)
        secret.unlink()
        if is_replaced:
            secret.write_text("another\n", encoding="ascii")
        return place

    monkeypatch.setattr("kubelet.handlers.beneath.open_beneath", opened)
    assert await fault(files, "get", logs / "link") == "no_such_file"


async def test_what_is_kept_back_below_a_directory_that_is_named_by_a_link_is_refused_however_it_is_asked_for(
    files: FilesHandler, logs: Path, tmp_path: Path
) -> None:
    (logs / "private").mkdir()
    (logs / "private/file").touch()
    for name in ("secret.log", "app.log"):
        (logs / name).write_text("line\n", encoding="ascii")
    (logs / "latest").symlink_to("secret.log")
    (logs / "within").symlink_to("private")
    named = tmp_path / "named"
    named.symlink_to(logs)
    allow(files, named, f"!{named}/secret.log", f"!{named}/private*")
    ways = ("/secret.log", "//secret.log", "/secret.log/", "/latest", "/within/file", "//private/none")
    for way in ways:
        await refused(files, "get", f"{named}{way}")
    await refused(files, "snapshot", f"{named}//private")
    assert texts(await get(files, f"{named}//app.log")) == ["line"]
    listed = await asked(files, "snapshot", path=str(named))
    assert sorted(each["name"] for each in listed["entries"]) == ["app.log", "latest", "within"]
    assert listed["withheld"] == 2


async def test_a_file_system_that_does_not_answer_costs_its_own_calls_alone(
    files: FilesHandler, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (logs / "app.log").write_text("text\n", encoding="ascii")
    answers, waiting = threading.Event(), threading.Semaphore(0)
    read = os.pread

    def hung(*arguments: Any) -> bytes:
        waiting.release()
        assert answers.wait(60)
        return read(*arguments)

    monkeypatch.setattr("kubelet.handlers.linux_files.os.pread", hung)
    monkeypatch.setattr(BlockingCalls.run, "__defaults__", (0.01,))
    for _ in range(7):  # the last is refused at once: as many wait as may
        assert await fault(files, "get", logs / "app.log") == "no_answer"
    answers.set()
    monkeypatch.setattr(BlockingCalls.run, "__defaults__", (BOUND_S,))

    async def answered() -> bool:
        with suppress(ToolFault):
            return texts(await get(files, logs / "app.log")) == ["text"]
        return False

    async with asyncio.timeout(BOUND_S):
        while not await answered():
            await before_asking_again()
