"""The pages that people see, and their headers: what a page may load, where its form may lead, who frames it.

The templates escape all that they are given. Must not decide anything.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from attrs import define, field
from jinja2 import Environment, StrictUndefined, TemplateNotFound
from jinja2.loaders import FunctionLoader
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from relay.sign_in.metadata import SERVER_PATHS

SIGN_IN, SIGN_OUT = "/sign-in", "/sign-out"
ELSEWHERE, FROM_ELSEWHERE = f"{SIGN_IN}/provider", f"{SIGN_IN}/provider/answer"
ATTEMPT_MS = 600_000
"""How long a browser may be elsewhere."""
STYLE_PATH, SCRIPT_PATH = "/sign-in/style.css", "/sign-in/passkey.js"
_HERE = files(__package__) / "templates"
_KEPT = "public, max-age=3600"
COMMON: Mapping[str, str] = {
    "referrer-policy": "same-origin",  # with none at all, a form's Origin would be null
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


def _source(name: str) -> str:
    try:
        return (_HERE / name).read_text("utf-8")
    except FileNotFoundError:
        raise TemplateNotFound(name) from None


def _policy(form_action: str) -> str:
    return (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        f"form-action 'self'{form_action}; base-uri 'none'; frame-ancestors 'none'"
    )


@define(eq=False, repr=False)
class SignInPages:
    """Makes pages out of templates. ``public_url`` is shown, and where forms lead."""

    _public_url: str
    _templates: Environment = field(init=False)
    _assets: Mapping[str, tuple[str, str]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._templates = Environment(
            loader=FunctionLoader(_source),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._assets = {
            STYLE_PATH: (_source("style.css"), "text/css; charset=utf-8"),
            SCRIPT_PATH: (_source("passkey.js"), "text/javascript; charset=utf-8"),
        }

    def page(self, name: str, status: int = 200, form_action: str = "", **values: Any) -> Response:
        """Return the page ``name``; its form may lead to ``form_action`` too, which is a source of CSP."""
        template = self._templates.get_template(f"{name}.html")
        body = template.render(values, public_url=self._public_url, style=STYLE_PATH, script=SCRIPT_PATH)
        policy = _policy(f" {form_action}" if form_action else "")
        headers = {**COMMON, "content-security-policy": policy}
        return Response(body, status, headers, "text/html; charset=utf-8")

    def application(
        self, metadata: Mapping[str, Any], routes: Sequence[Route]
    ) -> tuple[Starlette, frozenset[str]]:
        """Return what serves ``routes``, ``metadata`` and the pages' own files, and the paths of all."""

        async def show_metadata(_request: Request) -> Response:
            return JSONResponse(metadata, headers={"cache-control": "public, max-age=300", "vary": "origin"})

        async def show_asset(request: Request) -> Response:
            return self._asset(request.scope["path"])

        served = [
            *(Route(path, show_metadata) for path in SERVER_PATHS),
            *(Route(path, show_asset) for path in self._assets),
            *routes,
        ]
        application = Starlette(routes=served)
        application.router.redirect_slashes = False
        return application, frozenset(route.path for route in served)

    def _asset(self, path: str) -> Response:
        body, media_type = self._assets[path]
        headers = {"x-content-type-options": "nosniff", "cache-control": _KEPT}
        return Response(body, 200, headers, media_type)
