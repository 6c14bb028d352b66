"""A browser without scripts: cookies, forms, and the headers that browsers send by themselves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Final

import httpx

from strata.fleet.wire.identities import HubKeyReply
from tests.shell.fleet_http.running import Running, ok

HTML: Final = {"Accept": "text/html,application/xhtml+xml"}
SAME_ORIGIN: Final = {"Sec-Fetch-Site": "same-origin"}


@dataclass
class Browser:
    http: httpx.AsyncClient

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.http.get(path, headers={**HTML, **headers})

    async def shows(self, path: str, **headers: str) -> str:
        reply = await self.get(path, **headers)
        assert reply.status_code == 200, (path, reply.status_code, reply.text[:2000])
        assert reply.headers["content-type"] == "text/html; charset=utf-8"
        return reply.text

    async def post(self, path: str, **fields: str) -> httpx.Response:
        """A form, as a page of the server sends it."""
        fields.setdefault("csrf", await self.csrf())
        return await self.http.post(path, data=fields, headers={**HTML, **SAME_ORIGIN})

    async def csrf(self) -> str:
        found = re.search(r'name="csrf" value="([0-9a-f]{64})"', await self.shows("/"))
        assert found is not None
        return found[1]


async def log_in(site: Running, role: str, name: str = "") -> Browser:
    name = name or f"{role}-{next(site.names)}"
    made = ok(await (await site.operator()).post("/v1/keys", json={"name": name, "role": role}), HubKeyReply)
    browser = Browser(await site.client())
    reply = await browser.http.post("/login", data={"key": made.secret}, headers={**HTML, **SAME_ORIGIN})
    assert reply.status_code == 303, reply.text
    return browser


class Tags(HTMLParser):
    """Every element of a page with its attributes, as a browser would see them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
