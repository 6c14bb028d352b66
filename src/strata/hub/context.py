"""What the routes of the hub itself share: the fleet's services, the proxy to training servers, gangs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from strata.fleet.http.context import HubContext
from strata.http.route import HttpCall
from strata.hub.gangs import CoordinatorGangs
from strata.hub.gateway.proxy import ServerProxy


@dataclass(frozen=True, kw_only=True)
class GatewayContext(HubContext):
    proxy: ServerProxy = field(default_factory=ServerProxy)
    gangs: CoordinatorGangs | None = None
    """None: this hub has no coordinator."""
    sessions: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """The tenant of each session of a client of training servers, and its tags and metadata for the servers it uses."""
    composed: dict[tuple[str, str], str] = field(default_factory=dict)
    """The tag of the server that has a model whose id its client composed, by tenant and id."""


GatewayCall: TypeAlias = HttpCall[GatewayContext]
