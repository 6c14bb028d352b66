"""Chromium without a window, as tests and pictures use it: widths, themes, the login, a whole page as an image."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

CHROMIUM: Final = "/usr/bin/chromium"
FLAGS: Final = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
SIZES: Final = {"desktop": (1440, 900), "phone": (390, 844)}
SCHEMES: Final = ("light", "dark")
_DEADLINE_MS: Final = 60_000
_QUALITY: Final = 80
_END_OF: Final = """last => {
  const bar = getComputedStyle(document.querySelector("nav.rail")).position === "fixed" ? 60 : 0;
  return Math.ceil(document.querySelector(last).getBoundingClientRect().bottom + window.scrollY) + 16 + bar;
}"""
"""Where a part of a page ends, with room for the bar that phones have at the bottom."""


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=list(FLAGS))
        yield browser
        browser.close()


def new_context(
    browser: Browser, size: str = "desktop", scheme: str = "light", *, cookies: Sequence[Any] = (), scale: float = 1
) -> BrowserContext:
    """A context of one of SIZES and SCHEMES; `scale` is how many pixels of an image a pixel of the page has."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        device_scale_factor=scale,
        color_scheme="dark" if scheme == "dark" else "light",
        has_touch=size == "phone",
        reduced_motion="reduce",
    )
    context.set_default_timeout(_DEADLINE_MS)
    context.add_cookies(list(cookies))
    return context


def follow_login_link(browser: Browser, link: str) -> list[Any]:
    """Opens a link that the command line printed, and returns the cookies of the session."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(link)
    page.get_by_role("button", name="Continue").click()
    return take_cookies(context, page)


def take_cookies(context: BrowserContext, page: Page) -> list[Any]:
    """Returns the cookies of a session that has just begun, and closes its context."""
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    cookies = list(context.cookies())
    assert [cookie["httpOnly"] for cookie in cookies] == [True]
    context.close()
    return cookies


def wait_until_drawn(page: Page) -> None:
    """Waits for the heading and for every plot of a page of the dashboard."""
    expect(page.locator("h1").first).to_be_visible()
    for plot in page.locator(".plot").all():
        expect(plot.locator("canvas, .plot-note").first).to_be_attached()


def capture(page: Page, path: Path, *, last: str = "") -> None:
    """Writes the whole page as PNG or WebP, as a screen of its height shows it: a bar at the bottom is at the bottom.

    With `last` the picture ends below that part of the page.
    """
    size = page.viewport_size
    assert size is not None
    whole = max(page.evaluate("document.documentElement.scrollHeight"), size["height"])
    page.set_viewport_size({"width": size["width"], "height": page.evaluate(_END_OF, last) if last else whole})
    if path.suffix == ".webp":
        # Playwright writes PNG and JPEG only.
        session = page.context.new_cdp_session(page)
        reply = session.send("Page.captureScreenshot", {"format": "webp", "quality": _QUALITY})
        path.write_bytes(base64.b64decode(reply["data"]))
        session.detach()
    else:
        page.screenshot(path=path, animations="disabled")
    page.set_viewport_size(size)
