"""``make kinds``: writes ``docs/kinds.md``, from the directory of each kind that ships.

Must not describe a kind: its row does.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from schemas.kinds import DOCUMENTS, RFC_0001, ROW, SHIPPED, shipped_names

PAGE = Path(__file__).parents[1] / "docs" / "kinds.md"
_HEAD = """\
# Kinds

What a node can offer. `make kinds` writes this page from `schemas/kinds/`, where each kind is a directory
of data: its row `kind.json`, and the documents of its verbs. The kinds of RFC-0001 are known to every node
and relay. Any other is announced by the nodes, and admitted by the relays, whose setting `kinds` names it.
For kinds of your own see [Write your own kind](write-your-own-kind.md). Each example is a call, and an
answer to one.
"""


def page() -> str:
    """Return the text of ``docs/kinds.md``."""
    return "\n".join([_HEAD, *(line for name in shipped_names() for line in _section(name))])


def _section(name: str) -> Iterator[str]:
    row = json.loads((SHIPPED / name / ROW).read_bytes())
    known = "RFC-0001's, always known" if name in RFC_0001 else "where `kinds` names it"
    rate, deadline = row["limits"]["rate_limit_rps"], row["limits"]["deadline_ms_default"]
    yield f"## {name}\n"
    yield f"{row['safety_class']}; {known}; at most {rate} calls a second, each of at most {deadline} ms.\n"
    for verb, facts in row["verbs"].items():
        tool = f"{row['kind_short']}.{{node_id}}.{row['capability']['cap_id']}.{verb}"
        links = (f"[{ref}]({_link(name, ref)})" for ref in (facts["input"], facts["output"]))
        yield f"### `{tool}`: {facts['title']}\n"
        yield f"{facts['description']} Documents: {', '.join(links)}.\n"
        yield "```json"
        yield from (json.dumps(facts["example"][end]) for end in ("arguments", "result"))
        yield "```\n"


def _link(name: str, ref: str) -> str:
    return f"../schemas/kinds/{name}/{DOCUMENTS}/{ref}.json"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"{PAGE}\n")
