"""The pages of `strata demo` that the documents have pictures of, and what each shows in words.

docs/images/screens.json has the words beside the pictures. A test compares them with the present dashboard, so that a
picture of an older one is noticed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
from playwright.sync_api import BrowserContext, Page

from tests.e2e.browser import SIZES, wait_until_drawn

IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"
RECORD: Final = IMAGES / "screens.json"
SCREENS: Final = {
    "overview": "/",
    "job": "/jobs/{long-run}",
    "sweep": "/sweeps/demo/rates",
    "waiting-job": "/jobs/{too-large}",
}
"""By the name of the picture: what to open; names of jobs in braces become their ids."""
HEADINGS: Final = "[...document.querySelectorAll('h1, h2')].map(each => each.textContent.trim().replace(/\\s+/g, ' '))"


class Screen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    title: str
    headings: tuple[str, ...]
    viewports: dict[str, tuple[int, int]]
    """By the names of sizes."""


def picture_name(name: str, size: str, scheme: str) -> str:
    return f"{name}-{SIZES[size][0]}-{scheme}.webp"


def read_screens() -> dict[str, Screen]:
    return msgspec.json.decode(RECORD.read_bytes(), type=dict[str, Screen])


def read_ids(context: BrowserContext, url: str) -> dict[str, str]:
    """The demo's jobs by name, as one who is logged in reads them."""
    reply = context.request.get(f"{url.rstrip('/')}/v1/jobs?project=demo")
    assert reply.ok, reply.text()
    jobs: list[dict[str, Any]] = reply.json()["jobs"]
    return {job["spec"]["name"]: job["id"] for job in jobs}


def open_screen(page: Page, url: str, path: str, ids: dict[str, str]) -> None:
    for name, value in ids.items():
        path = path.replace(f"{{{name}}}", value)
    page.goto(url.rstrip("/") + path, wait_until="load")
    wait_until_drawn(page)


def describe(page: Page, url: str, path: str, ids: dict[str, str]) -> Screen:
    """What the page shows now."""
    open_screen(page, url, path, ids)
    return Screen(path, page.title(), tuple(page.evaluate(HEADINGS)), dict(SIZES))
