"""What the relay answers where it serves nothing: what it is, and how an agent connects.

A page for people, which their browsers ask for, and JSON with the reason for programs. Clients that have no
token look for a sign-in here, and show the reason to their user. Must not show anything of a request, of the
fleet or of its agents: it is public.
"""

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from schemas.addresses import KINDS_PATH, MCP_PATH, TOOLS_PATH, mcp_url

_SIGN_IN_PATHS = frozenset({"/authorize", "/register", "/token"})
"""Where clients look that found no metadata of an authorization server."""
_WELL_KNOWN = "/.well-known/"

_STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1b2420; --soft: #55605a; --paper: #fbfcfa; --box: #eef1ec; --link: #0b6b4f
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebe7; --soft: #a3afa8; --paper: #141816; --box: #202623; --link: #6fd3b0 }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 17px/1.55 system-ui, sans-serif }
main { max-width: 44rem; margin: 0 auto; padding: 3rem 1.25rem }
h1 { margin: 0 0 .5rem; font-size: 1.7rem; line-height: 1.2 }
p, li { margin: .7rem 0 }
ol { padding-left: 1.3rem }
small { color: var(--soft); font-size: .9rem }
code, pre { font: .88em/1.5 ui-monospace, monospace; background: var(--box); border-radius: 4px }
code { padding: .12em .35em; overflow-wrap: anywhere; box-decoration-break: clone }
pre { margin: .4rem 0; padding: .6rem .8rem; white-space: pre-wrap; overflow-wrap: anywhere }
a { color: var(--link) }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Edge relay</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>Edge relay</h1>
<p>This is an MCP server: AI agents call the tools of Linux boards here. To connect an agent:</p>
{how}
<p><small><code>{tools}</code> lists each board's tools by themselves, <code>{mcp}</code> by canonical names.
State: <a href="/readyz">/readyz</a>. Contract: <a href="/schemas/">/schemas/</a>.</small></p>
</main>
</body>
</html>
"""

_FOR_TOKENS = """<ol>
<li>Get a bearer token {token}, and keep it in a file that only you can read, <code>agent-token</code>.</li>
<li>Install the client where the agent runs, with the path of this project's wheel as <code>EDGE</code>:
<pre>pip install "${{EDGE}}[client]"</pre></li>
<li>Put this relay into the agent's configuration, here that of Claude Code:
<pre>relay connect claude-code --url {url} --token-file agent-token</pre>
<small>If its certificate is of a root of the operator's own, add <code>--root FILE</code>.</small></li>
</ol>
<p>Any other MCP client: <code>{kinds}</code> with the header <code>Authorization: Bearer TOKEN</code>.</p>"""
_FOR_PEOPLE = """<ol>
<li>Paste this URL where your MCP client asks for a server: <pre>{kinds}</pre></li>
<li>Sign in on the page that opens, and choose what the client may do.</li>
</ol>
<p>To sign in you need a link from the operator, once: <code>relay people invite NAME</code>.
What you have allowed: <a href="/sign-in">/sign-in</a>. An agent without a person sends the header
<code>Authorization: Bearer TOKEN</code>, {token}.</p>"""


class Page(NamedTuple):
    """A page, and its headers but for its length."""

    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]


class FrontPage:
    """The page and the reasons of one relay; ``issuers`` are the authorization servers of its tokens.

    ``signs_in``: it is one itself.
    """

    def __init__(self, public_url: str, issuers: Sequence[str] = (), *, signs_in: bool = False) -> None:
        self._mcp_url = mcp_url(public_url, KINDS_PATH)
        self._reason = (
            f"This relay has no sign-in of its own: get a bearer token for it from {' or '.join(issuers)}."
            if issuers
            else "This relay has no sign-in: send a bearer token in the header Authorization. "
            "Its operator issues one with: relay token issue --sub NAME"
        )
        token = (
            f"from {' or '.join(map(escape, issuers))}"
            if issuers
            else "from the operator, who issues it with <code>relay token issue --sub NAME</code>"
        )
        how = (_FOR_PEOPLE if signs_in else _FOR_TOKENS).format(
            token=token, url=escape(public_url), kinds=escape(self._mcp_url)
        )
        text = _PAGE.format(style=_STYLE, how=how, tools=TOOLS_PATH, mcp=MCP_PATH)
        self.page = Page(text.encode(), _HEADERS)

    async def show(self, request: Request) -> Response:
        if accepts_page(request.headers.get("accept", "")):
            return self._as_page(200)
        facts = {"service": "edge-kubelet relay", "mcp": self._mcp_url, "message": "An MCP server."}
        return JSONResponse(facts)

    async def refuse(self, request: Request, error: Exception) -> Response:
        status, headers = (
            (error.status_code, error.headers) if isinstance(error, HTTPException) else (404, None)
        )
        if accepts_page(request.headers.get("accept", "")):
            return self._as_page(status)
        path = request.scope["path"]
        if path in _SIGN_IN_PATHS or path.startswith(_WELL_KNOWN):
            # In the form of OAuth's errors (RFC 6749 section 5.2), which clients show.
            reason = {"error": "no_sign_in", "error_description": self._reason}
            return JSONResponse(reason, status, headers)
        known = {404: ("not_found", "Not found."), 405: ("method", "Another method is needed here.")}
        name, message = known.get(status, ("refused", "Refused."))
        return JSONResponse({"error": name, "message": message}, status, headers)

    def _as_page(self, status: int) -> Response:
        headers = {name.decode("ascii"): value.decode("ascii") for name, value in self.page.headers}
        return Response(self.page.body, status, headers)


def accepts_page(accept: str) -> bool:
    """Return whether a request with this header is a browser's: no other client asks for HTML."""
    return "text/html" in accept


def _hash_of(style: str) -> str:
    return b64encode(sha256(style.encode()).digest()).decode("ascii")


_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_hash_of(_STYLE)}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", _POLICY.encode("ascii")),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"vary", b"accept"),
)
