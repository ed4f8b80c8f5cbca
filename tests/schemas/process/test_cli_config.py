import tomllib
from pathlib import Path

from schemas.process.cli_config import as_document, as_toml
from schemas.settings import Form, Given, Setting, Settings, parse_flag, parse_path, whole_number

FILE = Setting("file", parse_path, "A file.", "FILE")
COUNT = Setting("count", whole_number(0, 9), "How many.", "N", "3", Form.NUMBER, reloads=True)
PLAIN = Setting("plain", parse_flag, "In the clear.", default="false", form=Form.FLAG)
TABLE = (FILE, COUNT, PLAIN)

HOSTILE = 'a"b\\c\n\x1b[31m\x7f\u202e'


def test_what_is_shown_is_the_file_that_would_say_the_same() -> None:
    settings = Settings(TABLE, [{"file": Given(HOSTILE, "--file"), "plain": Given("true", "A_PLAIN")}])
    text = "\n".join(as_toml(settings))
    assert tomllib.loads(text) == {"file": HOSTILE, "count": 3, "plain": True}
    assert all(line.isprintable() and line.isascii() for line in text.splitlines())
    assert settings[FILE] == Path(HOSTILE).absolute()


def test_every_line_says_where_the_value_stands() -> None:
    settings = Settings(TABLE, [{"count": Given("4", "/etc/a.toml, line 2")}])
    assert list(as_toml(settings)) == [
        "# file =       # not set",
        "count = 4      # /etc/a.toml, line 2",
        "plain = false  # default",
    ]


def test_for_programs_the_values_have_the_types_of_the_file() -> None:
    document = as_document(Settings(TABLE, [{"count": Given("04", "A_COUNT")}]))
    assert document == {
        "file": {"value": None, "source": "not set", "reloads": False},
        "count": {"value": 4, "source": "A_COUNT", "reloads": True},
        "plain": {"value": False, "source": "default", "reloads": False},
    }
