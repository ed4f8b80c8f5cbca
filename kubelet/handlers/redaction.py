"""Removes secrets of known forms from texts, before they leave the node.

A table of forms is no proof that a text has no secret. Must not be relied on where access itself can be
refused. Each form takes steps in proportion to the text: what it looks for has a bound, or is consumed.
"""

import re
from collections.abc import Iterable, Iterator
from os.path import commonprefix

REPLACEMENT = "[redacted]"
_REPLACED = rf"\1{REPLACEMENT}"
LONGEST = 32 * 1024
"""What follows in a text is left out: no kind shows as much of one."""
_AHEAD = 1024
"""By no more of what follows its first character is a secret known: a password in a URL by the @ after it."""

_WORD = r"[A-Za-z0-9+/_=.~-]"
_NAME = (
    r"(?:pass(?:word|wd|phrase)?|pwd|secret|token|credential|psk"
    r"|(?:api|access|account|private|preshared|auth|encryption|secret)[_-]?key)"
)
_NAMES = ("pass", "pwd", "secret", "token", "credential", "psk", "key")
_CLOSE = r"(?:\\?[\"'])?\s{0,64}"
# A value ends with its quote, which may begin in Some("...") or b'...' too, and be doubled or escaped in it.
# Without one, punctuation ends it only where something else can follow: the next name, a quote or a blank.
_QUOTE = r"(?:(?:[A-Za-z_.:]{0,32}[(\[]){0,2}[bru]{0,2}(\\?[\"']))?"
_BARE = r"(?:[^\s\"',;&]|[,;&](?![\s\"']|$|[\w.-]{1,32}[\"']?[=:])|[\"'](?![\s,;:)\]}]|$))+"
_VALUE = rf"(?(2)(?:\2\2|(?!\2)\\?.)+|(?:\{{[^}}]*\}}?|(?!\\?[\"']){_BARE}))"

_BEGIN = r"-----BEGIN [A-Z0-9 ]{0,32}PRIVATE KEY(?: BLOCK)?-----"
_END = r"-----END [A-Z0-9 ]{0,32}PRIVATE KEY(?: BLOCK)?-----"

