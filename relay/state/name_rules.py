"""What a node's label and tags may be. They are the operator's text, and reach agents, terminals and logs.

A label is printable ASCII without what has a meaning elsewhere: `=`, `*` and `:` select nodes, and `<`, `>`,
backtick, `"` and backslash are markup and quoting, to a model as to a terminal. It is not readable as an id:
not as a node's, or the beginning of one (6 to 26 characters of a ULID's alphabet, of which the first is a
digit up to 7, or any 26 of them), nor as a certificate's (16 or more hex digits). It may have letters beyond
ASCII too: ``relay.state.label_forms`` has which. Must not know any node.
"""

import re
from collections.abc import Iterable
from unicodedata import normalize

from relay.state.label_forms import fault_of_letters, kept_form, shown_form, typed_form
from schemas.error_roots import OperatorError
from schemas.projection import NODE_ID_PATTERN
from schemas.text import printable

MAX_LABEL = 48
MAX_TAGS = 16
MIN_PREFIX = 6

_LABEL = re.compile(r"(?! )(?!-)[ !#-)+-9;?-\[\]-_a-z{|}~]{1,48}(?<! )")
_ID = re.compile(r"[0-7][0-9a-hjkmnp-tv-z]{5,25}|[0-9a-hjkmnp-tv-z]{26}|[0-9a-f]{16,}", re.IGNORECASE)
_TAG = re.compile(r"(?P<key>[a-z0-9_.-]{1,32})(?:=(?P<value>[a-z0-9_.-]{1,32}))?")
_PREFIX = re.compile(r"[0-9a-hjkmnp-tv-z]{6,26}")
_NODE_ID = re.compile(NODE_ID_PATTERN)
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_LONGEST_MEANT = 256
"""What is longer means no label, and is not normalized."""


class NameRuleError(OperatorError):
    """A label or a tag is not of its form; the text says what is."""


def label_of(text: str) -> str:
    """Return the label that ``text`` means, as it is shown: in NFC, or from its kept form.

    Raises:
        NameRuleError: it is none.
    """
    label = meant_by(text)
    if label.isascii():
        check_kept(label)
        return label
    if fault := fault_of_letters(label):
        raise NameRuleError(f"{printable(label, MAX_LABEL)!r} is no label: {fault}")
    # No id and no hex digits have a letter u.
    check_kept(_BEYOND_ASCII.sub("u", label))
    check_kept(typed_form(label))
    check_kept(kept_form(label))
    return label


def meant_by(text: str) -> str:
    """Return the label that ``text`` means if it is one: in NFC, or from its kept form."""
    if len(text) > _LONGEST_MEANT:
        return text
    return shown_form(text) if text.isascii() else normalize("NFC", text)


def check_kept(label: str) -> None:
    """Return if ``label``, in ASCII, may be kept as one.

    Raises:
        NameRuleError: it may not.
    """
    if _LABEL.fullmatch(label) is None or "  " in label:
        raise NameRuleError(
            f"{printable(label, MAX_LABEL)!r} is no label: use 1 to {MAX_LABEL} letters, digits and signs "
            'without = * : < > ` " and backslash, no dash in front, and single spaces within'
        )
    if _ID.fullmatch(label):
        raise NameRuleError(f"{label!r} is no label: it can be read as an id; add a word")


def check_tags(tags: Iterable[str]) -> None:
    """Return if ``tags`` may be those of one node.

    Raises:
        NameRuleError: one is malformed, two have the same key, or there are too many.
    """
    given = tuple(tags)
    for tag in given:
        if _TAG.fullmatch(tag) is None:
            raise NameRuleError(
                f"{printable(tag, 65)!r} is no tag: write gateway or site=north, "
                "1 to 32 of a-z, 0-9, _ . and - on each side"
            )
    if len({tag_key(tag) for tag in given}) != len(given):
        raise NameRuleError("two tags have the same key: a node has one value for each")
    if len(given) > MAX_TAGS:
        raise NameRuleError(f"a node has at most {MAX_TAGS} tags: remove some first")


def tag_key(tag: str) -> str:
    """Return what a tag is set and removed by: what is before its ``=``, or all of it."""
    return tag.partition("=")[0]


def folded(label: str) -> str:
    """Return the form in which labels are compared: as they are shown, without regard to case."""
    return meant_by(label).lower()


def id_prefix_of(reference: str) -> str | None:
    """Return ``reference`` as a node's id or the beginning of one; None if it can be neither."""
    lower = reference.lower()
    return lower if _PREFIX.fullmatch(lower) else None


def node_id_of(reference: str) -> str | None:
    """Return ``reference`` as a node's full id, in the case of ids; None if it is none."""
    lower = reference.lower()
    return lower if _NODE_ID.fullmatch(lower) else None
