"""What the routes of the hub itself work with: the services of the fleet, and the ways to what runs in its jobs."""

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
    """By session of a client of training servers: its tenant, and its tags and metadata for the servers it uses."""
    composed: dict[tuple[str, str], str] = field(default_factory=dict)
    """By tenant and the id of a model that its client composed: the tag of the server that has it."""


GatewayCall: TypeAlias = HttpCall[GatewayContext]
