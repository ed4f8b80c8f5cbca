"""The pages of sign-in in a real browser: by keyboard, for a screen reader, on a telephone, in the dark.

What is asked of each page stands in ``FAULTS``, which runs in it and returns what is wrong.
"""

import json
from collections.abc import AsyncIterator
from urllib.parse import urlencode

import httpx2
import pytest

from relay.sign_in.authorization import challenge_of
from tests.fakes.chromium import CHROMIUM, Chromium, chromium
from tests.fakes.small_fleet import SmallFleet

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")]

MOST_TABS = 40
SIZES = {"desktop": {"width": 1100, "height": 760}, "telephone": {"width": 390, "height": 760}}
AT_PROVIDER = "Sign in with a-long-name-of-a-provider.department.example"
PROVIDER = """
["people.oidc"]
issuer = "https://a-long-name-of-a-provider.department.example"
client_id = "edge-relay"
secret_file = "/nowhere"
allow = ["groups=boards:operator:*"]
"""
FAULTS = """() => {
  const found = [];
  const shown = (element) => element.checkVisibility() && !element.closest(".hidden");
  const wants = (holds, what) => { if (!holds) found.push(what) };
  wants(document.documentElement.lang === "en", "no language");
  wants(document.title.length > 3, "no title");
  wants(document.querySelectorAll("main").length === 1, "not one main");
  const levels = [...document.querySelectorAll("h1, h2, h3")].map((heading) => Number(heading.tagName[1]));
  wants(levels[0] === 1 && levels.filter((level) => level === 1).length === 1, "not one first heading");
  levels.slice(1).forEach((level, at) => wants(level <= levels[at] + 1, "a level of headings is left out"));
  wants(document.documentElement.scrollWidth <= innerWidth, "wider than the screen");
  for (const each of document.querySelectorAll("input:not([type=hidden]), select"))
    wants(each.labels.length && each.labels[0].textContent.trim(), each.name + " has no label");
  for (const each of document.querySelectorAll("button"))
    wants(each.textContent.trim(), "a button without words");
  for (const each of document.querySelectorAll("fieldset"))
    wants(each.querySelector(":scope > legend").textContent.trim(), "a group without a name");
  const usable = "button, .button, select, label:has(> input)";
  for (const each of [...document.querySelectorAll(usable)].filter(shown))
    wants(each.getBoundingClientRect().height >= 24, "too small to be met: " + each.textContent.trim());
  const light = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((each) => each / 255)
    .map((each) => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return color === "rgba(0, 0, 0, 0)" && element.parentElement ? behind(element.parentElement) : color;
  };
  for (const each of [...document.querySelectorAll("main, main *")].filter(shown)) {
    if (![...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())) continue;
    const [more, less] = [light(getComputedStyle(each).color), light(behind(each))].sort((a, b) => b - a);
    wants((more + 0.05) / (less + 0.05) >= 4.5, "hard to read: " + each.textContent.trim().slice(0, 40));
  }
  return found;
}"""
FOCUSED = """() => {
  const focused = document.activeElement;
  if (focused === document.body) return "";
  const outline = getComputedStyle(focused);
  if (outline.outlineStyle === "none") return "invisible";
  return (focused.labels?.length ? focused.labels[0].firstChild.textContent.trim() ||
    focused.labels[0].textContent.trim() : focused.textContent.trim());
}"""


@pytest.fixture(params=["light", "dark"])
async def person(request: pytest.FixtureRequest) -> AsyncIterator[Chromium]:
    async with chromium() as person:
        await person.page.emulate_media(color_scheme=request.param)
        yield person


async def check(person: Chromium) -> None:
    """Check the page that is shown, on each screen."""
    await person.page.wait_for_load_state()  # its style, too
    for size in SIZES.values():
        await person.page.set_viewport_size(size)  # type: ignore[arg-type]
        assert await person.page.evaluate(FAULTS) == [], await person.page.title()


async def tabbed(person: Chromium, to: str) -> list[str]:
    """Go on with the key Tab until what begins with ``to`` is focused; return what was on the way."""
    passed: list[str] = []
    for _ in range(MOST_TABS):
        await person.page.keyboard.press("Tab")
        passed.append(await person.page.evaluate(FOCUSED))
        assert passed[-1] != "invisible"
        if passed[-1].startswith(to):
            return passed
    pytest.fail(f"{to} is not reached: {passed}")


