"""The texts that a page of ``docs/`` shows: ``<!-- file: PATH -->`` or ``snippet`` is over each."""

import re

_SHOWN = re.compile(r"(?ms)^<!-- file: (?P<path>[^\n,]+) -->\n```\w+\n(?P<text>.*?)^```$")
_SNIPPET = re.compile(r"(?ms)^<!-- snippet: ([\w.]+) -->\n```python\n(.*?)^```$")
_COMMENT = re.compile(r"(?m)^<!-- ")


def shown_files(page: str) -> dict[str, str]:
    """Return the texts of the files that ``page`` shows, by their paths.

    Raises:
        ValueError: a comment is over no block; a misspelt one would otherwise be passed over.
    """
    found = {match["path"]: match["text"] for match in _SHOWN.finditer(page)}
    if len(found) != len(_COMMENT.findall(page)):
        raise ValueError("a comment of the page is not above a block, or is misspelt")
    return found


def snippets(page: str) -> dict[str, str]:
    """Return the programs that ``page`` shows among other blocks, by their names."""
    return dict(_SNIPPET.findall(page))
