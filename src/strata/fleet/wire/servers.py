"""Messages about training servers that run as jobs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from strata.fleet.wire.base import HubReply, Message


class RanksFigures(HubReply, frozen=True, kw_only=True):
    state: str
    size: int = 0


class ServerFigures(HubReply, frozen=True, kw_only=True):
    """Of what a training server says of itself, the part for a list."""

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


class ServerActivityQuery(Message, frozen=True, kw_only=True):
    operations: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 200


class ServerCurvesQuery(Message, frozen=True, kw_only=True):
    points: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 500
    names: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    """Of metrics, with commas between; empty for all."""


class ServerCompletion(Message, frozen=True, kw_only=True, omit_defaults=True):
    """What the playground sends to the OpenAI-compatible endpoints of a training server; that server checks it."""

    model: Annotated[str, msgspec.Meta(max_length=1000)]
    temperature: float
    max_tokens: int
    logprobs: bool | int | None = None
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
