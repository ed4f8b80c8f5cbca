"""What a node's label and tags may be. They are the operator's text, and reach agents, terminals and logs.

A label is printable ASCII without what has a meaning elsewhere: `=`, `*` and `:` select nodes, and `<`, `>`,
backtick, `"` and backslash are markup and quoting, to a model as to a terminal. It is not readable as an id:
not as a node's, or the beginning of one (6 to 26 characters of a ULID's alphabet, of which the first is a
digit up to 7, or any 26 of them), nor as a certificate's (16 or more hex digits). It may have letters beyond
ASCII too, and has then these forms:

| form | of `Gewächshaus` | for |
|---|---|---|
| shown | `Gewächshaus` | people and models; in NFC |
| kept | `xn--Gewchshaus-s5a` | files and other relays; a relay of an older version shows this |
| typed | `Gewachshaus` | references, where a keyboard lacks the letters; else the kept form |
| look | `gewachshaus` | two labels of a tenant must not have the same |

The kept form is Punycode (RFC 3492), so the shown form follows from it. Of ASCII labels all forms are the
label, but for the case of its look. The letters are a table of our own: what a label is must not change with
the Unicode version of Python. No script here runs from right to left or has invisible letters, and a mark
stands only where a letter of its script carries it. Must not know which labels there are, nor any node.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from unicodedata import bidirectional, category, east_asian_width, is_normalized, normalize

from schemas.error_roots import OperatorError
from schemas.projection import NODE_ID_PATTERN
from schemas.text import printable, quoted

PREFIX = "xn--"
SCRIPTS = {
    "Latin": re.compile("[A-Za-zÀ-ÖØ-öø-ſƏƠơƯưǍ-ǜȘ-țəḀ-ẙẞẠ-ỹ]"),
    "Greek": re.compile("[ΆΈ-ΊΌΎ-ΡΣ-ώ]"),
    "Cyrillic": re.compile("[Ѐ-џҐ-ӿ]"),
    "Chinese": re.compile("[々㐀-䶿一-鿿]"),
    "Hiragana": re.compile("[ぁ-ゖ]"),
    "Katakana": re.compile("[ァ-ヺー]"),
    "Korean": re.compile("[가-힣]"),
    "Devanagari": re.compile("[\u0901\u0902\u0905-\u0939\u093c\u093e-\u094d]"),
    "Thai": re.compile("[กขคฆ-ฮะาำเ-ไๆ\u0e31\u0e34-\u0e39\u0e47-\u0e4c]"),
}
_IN_ONE_WORD = ({"Latin", "Chinese", "Hiragana", "Katakana"}, {"Latin", "Chinese", "Korean"})
_MARKS = "\u0901\u0902\u093c\u093e-\u094d\u0e31\u0e34-\u0e39\u0e47-\u0e4c"
_WORD = re.compile(rf"(?:[^\W\d_]|[{_MARKS}])+")
_CONSONANT = "[\u0915-\u0939]\u093c?"  # with its dot
_CLUSTERS = {
    # A vowel; or consonants joined by the virama, with one sign of a vowel at most. A second sign, or one on
    # a vowel, looks like another letter.
    "Devanagari": re.compile(
        rf"(?:(?:[\u0905-\u0914]|{_CONSONANT}(?:\u094d{_CONSONANT})*(?:\u094d(?!{_CONSONANT})|[\u093e-\u094c])?)"
        r"[\u0901\u0902]?)+"
    ),
    # A consonant, with at most one vowel in front, one above or below, a mark over that, and those behind.
    "Thai": re.compile(r"(?:[เ-ไ]?[กขคฆ-ฮ][\u0e31\u0e34-\u0e39]?[\u0e47-\u0e4c]?[าำ]?ะ?ๆ?)+"),
}
_IN_TWO_PARTS = "ำ"
"""What NFKC takes apart, into parts of which one is no letter here."""
_ACCENT = re.compile("[\u0300-\u036f\u093c]")
_IN_ASCII = str.maketrans(
    dict(zip("ØøĐđÐðŁłĦħŦŧıĸŊŋƏə", "OoDdDdLlHhTtikNnEe", strict=True))
    | {"ß": "ss", "ẞ": "SS", "Æ": "AE", "æ": "ae", "Œ": "OE", "œ": "oe", "Þ": "TH", "þ": "th"}
)
_LOOKALIKES = str.maketrans(
    "АВЕЅІЈКМНОРСТУХҮӀавеѕіјкмнорстухһүӏЗз" + "ΑΒΕΖΗΙΚΜΝΟΡΤΥΧαβεηικμνορτυχωγ" + "エオカタトニハヘベペローリ",
    "ABESIJKMHOPCTYXYIabesijkmhopctyxhyl33" + "ABEZHIKMNOPTYXabenikmvoptuxwy" + "工才力夕卜二八へべぺ口一り",
)
_SPACES = str.maketrans(" _", "_ ")


def fault_of_letters(label: str) -> str | None:
    """Return why ``label`` may not be written in its letters beyond ASCII; None if it may."""
    if "_" in label:
        return "use no underscore beside letters beyond ASCII"  # the kept form has it in place of a space
    return _fault_of_scripts(label)


def _fault_of_scripts(text: str) -> str | None:
    for char in text:
        is_usual = char in _IN_TWO_PARTS or is_normalized("NFKC", char)
        if not char.isascii() and bidirectional(char) in {"R", "AL"}:
            return f"U+{ord(char):04X} is written from right to left, and would reorder the id beside it"
        if not char.isascii() and not (_scripts_of(char) and is_usual):
            return f"U+{ord(char):04X} is no letter of {', '.join(SCRIPTS)}"
    for word in _WORD.findall(text):
        found = set(chain.from_iterable(map(_scripts_of, word)))
        if len(found) > 1 and not any(found <= allowed for allowed in _IN_ONE_WORD):
            return f"a word has letters of {' and '.join(sorted(found))}, some of which look the same"
        for script in found & _CLUSTERS.keys():
            if not _CLUSTERS[script].fullmatch(word):
                return f"a mark of {script} is on no letter that can carry it"
    return None


def _scripts_of(char: str) -> list[str]:
    return [script for script, letters in SCRIPTS.items() if letters.fullmatch(char)]


def kept_form(label: str) -> str:
    """Return ``label`` as it is written in files and sent to other relays: in ASCII."""
    if label.isascii():
        return label
    return PREFIX + label.translate(_SPACES).encode("punycode").decode("ascii")


def shown_form(kept: str) -> str:
    """Return the label of which ``kept`` is the kept form, in any case; ``kept`` itself if it is of none."""
    if not kept.lower().startswith(PREFIX) or not kept.isascii():
        return kept
    try:
        label = kept[len(PREFIX) :].encode("ascii").decode("punycode").translate(_SPACES)
    except UnicodeError:
        return kept
    is_one = not label.isascii() and is_normalized("NFC", label) and fault_of_letters(label) is None
    return label if is_one and kept_form(label).lower() == kept.lower() else kept


def typed_form(label: str) -> str:
    """Return what is typed for ``label`` on a keyboard without its letters."""
    plain = _without_accents(label)
    return plain if plain.isascii() else kept_form(label)


def with_typed_form(label: str) -> str:
    """Return ``label`` for people: with what is typed for it beside it, where that differs."""
    typed = typed_form(label)
    return label if typed == label else f"{label} ({typed})"


def look_of(label: str) -> str:
    """Return what two labels have in common that people would take for each other."""
    return label.lower() if label.isascii() else _without_accents(label).translate(_LOOKALIKES).lower()


def _without_accents(label: str) -> str:
    if label.isascii():
        return label
    return normalize("NFC", _ACCENT.sub("", normalize("NFD", label))).translate(_IN_ASCII)


def legible(text: str, limit: int = 256) -> str:
    r"""Return ``text`` as people read it: letters that labels may have stay, all else is escaped or cut.

    >>> legible("Gewächshaus: Echo"), legible("G\u0435wächshaus")
    ('Gewächshaus: Echo', 'G\\u0435w\\xe4chshaus')
    """
    cut = text[:limit]
    if cut.isascii() or not cut.isprintable() or _fault_of_scripts(cut):
        return printable(text, limit)
    return cut


def columns_of(text: str) -> int:
    """Return how many columns of a terminal ``text`` takes."""
    if text.isascii():
        return len(text)
    return sum((category(char) != "Mn") + (east_asian_width(char) in "WF") for char in text)


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


@dataclass(frozen=True, slots=True)
class NodeName:
    """What the operator calls a node of ``tenant``: by a label (empty: none) and tags, sorted.

    ``proven`` is the name by which tokens reach it, where that is another: the last that was decided here or
    that a relay has signed.
    """

    tenant: str
    label: str = ""
    tags: tuple[str, ...] = ()
    proven: "NodeName | None" = None


class NameRuleError(OperatorError):
    """A label or a tag is not of its form; the text says what is."""


def label_of(text: str) -> str:
    """Return the label that ``text`` means, as it is shown: in NFC, or from its kept form.

    Raises:
        NameRuleError: it breaks a rule.
    """
    label = meant_by(text)
    if label.isascii():
        check_kept(label)
        return label
    if fault := fault_of_letters(label):
        raise NameRuleError(f"{quoted(label)} is no label: {fault}")
    # No id and no hex digits have a letter u.
    for form in (_BEYOND_ASCII.sub("u", label), typed_form(label), kept_form(label)):
        check_kept(form, label)
    return label


def meant_by(text: str) -> str:
    """Return the label that ``text`` means if it is one: in NFC, or from its kept form."""
    if len(text) > _LONGEST_MEANT:
        return text
    return shown_form(text) if text.isascii() else normalize("NFC", text)


def check_kept(label: str, named: str | None = None) -> None:
    """Return if ``label``, in ASCII, may be kept as one; an error names it as ``named``.

    Raises:
        NameRuleError: it may not.
    """
    if _LABEL.fullmatch(label) is None or "  " in label:
        raise NameRuleError(
            f"{quoted(named or label)} is no label: use 1 to {MAX_LABEL} letters, digits and signs "
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
                f"{quoted(tag, 65)} is no tag: write gateway or site=north, "
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
    """Return ``reference`` as a node's full id, in the case of ids; None if it is not an id."""
    lower = reference.lower()
    return lower if _NODE_ID.fullmatch(lower) else None
