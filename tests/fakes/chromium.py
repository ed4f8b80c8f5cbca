"""A person at a real Chromium, with a passkey of its virtual authenticator."""

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import BrowserContext, Page, async_playwright

CHROMIUM = shutil.which("chromium")
_BOUND_MS = 30_000
_ELSEWHERE = re.compile(r"https?://(?!localhost[:/]|127\.0\.0\.1[:/])")
_AUTHENTICATOR = {
    "protocol": "ctap2",
    "transport": "internal",
    "hasResidentKey": True,
    "hasUserVerification": True,
    "isUserVerified": True,
    "automaticPresenceSimulation": True,
}


class Chromium:
    """One person. ``problems`` are the errors of pages: what a policy has blocked, and exceptions."""

    def __init__(self, context: BrowserContext, page: Page) -> None:
        self.context, self.page = context, page
        self.problems: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda said: self.problems.append(said.text) if said.type == "error" else None)

    async def accept_invitation(self, link: str) -> None:
        """Open a one-time link, and make a passkey."""
        await self.page.goto(link)
        await self.page.get_by_role("button", name="Make a passkey").click()
        await self.page.get_by_role("heading", name="Signed in as").wait_for()

    async def allowed(self, url: str) -> str:
        """Open an authorization, sign in if asked to, and allow it; return where the browser goes then."""
        await self.page.goto(url)
        return await self.allow()

    async def allow(self) -> str:
        """Allow what the page of an authorization, or of the sign-in before it, asks for."""
        here = "/".join(self.page.url.split("/", 3)[:3])
        sign_in = self.page.get_by_role("button", name="Sign in with a passkey")
        allow = self.page.get_by_role("button", name="Allow")
        await sign_in.or_(allow).wait_for()
        if await sign_in.is_visible():
            await sign_in.click()
        async with self.page.expect_request(lambda sent: not sent.url.startswith(f"{here}/")) as sent:
            await allow.click()
        return (await sent.value).url


@asynccontextmanager
async def chromium() -> AsyncIterator[Chromium]:
    """Start the browser, and close it at the end."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM)
        context = await browser.new_context()
        context.set_default_timeout(_BOUND_MS)
        # What the pages of clients load from elsewhere.
        await context.route(_ELSEWHERE, lambda route: route.fulfill(body=""))
        page = await context.new_page()
        protocol = await context.new_cdp_session(page)
        await protocol.send("WebAuthn.enable")
        await protocol.send("WebAuthn.addVirtualAuthenticator", {"options": _AUTHENTICATOR})
        try:
            yield Chromium(context, page)
        finally:
            await browser.close()
