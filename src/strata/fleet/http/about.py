"""What the hub says of itself."""

from __future__ import annotations

import functools

import msgspec

from strata import __version__
from strata.base.errors import Code, StrataError
from strata.fleet import wire
from strata.fleet.http.call import Call
from strata.fleet.http.openapi import document
from strata.fleet.http.site import Site
from strata.http.declare import Answer


async def health(site: Site, call: Call) -> wire.Health:
    """Whether this hub takes requests, and can write what they change."""
    del call
    if site.writing.fails:
        raise StrataError(Code.UNAVAILABLE, "the hub cannot write to its database", hint="is the disk full?")
    return wire.Health(status="stopping" if site.stopping.is_set() else "ok", version=__version__)


async def openapi(site: Site, call: Call) -> Answer:
    """This interface, as OpenAPI 3.1."""
    del site, call
    return Answer(_document())


@functools.cache
def _document() -> bytes:
    from strata.fleet.http.table import TABLE  # the table has this endpoint too

    return msgspec.json.encode(document(TABLE))
