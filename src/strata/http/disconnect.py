"""Runs a handler until its client disconnects or the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

from strata.base.errors import Code, StrataError
from strata.http.route import HttpCall

T = TypeVar("T")


async def until_disconnect(call: HttpCall[Any], stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancelled if the client disconnects or the server stops before."""
    working = asyncio.create_task(work)
    others = [asyncio.create_task(call.disconnected()), asyncio.create_task(stopping.wait())]
    try:
        await asyncio.wait([working, *others], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if others[0].done():
            raise ClientDisconnect
        raise StrataError(Code.UNAVAILABLE, "this server is stopping", hint="send the same request again")
    finally:
        for task in (working, *others):
            task.cancel()
        await asyncio.wait([working, *others])
