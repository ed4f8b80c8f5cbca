"""A test that does what its markers do not say fails, and says which marker it needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent
SAMPLES = """
import os
import socket
import subprocess
import sys
import pytest

def listen(host="127.0.0.1"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, 0), family=family).close()

def start(count):
    for _ in range(count):
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)

@pytest.fixture
def server():
    listen()

@pytest.fixture(scope="module")
def system():
    start(5)

@pytest.fixture
def own_system():
    start(4)

def test_broken_by_listening():
    listen()

def test_broken_by_listening_over_ipv6():
    listen("::1")

def test_broken_where_the_exception_would_be_handled():
    try:
        listen()
    except BaseException:
        pass

def test_broken_by_a_process():
    subprocess.run(["true"], check=True)

def test_broken_by_a_fork():
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)

def test_broken_by_a_fixture(server):
    pass

@pytest.mark.integration
def test_kept_with_the_marker(server):
    subprocess.run(["true"], check=True)

@pytest.mark.integration
def test_not_long_and_starts_too_many_programs():
    start(5)

@pytest.mark.integration
def test_not_long_and_starts_one_more_than_its_fixture(own_system):
    start(1)

@pytest.mark.integration
def test_not_long_and_starts_a_demo():
    subprocess.run([sys.executable, "-S", "-c", "", "demo"], check=True)

@pytest.mark.long
@pytest.mark.integration
def test_kept_by_a_long_one():
    start(5)

@pytest.mark.integration
def test_kept_with_a_shared_system(system):
    start(4)

@pytest.mark.integration
def test_kept_with_programs_that_are_not_ours():
    for _ in range(5):
        subprocess.run(["true"], check=True)

def test_kept_by_a_unix_socket(tmp_path):
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))

def test_kept_by_a_client():
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", 9)) != 0
"""


def test_the_rule_is_kept_or_the_test_says_how(tmp_path: Path) -> None:
    (tmp_path / "test_samples.py").write_text(SAMPLES, "utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  integration\n  long\n", "ascii")
    options = ["-p", "tests.size_rules", "-p", "no:cacheprovider", "-rA", "--rootdir", str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *options, "-c", str(tmp_path / "pytest.ini"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    lines = ran.stdout.splitlines()
    refused = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    passed = [line for line in lines if line.startswith("PASSED ")]
    assert len(refused) == SAMPLES.count("def test_broken_") + SAMPLES.count("def test_not_long_"), ran.stdout
    assert all("::test_broken_" in line or "::test_not_long_" in line for line in refused)
    assert len(passed) == SAMPLES.count("def test_kept_")
    assert "a test of a single part starts a process: mark it with pytest.mark.integration" in ran.stdout
    assert "starts 5 programs in Python, more than 4: mark it with pytest.mark.long" in ran.stdout