# What a text has if it has a secret of the form, in small letters: a look that costs next to nothing.
_FORMS = tuple(
    (hints, re.compile(form, re.IGNORECASE | re.DOTALL))
    for hints, form in (
        # A private key in PEM, also the first or last part of one that a log has cut.
        (
            ("private key",),
            rf"{_BEGIN}.*?(?:{_END}|$)()",
        ),
        # A line of such a key, where each is an entry of its own.
        (("",), r"^()[A-Za-z0-9+/]{40,80}={0,2}$"),
        # Credentials in a URL: the password of user:password@host, or a token in the place of both.
        (("://",), r"(?<=://)([^\s/@:]{0,64}:)[^\s/]{1,256}(?=@)"),
        (("://",), r"(?<=://)()[^\s/@:]{20,256}(?=@)"),
        # HTTP authorization, in a header or a curl command.
        (
            ("authorization",),
            rf"\b((?:proxy-)?authorization{_CLOSE}[:=]\s{{0,64}}\[?(?:\\?[\"'])?(?:basic|bearer|digest|token)\s{{1,64}}){_WORD}{{4,}}",
        ),
        (("bearer",), rf"\b(bearer\s{{1,64}}){_WORD}{{12,}}"),
        # name=value and name: value, in JSON too, whose name says what it is.
        (
            _NAMES,
            rf"({_NAME}[A-Za-z0-9_-]{{0,24}}{_CLOSE}[:=]\s{{0,64}}{_QUOTE}){_VALUE}",
        ),
        # An option that ends with such a name, and its value as the next word, also in a list of JSON.
        (
            _NAMES,
            rf"((?<![\w-])--?(?:[\w-]{{0,32}}[_-])?{_NAME}(?:\s{{1,64}}|[\"'],\s{{0,64}}(?=[\"'])){_QUOTE})(?!--){_VALUE}",
        ),
        (("sshpass",), r"(\bsshpass\s{1,64}-p\s{0,64})\S{1,512}"),
        (("mysql", "mariadb"), r"(\b(?:mysql|mariadb)[a-z-]{0,16}\s[^\n]{0,256}?(?<=\s)-p)\S{1,512}"),
        # In .netrc.
        (("login",), r"(\blogin\s{1,64}\S{1,64}\s{1,64}password\s{1,64})\S{1,512}"),
        # A session of a browser, in a header.
        (("cookie",), r"\b((?:set-)?cookie\s{0,64}:\s{0,64})[^\r\n]{1,4096}"),
        # What crypt(3) makes of a password, as in /etc/shadow.
        (("$",), r"()\$(?:[1567y]|2[abxy]|gy)\$[./A-Za-z0-9$=,]{8,256}"),
        # A web hook, whose path is all that one needs to use it.
        (("hooks.slack.com",), r"(hooks\.slack\.com/(?:services|workflows)/)[A-Za-z0-9/]{8,256}"),
        (("/bot",), r"(/bot)\d{6,12}:[A-Za-z0-9_-]{30,64}"),
        # Tokens that say by their beginning what they are.
        (("akia", "asia"), r"\b()(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
        (("gh",), r"\b()gh[pousr]_[A-Za-z0-9]{20,}"),
        (("github_pat_",), r"\b()github_pat_[A-Za-z0-9_]{20,}"),
        (("glpat-", "glrt-", "gldt-"), r"\b()gl(?:pat|rt|dt)-[A-Za-z0-9_-]{16,}"),
        (("aiza",), r"\b()AIza[A-Za-z0-9_-]{30,}"),
        (("ya29.",), r"\b()ya29\.[A-Za-z0-9_-]{16,}"),
        (("xox",), r"\b()xox[abposr]-[A-Za-z0-9-]{10,}"),
        (("k_live_", "k_test_"), r"\b()[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"),
        (("sk-",), r"\b()sk-[A-Za-z0-9_-]{20,}"),
        (("whsec_",), r"\b()whsec_[A-Za-z0-9+/=]{20,}"),
        (("hf_",), r"\b()hf_[A-Za-z0-9]{20,}"),
        (("_v1_",), r"\b()do[por]_v1_[a-f0-9]{32,}"),
        (("sg.",), r"\b()SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),
        (("hvs.",), r"\b()hvs\.[A-Za-z0-9_-]{20,}"),
        (("dckr_pat_",), r"\b()dckr_pat_[A-Za-z0-9_-]{20,}"),
        (("tskey-",), r"\b()tskey-[A-Za-z0-9-]{16,}"),
        (("shp",), r"\b()shp(?:at|ca|pa|ss)_[A-Fa-f0-9]{32,}"),
        (("dapi",), r"\b()dapi[a-f0-9]{32}"),
        (("lin_api_",), r"\b()lin_api_[A-Za-z0-9]{20,}"),
        (("sq0",), r"\b()sq0(?:atp|csp)-[A-Za-z0-9_-]{20,}"),
        (("npm_",), r"\b()npm_[A-Za-z0-9]{30,}"),
        (("pypi-",), r"\b()pypi-[A-Za-z0-9_-]{30,}"),
        (("eyj",), r"\b()eyJ[A-Za-z0-9_-]{16,}(?:\.[A-Za-z0-9_-]+){0,2}"),
        (("age-secret-key-1",), r"\b()age-secret-key-1[a-z0-9]{40,}"),
    )
)
_KEY_BEGINS = re.compile(_BEGIN)
_KEY_ENDS = re.compile(_END)


def redacted(text: str, limit: int = LONGEST) -> str:
    """Return ``text`` with secrets of known forms replaced; of a longer one what ``limit`` characters show.

    >>> redacted("login ok, password=hunter2 from 10.0.0.1")
    'login ok, password=[redacted] from 10.0.0.1'
    """
    if len(text) <= limit:
        return _replaced(text)
    # A secret that the limit cuts may not be known by its beginning: where it is one with what follows, the
    # two differ from its first character on.
    both = [_replaced(text[:limit]), _replaced(text[: limit + _AHEAD])]
    return f"{commonprefix(both)}[cut]"  # noqa: RUF071 - by characters


def _replaced(text: str) -> str:
    small = text.lower()
    for hints, form in _FORMS:
        for hint in hints:  # a loop, since thousands of names are looked at
            if hint in small:
                text = form.sub(_REPLACED, text)
                break
    return text


def redacted_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of one file, redacted; of a private key every line is."""
    inside = False
    for line in lines:
        begins = _KEY_BEGINS.search(line) is not None
        yield REPLACEMENT if inside else redacted(line)
        inside = (inside or begins) and _KEY_ENDS.search(line) is None
