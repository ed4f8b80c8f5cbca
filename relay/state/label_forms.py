"""Labels with letters beyond ASCII: which letters, and the forms in ASCII that are kept and typed.

| form | of `Gewächshaus` | for |
|---|---|---|
| shown | `Gewächshaus` | people and models; in NFC |
| kept | `xn--Gewchshaus-s5a` | files and other relays; a relay of an older version shows this |
| typed | `Gewachshaus` | references, where a keyboard lacks the letters; else the kept form |
| look | `gewachshaus` | two labels of a tenant must not have the same |

The kept form is Punycode (RFC 3492), so the shown form follows from it. Of ASCII labels all forms are the
label, but for the case of its look. The letters are a table of our own: what a label is must not change with
the Unicode version of Python. No script here runs from right to left or has invisible letters, and a mark
stands only where a letter of its script carries it. Must not know which labels there are.
"""

import re
from itertools import chain
from unicodedata import bidirectional, category, east_asian_width, is_normalized, normalize

from schemas.text import printable

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
