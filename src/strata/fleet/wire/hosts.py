"""Messages about hosts: registration, summaries, room, cards, policy, samples, and plans of operators' actions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from strata.fleet.artifacts.manifest import Word
from strata.fleet.core.capability import Capability
from strata.fleet.core.host_status import HostAction, HostStatus, Presence, StoredState
from strata.fleet.records import HostJob, HostRow
from strata.fleet.wire.base import HubReply, Message, Offset, Page, Reason, Text


class RegisterRequest(Message, frozen=True, kw_only=True):
    capability: Capability
    agent_version: Word = ""


class RegisterReply(HubReply, frozen=True, kw_only=True):
    host_id: str
    name: str
    state: StoredState
    state_reason: str = ""
    lease_s: float
    """A lease that is not renewed for so long may go to somebody else."""
    renew_every_s: float


class Host(HostRow, HubReply, frozen=True, kw_only=True):
    seen_ago_s: float
    """Age by the hub's clock, at the time of the reply."""
    presence: Presence
    sample: dict[str, float] = {}
    """What it did when its agent told this hub last; by name as in `/v1/host/{id}/samples`."""


class HostAmounts(HubReply, frozen=True, kw_only=True):
    cores: int
    ram_gib: float
    slots: int | None = None
    """None: as many jobs as fit by their amounts."""
    cards: dict[str, float] = {}
    """The VRAM of each in GiB, by its UUID or its number."""


class HostRoom(HubReply, frozen=True, kw_only=True):
    capacity: HostAmounts
    """What the host has for jobs, by what its agent detects and by its policy."""
    free: HostAmounts
    jobs: tuple[HostJob, ...]


class HostsReply(HubReply, frozen=True, kw_only=True):
    hosts: tuple[Host, ...]


class HostsQuery(Message, frozen=True, kw_only=True):
    search: Text = ""
    """A text to find in the name, id, pool, labels or the names of cards; upper and lower case are the same."""
    status: HostStatus | None = None
    sort: Literal["name", "load", "seen"] = "name"
    """`load`: the busiest first. `seen`: the host whose last heartbeat is oldest first."""
    offset: Offset = 0
    limit: Page = 100


class HostCard(HubReply, frozen=True, kw_only=True):
    id: str
    name: str
    vram_gib: float
    taken: float
    """The share of it that jobs have, 0 to 1."""
    use: float | None = None
    """The share of the time in which it computed, 0 to 1; null: it is not known."""
    vram_used_gib: float | None = None


class HostSummary(HubReply, frozen=True, kw_only=True):
    id: str
    name: str
    status: HostStatus
    """State and presence in one word: the one that keeps it from jobs, if there is one."""
    status_reason: str = ""
    pool: str = ""
    seen_ago_s: float
    """Age by the hub's clock, at the time of the reply."""
    cores: int
    ram_gib: float
    cpu_use: float | None = None
    """Processes that run or wait for a core, for each core; null: it is not known."""
    ram_used_gib: float | None = None
    cards: tuple[HostCard, ...] = ()
    jobs: tuple[HostJob, ...] = ()


class HostPageReply(HubReply, frozen=True, kw_only=True):
    hosts: tuple[HostSummary, ...]
    total: int
    """How many match, on all pages."""
    by_status: dict[str, int]
    """Counts of all hosts that match `search`."""


class HostPolicyReply(HubReply, frozen=True, kw_only=True):
    project: str = ""
    """The project whose manifest declares the policy; empty: none does."""
    rules: tuple[str, ...]
    """What the policy says, in words."""
    quiet_hours: tuple[str, ...] = ()
    """Quiet hours in the host's own time."""
    utc_offset_min: int = 0
    quiet_now: str = ""
    """The quiet hours it is in."""


class HostPlanQuery(Message, frozen=True, kw_only=True):
    action: HostAction


class HostPlanReply(HubReply, frozen=True, kw_only=True):
    """What an action would do now. Nothing is changed."""

    action: HostAction
    possible: bool
    effects: tuple[str, ...]
    """The effects in words; if it is not possible, why."""
    ends: tuple[HostJob, ...] = ()
    """The jobs that would end here and run elsewhere or again."""
    stays: tuple[HostJob, ...] = ()
    """The jobs that would run to their end here."""
    stranded: int = 0
    """Jobs that wait, and for which no other host would be left."""


class SamplesQuery(Message, frozen=True, kw_only=True):
    span_s: Annotated[float, msgspec.Meta(gt=0, le=90 * 86_400)] = 3600.0
    """How far back."""
    points: Annotated[int, msgspec.Meta(ge=1, le=5000)] = 300
    """How many at most: the finest resolution with so few is chosen."""


class SampledPoint(HubReply, frozen=True, kw_only=True):
    at_s: float
    values: dict[str, float]


class SamplesReply(HubReply, frozen=True, kw_only=True):
    step_s: int
    """The step of which the values are means; 0: as they were sampled."""
    points: tuple[SampledPoint, ...]


class HostStateRequest(Message, frozen=True, kw_only=True):
    reason: Reason = ""
