"""``relay tools`` and ``relay call`` against a server over HTTP and one over stdio."""

import asyncio
import fcntl
import gc
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from relay.cli.remote_server import with_path
from schemas.projection import META_SAFETY_CLASS
from tests.fakes.mcp_server import FakeMcpServer
from tests.fakes.polling import wait_until
from tests.fakes.relay_command import Outcome, run_here

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
Command = Callable[..., Awaitable[Outcome]]


@pytest.fixture
def relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in a thread, so that a server of the test's own loop can answer it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("EDGE_TOKEN", raising=False)

    async def command(*arguments: object) -> Outcome:
        return await asyncio.to_thread(run_here, monkeypatch, capsys, *map(str, arguments))

    return command


def state(tmp_path: Path, name: str) -> Path:
    return tmp_path / "edge-remote-tools" / name


@pytest.mark.holds("SPEC-0004/4/a-hardened-http")
async def test_a_call_prints_the_structured_result(relay: Command, tmp_path: Path) -> None:
    fake = FakeMcpServer()
    async with fake.over_http() as url:
        outcome = await relay("call", "add", '{"a": 1, "b": 2}', "--url", url)
    assert (outcome.code, json.loads(outcome.out), outcome.err) == (0, {"sum": 3}, "")
    events = [json.loads(line)["event"] for line in state(tmp_path, "calls.jsonl").read_text().splitlines()]
    assert events == ["started", "ended"]
    assert state(tmp_path, "calls.jsonl").stat().st_mode & 0o777 == 0o600
    assert set(next(iter(json.loads(state(tmp_path, "pins.json").read_text())["servers"].values()))) == {
        "add"
    }


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (("-o", "message"), "ping\n"),
        (("-o", "message", "--json"), '"ping"\n'),
    ],
)
async def test_one_field_is_printed_by_itself(relay: Command, options: tuple[str, ...], printed: str) -> None:
    async with FakeMcpServer().over_http() as url:
        outcome = await relay("call", "echo", '{"message": "ping"}', "--url", url, *options)
    assert (outcome.code, outcome.out) == (0, printed)


async def test_a_member_is_found_by_its_path_and_its_absence_is_no(relay: Command) -> None:
    fake = FakeMcpServer()
    fake.tools.append({"name": "deep", "inputSchema": {"type": "object"}})
    fake.results["deep"] = {"a": [{"b": {"c": "\x1b[31mred"}}]}
    async with fake.over_http() as url:
        outcome = await relay("call", "deep", "--url", url, "-o", "a.0.b.c")
        assert (outcome.code, outcome.out) == (0, "\\x1b[31mred\n")
        for absent in ("a.1", "x", "a.0.b.c.d", "a.-1"):
            outcome = await relay("call", "deep", "--url", url, "-o", absent)
            assert (outcome.code, outcome.out) == (1, "")
        assert (await relay("call", "deep", "--url", url, "-o", "a.0.bb")).err.endswith("the nearest is b\n")


async def test_json_holds_all_that_a_program_needs(relay: Command) -> None:
    async with FakeMcpServer().over_http() as url:
        outcome = await relay("call", "echo", '{"message": "ping"}', "--url", url, "--json")
    document = json.loads(outcome.out)
    assert document["structured"] == {"message": "ping"}
    assert (document["attempts"], len(document["correlation_id"])) == (1, 26)
    assert document["content"][0]["type"] == "text"


