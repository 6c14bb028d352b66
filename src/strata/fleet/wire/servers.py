"""Messages about training servers that are jobs: an entry with its state and its figures."""

from __future__ import annotations

from typing import Any, Literal

from strata.fleet.wire.base import HubReply


class RanksFigures(HubReply, frozen=True, kw_only=True):
    state: str
    size: int = 0


class ServerFigures(HubReply, frozen=True, kw_only=True):
    """The part for a list of what a training server says of itself."""

    now_s: float
    ranks: RanksFigures
    models: int
    slots: int
    waiting: int
    samples_waiting: int
    samples_running: int
    trained_tokens_per_s: float
    sampled_tokens_per_s: float
    recoveries: int
    tenants: tuple[dict[str, Any], ...] = ()


class ServerEntry(HubReply, frozen=True, kw_only=True):
    """A job of the kind `server`."""

    job_id: str
    label: str
    project: str
    owner: str
    models: tuple[str, ...]
    """The names of its base model."""
    state: Literal["serving", "asleep", "starting", "ended"]
    reason: str
    host_id: str
    changed_at_s: float
    used_at_s: float | None
    """None if it has never served."""
    figures: ServerFigures | None
    """None if it does not serve, or did not reply in time."""


class ServersReply(HubReply, frozen=True, kw_only=True):
    servers: tuple[ServerEntry, ...]
    hosts: dict[str, str] = {}
    """The names of their hosts, by id."""
