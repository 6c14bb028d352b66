"""Open pages, as browsers have them: each waits for its topics, and fetches its page again when one has changed."""

from __future__ import annotations

import asyncio
import re
from typing import Final

import httpx

_OPEN: Final = re.compile(r'data-topics="([^"]*)" data-every="([^"]*)"')
_CHANGE: Final = "event: change"


class Viewer:
    """Of one page; `static/live.js` does the same."""

    def __init__(self, browser: httpx.AsyncClient, path: str) -> None:
        self._browser = browser
        self._path = path
        self._changed = asyncio.Event()
        self.fetches = 0

    async def look(self) -> None:
        """Until it is cancelled."""
        page = await self._browser.get(self._path)
        open_page = _OPEN.search(page.raise_for_status().text)
        assert open_page is not None, f"{self._path} is not live"
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(open_page[1]))
            group.create_task(self._fetch())
            if float(open_page[2]) > 0:
                group.create_task(self._remind(float(open_page[2])))

    async def _listen(self, topics: str) -> None:
        async with self._browser.stream("GET", "/live", params={"topics": topics}, timeout=None) as stream:
            async for line in stream.aiter_lines():
                if line == _CHANGE:
                    self._changed.set()

    async def _remind(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self._changed.set()

    async def _fetch(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            (await self._browser.get(self._path, headers={"HX-Request": "true"})).raise_for_status()
            self.fetches += 1
