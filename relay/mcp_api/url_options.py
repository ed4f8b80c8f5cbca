"""What a client chooses by its URL: the form of names, the view, and what it is narrowed to.

The paths `/mcp/tools` and `/mcp/kinds` choose a view, with dashed names: some clients drop a query, or refuse
a token for a URL without it. Whatever a path leaves open is a parameter of the query:

| parameter | values |
|---|---|
| `names` | `dotted` or `dashed` |
| `view` | `tools` or `kinds` |
| `nodes` | ids, labels or prefixes of at least 6 characters |
| `kinds` | such as `system.metrics`, or `sys` |
| `tags` | such as `site=north` or `gateway` |

The last three take several values, separated by commas, or the parameter is repeated; a comma in a label is
written `%2C`. A parameter or value that is not allowed is an error and never ignored, so that a list is never
wider than its URL says. Must not read which nodes there are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from urllib.parse import unquote_plus

from relay.auth.permissions import TAG
from relay.fleet.selection import Selection
from schemas.addresses import KINDS_PATH, MCP_PATH, TOOLS_PATH, View
from schemas.error_roots import PeerError
from schemas.kinds import KindRegistry
from schemas.labels import NameRuleError, check_tags

MAX_VALUES = 64
_MAX_VALUE = 64
_NAMES = ("dotted", "dashed")
_PARAMETERS = ("names", "view", "nodes", "kinds", "tags")
_BY_PATH: Mapping[str, Sequence[tuple[str, str]]] = {
    MCP_PATH: (),
    TOOLS_PATH: (("names", "dashed"), ("view", View.TOOLS)),
    KINDS_PATH: (("names", "dashed"), ("view", View.KINDS)),
}
_KEPT = 256  # a client sends the same query each time


class UrlOptionError(PeerError):
    """A parameter or value is not allowed. The text says what is allowed, and nothing of what was given."""


@dataclass(frozen=True, slots=True)
class UrlOptions:
    """What one URL chooses."""

    dashed: bool
    selection: Selection


class UrlOptionReader:
    """Reads URLs. ``kinds`` are those that there are; ``default_view`` is that of a URL without one.

    Attributes:
        read: returns what a query and a path choose; raises UrlOptionError.
    """

    def __init__(self, kinds: KindRegistry, default_view: View = View.TOOLS) -> None:
        self._kinds = kinds
        self._default_view = default_view
        self.read = lru_cache(maxsize=_KEPT)(self._read)

    def change_default(self, view: View) -> None:
        self._default_view = view
        self.read.cache_clear()

    def _read(self, query: str, path: str = MCP_PATH) -> UrlOptions:
        pairs = [pair.partition("=") for pair in query.split("&")] if query else []
        given = [*_BY_PATH[path], *((unquote_plus(name), value) for name, _, value in pairs if name)]
        _check_names({name for name, _ in given})
        return UrlOptions(
            dashed=_choice(given, "names", _NAMES, "dotted") == "dashed",
            selection=Selection(
                view=View(_choice(given, "view", tuple(View), self._default_view)),
                # Each once: every call and every list looks for each of them.
                nodes=tuple(dict.fromkeys(_values(given, "nodes", "labels or ids of nodes"))),
                kinds=frozenset(map(self._kind, _values(given, "kinds", self._allowed_kinds()))),
                tags=tuple(dict.fromkeys(map(_tag, _values(given, "tags", "such as site=north or gateway")))),
            ),
        )

    def _kind(self, value: str) -> str:
        kind = self._kinds.get(value) or self._kinds.by_short(value)
        if kind is None:
            raise UrlOptionError(f"kinds must be {self._allowed_kinds()}")
        return kind.short

    def _allowed_kinds(self) -> str:
        return ", ".join(sorted(f"{kind.name} ({kind.short})" for kind in self._kinds))


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name not in _PARAMETERS:
            # Not the name itself: what a client sends is not repeated to a model.
            near = get_close_matches(name[:_MAX_VALUE], _PARAMETERS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UrlOptionError(f"the URL's parameters are {', '.join(_PARAMETERS)}{hint}")


def _choice(given: Sequence[tuple[str, str]], name: str, allowed: Sequence[str], default: str) -> str:
    values = [unquote_plus(value) for key, value in given if key == name] or [default]
    if len(values) > 1 or values[0] not in allowed:
        raise UrlOptionError(f"{name} must be {' or '.join(allowed)}, and be given once, by path or query")
    return values[0]


def _values(given: Sequence[tuple[str, str]], name: str, allowed: str) -> list[str]:
    values = [unquote_plus(part) for key, value in given if key == name for part in value.split(",")]
    if len(values) > MAX_VALUES or not all(0 < len(value) <= _MAX_VALUE for value in values):
        raise UrlOptionError(f"{name} must be {allowed}; 1 to {MAX_VALUES} of them, not empty")
    return values


def _tag(value: str) -> str:
    tag = value.removeprefix(TAG)
    try:
        check_tags([tag])
    except NameRuleError:
        raise UrlOptionError("tags must be such as site=north or gateway") from None
    return tag
