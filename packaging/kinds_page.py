"""``make kinds``: writes ``docs/kinds.md``, from the directory of each kind that ships.

Must not describe a kind: its row does.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kubelet.ceiling import NUMBERS
from kubelet.cli.kinds import BY_ENROLMENT
from kubelet.thresholds import Threshold
from schemas.kinds import DOCUMENTS, RFC_0001, ROW, SHIPPED, shipped_names

PAGE = Path(__file__).parents[1] / "docs" / "kinds.md"
_ASKED = json.loads(Path(__file__).with_name("asked.json").read_bytes())
"""What people ask of each kind, and an answer of a run on Debian 12; ``of`` says what was special."""
_UNBOUNDED = 10**12
"""What bounds numbers in documents at all, and tells a reader nothing."""
_HEAD = """\
# Kinds

What can be asked of a board: first the question, an answer, and whether it is on by default; then the
amendment's text. `make kinds` writes this page. **On**: each board and a new hub have it (`system.`),
or enrolment enables it where the hub knows it, as a new one does. **Off**: the board's operator enables it,
and only a token that names it reaches it. All of them are read only. [How boards enrol from one image, and
whether eight hundred want one hub or several](operations.md#enrol-many-boards-or-one-by-hand). Your own:
[Write your own kind](write-your-own-kind.md).
"""


def page() -> str:
    """Return the text of ``docs/kinds.md``."""
    return "\n".join([_HEAD, *(line for name in shipped_names() for line in _section(name))])


def _section(name: str) -> Iterator[str]:
    row = json.loads((SHIPPED / name / ROW).read_bytes())
    known = "always known" if name in RFC_0001 else "where `kinds` names it"
    rate, deadline = row["limits"]["rate_limit_rps"], row["limits"]["deadline_ms_default"]
    yield f"## {name}\n"
    yield from _asked(name, is_on=name in {*RFC_0001, *BY_ENROLMENT})
    private = "; sensitive: only a token that names it reaches it" if row.get("sensitive") else ""
    bounds = f"at most {rate} calls a second, each of at most {deadline} ms"
    yield f"{row['safety_class']}{private}; {known}; {bounds}.\n"
    if about := row.get("about"):
        yield f"- Reads: {about['reads']}\n- Needs: {about['needs']}\n- Exposes: {about['exposes']}\n"
    if numbers := NUMBERS.get(name):
        yield from _thresholds(name, numbers)
    for verb, facts in row["verbs"].items():
        tool = f"{row['kind_short']}.{{node_id}}.{row['capability']['cap_id']}.{verb}"
        links = (f"[{ref}]({_link(name, ref)})" for ref in (facts["input"], facts["output"]))
        yield f"### `{tool}`: {facts['title']}\n"
        yield f"{facts['description']} Documents: {', '.join(links)}.\n"
        yield "```json"
        yield from (json.dumps(facts["example"][end]) for end in ("arguments", "result"))
        yield "```\n"
        if name not in RFC_0001:
            yield from _members(name, facts["input"], "Argument")
            yield from _members(name, facts["output"], "Member of the answer")


def _asked(name: str, *, is_on: bool) -> Iterator[str]:
    asked = _ASKED["kinds"].get(name)
    if asked is None:
        sys.exit(f"packaging/asked.json has no question for {name}")
    yield f"**{asked['question']}** {'On' if is_on else 'Off'} by default.\n"
    if "answer" in asked:
        of = f", {asked['of']}" if "of" in asked else ""
        yield f"An answer of `{asked['verb']}` in a run, {_ASKED['recorded']}{of}:\n"
        yield f"```json\n{json.dumps(asked['answer'])}\n```\n"
    else:
        yield "No run is recorded here; the example below is made by hand.\n"


def _thresholds(name: str, numbers: Mapping[str, Threshold]) -> Iterator[str]:
    yield f'Its table in `kubelet.toml`, `["{name}"]`, may set from when on something is a finding:\n'
    yield "| Threshold | default | from, to | why |\n|---|---|---|---|"
    for threshold, (default, least, most, why) in numbers.items():
        yield f"| `{threshold}` | {default:g} | {least:g}, {most:g} | {why} |"
    yield ""


def _members(name: str, ref: str, heading: str) -> Iterator[str]:
    document = json.loads((SHIPPED / name / DOCUMENTS / f"{ref}.json").read_bytes())
    if rows := list(_rows(document, "")):
        yield f"| {heading} | form | |\n|---|---|---|"
        yield from rows
        yield ""


def _rows(schema: Mapping[str, Any], before: str) -> Iterator[str]:
    """Yield a line of the table for each member that holds no others, by the path to it."""
    for member, rules in schema["properties"].items():
        inner, path = rules, before + member
        if "items" in rules:
            inner, path = rules["items"], f"{path}[≤ {rules['maxItems']}]"
        if "properties" in inner:
            yield from _rows(inner, f"{path}.")
        else:
            yield f"| `{path}` | {_form(inner)} | {inner.get('description', '')} |"


def _form(rules: Mapping[str, Any]) -> str:
    types = [rules["type"]] if isinstance(rules["type"], str) else rules["type"]
    if "enum" in rules:
        return ", ".join(f"`{value}`" if value else "null" for value in rules["enum"])
    bounds = ""
    if "maxLength" in rules:
        bounds = f" of at most {rules['maxLength']} characters"
    elif abs(rules.get("maximum", _UNBOUNDED)) < _UNBOUNDED:
        bounds = f" {rules['minimum']} to {rules['maximum']}"
    return " or ".join(types) + bounds


def _link(name: str, ref: str) -> str:
    return f"../schemas/kinds/{name}/{DOCUMENTS}/{ref}.json"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"{PAGE}\n")