async def test_every_page_is_for_everybody(fleet: SmallFleet, person: Chromium, own: str) -> None:
    page, keys = person.page, person.page.keyboard
    invite = ("people", "invite", "ada", "--role", "operator", "--public-url", fleet.url)
    link = (await fleet.relay(*invite)).strip()
    settings = fleet.directory / "relay.toml"
    settings.write_text(PROVIDER)
    settings.chmod(0o600)
    await fleet.start_relay("--no-broker", "--config", str(settings))

    await page.goto(link)
    await check(person)
    assert await tabbed(person, "Make a passkey") == ["Make a passkey"]
    await keys.press("Enter")
    await page.get_by_role("heading", name="Signed in as ada", level=1).wait_for()
    await check(person)
    await page.goto(f"{fleet.url}/authorize?client_id=nothing")
    await page.get_by_role("alert").filter(has_text="not registered here").wait_for()
    await check(person)
    async with httpx2.AsyncClient(base_url=fleet.url, trust_env=False) as http:
        authorization = await allowed_by_keys(person, http, f"{own}/callback")

    await page.goto(f"{fleet.url}/sign-in")
    await page.get_by_role("listitem").filter(has_text="Claude").wait_for()
    await check(person)
    # A screen reader hears whose permission each button ends.
    await page.get_by_role("button", name="End this for Claude").focus()
    await keys.press("Enter")
    await page.get_by_text("Nothing yet.").wait_for()
    assert json.loads(await fleet.relay("people", "show", "ada", "--json"))["grants"] == []
    await tabbed(person, "Sign out")
    await keys.press("Enter")
    await page.get_by_role("heading", name="Sign in", level=1).wait_for()
    await check(person)
    await page.goto(authorization)
    await check(person)
    assert await tabbed(person, "Sign in with a passkey") == [AT_PROVIDER, "Sign in with a passkey"]
    await keys.press("Enter")
    await page.get_by_role("heading", name="Allow Claude?", level=1).wait_for()
    await page.goto(link)
    await tabbed(person, "Make a passkey")
    await keys.press("Enter")
    await page.get_by_role("alert").filter(has_text="was used, or has expired").wait_for()
    await check(person)


async def allowed_by_keys(person: Chromium, http: httpx2.AsyncClient, redirect: str) -> str:
    """Allow a client that calls itself Claude, which then gets its token; return the URL of the page."""
    page, keys = person.page, person.page.keyboard
    body = {"client_name": "Claude", "redirect_uris": [redirect]}
    client = {"client_id": (await http.post("/register", json=body)).json()["client_id"]}
    common = client | {"redirect_uri": redirect, "resource": str(http.base_url.join("/mcp/kinds"))}
    query = common | {"response_type": "code", "state": "s", "code_challenge": challenge_of("v" * 43)}
    authorization = f"{http.base_url}/authorize?{urlencode(query | {'code_challenge_method': 'S256'})}"

    await page.goto(authorization)
    await check(person)
    for warning in ("nothing proves that it is", "which cannot prove which one it is"):
        assert await page.get_by_text(warning).is_visible()
    await tabbed(person, "Look, without logs")
    await keys.press("ArrowDown")  # to the detailed choice, which shows its parts
    detailed = page.get_by_role("group", name="What it may do").get_by_role("radio", name="Something else")
    assert await detailed.is_checked()
    await check(person)
    acting = page.get_by_role("group", name="It may", exact=True).get_by_role("checkbox")
    assert [await each.is_checked() for each in await acting.all()] == [True, False, False, False]
    await tabbed(person, "look: read what boards show")
    await keys.press("Space")
    passed = await tabbed(person, "Allow")
    assert passed.index("system.echo") < passed.index("It may do so for") < passed.index("Allow")
    await keys.press("Enter")
    await page.get_by_role("alert").filter(has_text="Choose at least one thing").wait_for()
    assert await detailed.is_checked()
    await check(person)
    await tabbed(person, "Allow")
    await keys.press("Enter")
    await page.wait_for_url(f"{redirect}?**")
    code = httpx2.URL(page.url).params["code"]
    form = common | {"grant_type": "authorization_code", "code": code, "code_verifier": "v" * 43}
    assert (await http.post("/token", data=form)).status_code == 200
    return authorization