async def test_arguments_come_from_standard_input(relay: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeMcpServer().over_http() as url:
        for given, code, out in (
            (b'{"message": "from a pipe"}', 0, "from a pipe\n"),
            (b'{"message": "\xff"}', 2, ""),
        ):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
            outcome = await relay("call", "echo", "--stdin", "--url", url, "-o", "message")
            assert (outcome.code, outcome.out) == (code, out)


@pytest.mark.parametrize(
    ("name", "arguments", "code", "word"),
    [
        ("delay", "{}", 10, "ToolTimeout"),
        ("unauthorized", "{}", 11, "ToolUnauthorized [401]"),
        ("nothing", "{}", 12, "ToolNotFound"),
        ("echo", '{"message": 5}', 13, "ToolInvalidArguments"),
        ("unavailable", "{}", 14, "ToolProviderFailure [503]"),
        ("envelope", "{}", 14, "ToolProviderFailure [E_NODE_OFFLINE]"),
    ],
)
async def test_each_type_of_error_has_an_exit_code(
    relay: Command, name: str, arguments: str, code: int, word: str
) -> None:
    bound = ("--deadline", "500ms" if name == "delay" else "20s")
    async with FakeMcpServer().over_http() as url:
        outcome = await relay("call", name, arguments, "--url", url, *bound)
        assert (outcome.code, outcome.out) == (code, "")
        assert outcome.err.startswith(f"relay: {word}: ")
        assert re.search("\n  correlation id [0-9A-Z]{26}\n$", outcome.err)
        shown = json.loads((await relay("call", name, arguments, "--url", url, *bound, "--json")).out)
        assert shown["error"] == word.split(maxsplit=1)[0]
        assert {"reason", "retryable", "suggested_fix", "correlation_id"} <= set(shown)


async def test_a_hostile_answer_reaches_the_terminal_as_printable_text(relay: Command) -> None:
    fake = FakeMcpServer()
    fake.tools[0]["description"] = "Echo\x1b[2J\nmore"
    async with fake.over_http() as url:
        for command in (("tools",), ("call", "garbage"), ("call", "rejected"), ("tools", "--json")):
            outcome = await relay(*command, "--url", url)
            assert "\x1b" not in outcome.out + outcome.err
            assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("call", "echo", "[]"),
        ("call", "echo", "{"),
        ("call", "echo", "{}", "--stdin"),
        ("call", "echo", "--certificate", "x.pem"),
        ("call", "echo", "--stdio", "'"),
        ("tools", "--url", "http://mcp.example/mcp"),
        ("tools", "--url", "nonsense"),
        ("tools", "--url", "https://mcp.example/mcp"),
        ("call", "echo", "--url", "https://mcp.example/mcp"),
    ],
    ids=str,
)
async def test_a_command_line_that_makes_no_sense_is_usage(
    relay: Command, caplog: pytest.LogCaptureFixture, arguments: tuple[str, ...]
) -> None:
    outcome = await relay(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("relay: ")
    gc.collect()
    assert not caplog.records  # of a task whose exception is retrieved by nothing


@pytest.mark.parametrize(
    ("call", "code", "said"),
    [
        (("eco",), 12, "lists no tool eco; the nearest is echo."),
        (("echo", '{"mesage": "ping"}'), 13, "there is no argument mesage; the nearest is message."),
    ],
)
async def test_an_unknown_name_is_answered_with_the_nearest(
    relay: Command, call: tuple[str, ...], code: int, said: str
) -> None:
    async with FakeMcpServer().over_http() as url:
        outcome = await relay("call", *call, "--url", url)
    assert (outcome.code, said in outcome.err) == (code, True)


@pytest.mark.parametrize("name", ["tools", "call"])
async def test_a_root_that_cannot_be_used_is_named(relay: Command, tmp_path: Path, name: str) -> None:
    command = (name, "echo") if name == "call" else (name,)
    empty = tmp_path / "empty.pem"
    empty.write_text("no certificate")
    for root, why in ((empty, "holds no certificate in PEM"), (tmp_path / "nope", "No such file")):
        outcome = await relay(*command, "--url", "https://127.0.0.1:9", "--root", root)
        assert outcome.code == 3
        assert f"{root}" in outcome.error
        assert why in outcome.error


@pytest.mark.parametrize("name", ["tools", "call"])
async def test_what_was_named_and_cannot_be_used_is_one_line_of_this_machine(
    relay: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    command = (name, "echo") if name == "call" else (name,)
    nothing, no_token = tmp_path / "nothing", tmp_path / "no-token"
    no_token.touch(0o600)
    url = ("--url", "https://127.0.0.1:9")
    for options, said in (
        ((*url, "--token-file", nothing), f"{nothing}: No such file or directory"),
        ((*url, "--token-file", no_token), f"{no_token} holds no token"),
        ((*url, "--certificate", nothing, "--key", nothing), f"{nothing}: No such file or directory"),
        (("--stdio", f"{nothing} --flag"), f"{nothing}: there is no such program"),
    ):
        outcome = await relay(*command, *options)
        assert (outcome.code, outcome.err.count("\n")) == (3, 1)
        assert said in outcome.err
    monkeypatch.setenv("SSL_CERT_FILE", str(nothing))
    outcome = await relay(*command, *url)
    assert (outcome.code, outcome.err) == (
        3,
        f"relay: SSL_CERT_FILE names {nothing}: No such file or directory\n",
    )


@pytest.fixture
def logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which `relay login` keeps the server."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path / "config" / "edge-kubelet" / "profile.json"


def kept(file: Path) -> tuple[int, str] | None:
    """Return the mode and the text of a file, if it is there."""
    return (file.stat().st_mode & 0o777, file.read_text()) if file.exists() else None


def keep(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o600)
    return file


async def test_after_a_login_calls_need_no_option(relay: Command, tmp_path: Path, logged_in: Path) -> None:
    token = keep(tmp_path / "token", "secret\n")
    call = ("call", "echo", '{"message": "ping"}', "-o", "message")
    async with FakeMcpServer(token="secret").over_http() as url:
        done = await relay("login", url, "--token-file", token)
        assert (done.code, f"now use {url}" in done.out) == (0, True)
        mode, text = kept(logged_in) or (0, "secret")
        assert (mode, "secret" in text) == (0o600, False)
        assert (await relay(*call)).out == "ping\n"
        assert (await relay("tools")).code == 0
        # The profile's token is for its own server: another that is named does not get it.
        assert (await relay(*call, "--url", url)).code == 11
        assert (await relay("login", "--remove")).code == 0
    assert kept(logged_in) is None
    assert kept(token) is not None


async def test_a_token_of_the_environment_is_kept_and_removed_with_the_profile(
    relay: Command, monkeypatch: pytest.MonkeyPatch, logged_in: Path
) -> None:
    monkeypatch.setenv("EDGE_TOKEN", "secret")
    async with FakeMcpServer(token="secret").over_http() as url:
        assert (await relay("login", url)).code == 0
        monkeypatch.delenv("EDGE_TOKEN")
        assert (await relay("call", "echo", '{"message": "ping"}')).code == 0
    kept = [path for path in logged_in.parent.iterdir() if path != logged_in]
    assert [path.stat().st_mode & 0o777 for path in kept] == [0o600]
    assert (await relay("login", "--remove")).code == 0
    assert list(logged_in.parent.iterdir()) == []


async def test_a_login_that_fails_keeps_the_profile_as_it_was(
    relay: Command, tmp_path: Path, logged_in: Path
) -> None:
    wrong = keep(tmp_path / "token", "wrong\n")
    async with FakeMcpServer(token="secret").over_http() as url:
        assert (await relay("login", url, "--token-file", wrong)).code == 11
    assert kept(logged_in) is None
    assert (await relay("login")).code == 2


async def test_a_token_goes_to_no_other_server_and_is_kept_once_its_own_has_taken_it(
    relay: Command, monkeypatch: pytest.MonkeyPatch, logged_in: Path
) -> None:
    async with FakeMcpServer(token="first").over_http() as first, FakeMcpServer().over_http() as second:
        monkeypatch.setenv("EDGE_TOKEN", "first")
        assert (await relay("login", first)).code == 0
        monkeypatch.delenv("EDGE_TOKEN")
        assert (await relay("login", first)).code == 0  # the one that is kept for it
        assert (await relay("login", second)).code == 2  # which is not for that one
        monkeypatch.setenv("EDGE_TOKEN", "second")
        assert (await relay("login", "http://127.0.0.1:9/mcp")).code != 0
        monkeypatch.delenv("EDGE_TOKEN")
        assert (await relay("call", "echo", '{"message": "ping"}')).code == 0
    assert {file.name for file in logged_in.parent.iterdir()} == {"profile.json", "profile.token"}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"url": "https://x"}'])
async def test_a_damaged_profile_says_what_to_do(relay: Command, logged_in: Path, content: str) -> None:
    keep(logged_in, content)
    outcome = await relay("tools")
    assert (outcome.code, outcome.err) == (3, f"relay: {logged_in} is damaged: run `relay login` again\n")


async def test_tools_are_a_table_with_safety_class_and_state(relay: Command) -> None:
    fake = FakeMcpServer()
    fake.tools[0]["_meta"] = {META_SAFETY_CLASS: "read_only"}
    fake.tools[1]["inputSchema"] = {"type": "object", "properties": {"a": {"$ref": "http://evil.example/"}}}
    async with fake.over_http() as url:
        outcome = await relay("tools", "--url", url, "--trust-annotations")
    header, *lines = outcome.out.splitlines()
    assert header.split() == ["NAME", "SAFETY", "(BY)", "REPEATABLE", "VERSION", "STATE", "DESCRIPTION"]
    rows = {line.split()[0]: line for line in lines if line}
    assert re.fullmatch(
        r"echo +read_only \(hub\) +yes +[0-9a-f]{12} +ready +Returns the message\.", rows["echo"]
    )
    assert "contract" in rows["add"]
    assert rows["add"].split()[1] == "unknown"
    assert "add: The tool cannot be called: the schema is refused: a reference leads out" in outcome.out
    assert "evil.example" not in outcome.out
    assert all(len(line) <= 160 for line in lines)


async def test_a_change_is_shown_and_accepted(relay: Command) -> None:
    fake = FakeMcpServer()
    async with fake.over_http() as url:
        await relay("call", "echo", '{"message": "ping"}', "--url", url)
        fake.tools[0]["description"] = "Returns the message, and sends it on."
        refused = await relay("call", "echo", '{"message": "ping"}', "--url", url)
        assert refused.code == 11
        assert (
            'description: from "Returns the message." to "Returns the message, and sends it on."'
            in refused.err
        )
        assert "relay tools --accept echo" in refused.err
        shown = await relay("tools", "--url", url)
        assert "pin" in next(line for line in shown.out.splitlines() if line.startswith("echo"))
        accepted = await relay("tools", "--url", url, "--accept", "echo")
        assert (accepted.code, accepted.err) == (0, "echo is pinned as it is now.\n")
        assert (await relay("call", "echo", '{"message": "ping"}', "--url", url)).code == 0
        assert (await relay("tools", "--url", url, "--accept", "nothing")).code == 12


@pytest.mark.holds("SPEC-0004/3.1/name-version-description")
async def test_tools_as_json(relay: Command) -> None:
    async with FakeMcpServer().over_http() as url:
        outcome = await relay("tools", "--url", url, "--json")
    echo = next(tool for tool in json.loads(outcome.out) if tool["name"] == "echo")
    assert (echo["risk"], echo["risk_source"], echo["refusal"]) == ("admin", "default", None)
    assert echo["safety_class"] is None


async def test_a_ceiling_refuses(relay: Command) -> None:
    async with FakeMcpServer().over_http() as url:
        call = ("call", "echo", '{"message": "ping"}', "--url", url, "--max-risk", "read")
        assert (await relay(*call)).code == 11
        assert (await relay(*call, "--trust-annotations")).code == 0


async def test_the_name_is_no_pattern(relay: Command) -> None:
    fake = FakeMcpServer()
    fake.tools.append({"name": "ec[h]o*", "inputSchema": {"type": "object"}})
    fake.results["ec[h]o*"] = {"ok": True}
    async with fake.over_http() as url:
        assert (await relay("call", "ec[h]o*", "--url", url)).code == 0
    assert fake.sent("echo") == 0


async def test_the_token_comes_from_the_environment_or_a_private_file(
    relay: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    async with FakeMcpServer(token="secret").over_http() as url:
        call = ("call", "echo", '{"message": "ping"}', "--url", url)
        assert (await relay(*call)).code == 11
        exposed = await relay(*call, "--token-file", file)
        assert (exposed.code, exposed.err.count("\n")) == (3, 1)
        assert f"{file} can be read by others" in exposed.err
        file.chmod(0o600)
        assert (await relay(*call, "--token-file", file)).code == 0
        monkeypatch.setenv("EDGE_TOKEN", "secret")
        outcome = await relay(*call)
    assert outcome.code == 0
    assert "secret" not in outcome.out + outcome.err + exposed.err


@pytest.mark.integration
async def test_a_server_over_stdio_is_started(
    relay: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    program = f"{sys.executable} -m tests.fakes.mcp_server {tmp_path / 'log'}"
    outcome = await relay("call", "add", '{"a": 1, "b": 2}', "--stdio", program, "-o", "sum")
    assert (outcome.code, outcome.out) == (0, "3\n")


@pytest.mark.parametrize("command", [("tools",), ("call", "echo")])
async def test_of_a_program_that_ends_at_once_it_is_said_that_no_call_was_sent(
    relay: Command, command: tuple[str, ...]
) -> None:
    outcome = await relay(*command, "--stdio", "true", "--json")
    error = json.loads(outcome.out)
    assert (outcome.code, error["reason"], error["may_have_run"]) == (14, "connection_lost", False)
    assert error["message"] == "The server cannot be reached: the connection was lost; nothing was sent."


def test_a_call_that_a_signal_ends_is_recorded_and_leaves_no_program(tmp_path: Path) -> None:
    pid, log, records = (tmp_path / name for name in ("pid", "log", "records"))
    program = f"sh -c 'echo $$ > {pid}; exec {sys.executable} -m tests.fakes.mcp_server {log}'"
    command = [
        sys.executable,
        "-P",
        "-m",
        "relay",
        "call",
        "delay",
        "--stdio",
        program,
        "--audit",
        str(records),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_until(lambda: log.exists() and log.read_text() != "")
        process.terminate()
        assert process.wait(60) == 130
    assert [json.loads(line).get("reason") for line in records.read_text().splitlines()] == [
        None,
        "cancelled",
    ]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


async def test_a_call_over_a_second_shows_that_it_waits(relay: Command) -> None:
    fake = FakeMcpServer()
    async with fake.over_http() as url:
        outcome = await relay("call", "delay", "--url", url, "--deadline", "1s500ms")
    assert outcome.code == 10
    assert outcome.err.splitlines()[0] == "waiting, 1 s"


async def test_the_line_of_a_call_that_waits_fits_a_narrow_terminal(
    relay: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 10, 0, 0))
    with os.fdopen(terminal, "w") as errors, os.fdopen(screen, "rb", buffering=0) as shown:
        monkeypatch.setattr(sys, "stderr", errors)
        async with FakeMcpServer().over_http() as url:
            await relay("call", "delay", "--url", url, "--deadline", "1s500ms")
        text = shown.read(4096)
    assert text.startswith(b"\r\x1b[Kwaiting, \r\x1b[K")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://relay.example", "https://relay.example/mcp/kinds"),
        ("https://relay.example/", "https://relay.example/mcp/kinds"),
        ("https://relay.example/other", "https://relay.example/other"),
        ("https://relay.example/?names=dashed", "https://relay.example/?names=dashed"),
        ("https://[::1", "https://[::1"),
    ],
)
def test_a_bare_url_gets_the_usual_path(url: str, expected: Any) -> None:
    assert with_path(url) == expected
