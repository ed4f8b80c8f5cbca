"""How settings are shown: as the file that would say the same, and as JSON. Must not decide what they are."""

import json
from collections.abc import Container, Iterator
from typing import Any

from schemas.settings import Form, Setting, Settings


def as_toml(settings: Settings, names: Container[str] | None = None) -> Iterator[str]:
    """Return a line for each setting, which is one of the file, with where its value comes from.

    ``names``: only for those.
    """
    lines = [
        (_toml_line(setting, settings), settings.source(setting))
        for setting in settings.table
        if names is None or setting.name in names
    ]
    width = max((len(line) for line, _ in lines), default=0)
    for line, source in lines:
        yield f"{line:<{width}}  # {source}"


def given_in(settings: Settings) -> dict[str, str]:
    """Return where each value comes from that is not the default."""
    return {name: given.source for name, given in settings.given.items() if given.source != "default"}


def as_document(settings: Settings) -> dict[str, Any]:
    """Return each setting's value as it is in a file, where it comes from, and whether SIGHUP reloads it."""
    return {
        setting.name: {
            "value": _file_value(setting, settings),
            "source": settings.source(setting),
            "reloads": setting.reloads,
        }
        for setting in settings.table
    }


def _toml_line(setting: Setting[Any], settings: Settings) -> str:
    value = _file_value(setting, settings)
    # JSON spells these values as TOML does.
    return f"# {setting.name} =" if value is None else f"{setting.name} = {json.dumps(value)}"


def _file_value(setting: Setting[Any], settings: Settings) -> str | bool | int | list[str] | None:
    given = settings.given.get(setting.name)
    if given is None:
        return None
    match setting.form:
        case Form.TEXT:
            return given.text
        case Form.LIST:
            return [str(each) for each in settings[setting]]
        case Form.FLAG:
            return bool(settings[setting])
        case Form.NUMBER:
            return int(settings[setting])
