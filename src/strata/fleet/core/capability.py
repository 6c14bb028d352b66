"""What a host is, as its agent detects it (`Capability`), how its memory is rounded for matching (`Profile`), quiet
hours in its time zone, and the oldest agent version that gets jobs (`MINIMUM_AGENT`).

A profile is bucketed, so that noise between two boots does not make a new one, and so that a card sold as 24 GiB, which
reports 23.99, satisfies `min_vram_gib = 24`: memory is rounded to the nearest half GiB. Rounding is monotone, so more
memory never makes a host eligible for less. What the manifest declares for a host can lower what was detected, never
raise it.

What an agent detects is its own word. Labels are more than that: `require_labels` looks only at those that an operator
gave the host, by its invitation or its policy; the labels of the agent's settings count for `prefer_labels`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, TypeVar

import msgspec

from strata.base.digest import without_defaults
from strata.base.ids import content_id
from strata.fleet.core.amounts import Capacity, Card
from strata.fleet.core.jobspec import HostSpec, QuietHours
from strata.fleet.core.requirement import (
    Count,
    Label,
    LabelValue,
    LimitsLevel,
    Name,
    RequirementClass,
    SandboxLevel,
    Slots,
)

GIB: Final = 1024**3
_BUCKETS_PER_GIB: Final = 2
_VERSION: Final = re.compile(r"(\d{1,4})\.(\d{1,4})")
MINIMUM_AGENT: Final = (0, 2)
"""The first version of agents that read what this hub sends."""
_Amount = TypeVar("_Amount", int, float)

Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Text = Annotated[str, msgspec.Meta(max_length=256)]


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Text
    vram_bytes: Bytes
    uuid: Text = ""
    """The UUID as CUDA_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES take it; empty: the device goes by its number."""


class Capability(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was detected; an empty text means that there is none, or that it is not known."""

    hostname: Name
    os: Text = ""
    """`linux`, `windows`, `darwin`."""
    arch: Text = ""
    """`x86_64`, `aarch64`."""
    cores: Count = 1
    ram_bytes: Bytes = 0
    cuda: Text = ""
    """The version of CUDA the trainer's interpreter can use. Empty: no CUDA, even if there is a card."""
    gpus: tuple[Gpu, ...] = ()
    torch: Text = ""
    python: Text = ""
    git_commit: Text = ""
    sandbox: SandboxLevel = "none"
    """What confines the jobs of this host."""
    sandbox_lacks: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)] = ()
    """What the host cannot do to confine them, and why."""
    limits: LimitsLevel = "none"
    """How it keeps jobs to the amounts they declared."""
    job_ram_bytes: Bytes = 0
    """The most memory that its settings give to one job. 0: they set no limit."""
    labels: dict[Label, LabelValue] = {}
    """Labels of the agent's own settings."""
    slots: Slots | None = None
    """Slots of the agent's own settings; None: as many jobs at once as fit by their amounts."""
    utc_offset_min: Annotated[int, msgspec.Meta(ge=-1440, le=1440)] = 0
    """Offset of the host's wall clock at this moment: quiet hours are the owner's hours."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """All of a host that decides which requirement classes it may serve; equal profiles serve the same classes."""

    host: Name
    os: Text = ""
    arch: Text = ""
    cores: Count = 0
    ram_gib: float = 0.0
    cuda: bool = False
    vram_gib: tuple[float, ...] = ()
    """One per GPU, the largest first."""
    cards: tuple[str, ...] = ()
    """How the hub names each GPU of `vram_gib`: its UUID, or its number on the host."""
    labels: dict[Label, LabelValue] = {}
    """Given by an operator."""
    pool: Text = ""
    """The pool of its invitation."""
    own_labels: dict[Label, LabelValue] = {}
    """Labels of the agent's own settings: good for wishes only."""
    sandbox: SandboxLevel = "none"
    limits: LimitsLevel = "none"
    job_ram_limit_gib: float | None = None
    """The most that the host gives to one job, if its settings say so. It is not rounded: it is no measurement."""
    slots: int | None = None
    """None: as many jobs at once as fit by their amounts."""
    allow_jobs: tuple[str, ...] | None = None
    deny_jobs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return content_id("profile", 1, without_defaults(self))

    @property
    def job_ram_gib(self) -> float:
        """The most memory that one job can get here."""
        return _at_most(self.ram_gib, self.job_ram_limit_gib)

    @property
    def capacity(self) -> Capacity:
        names = self.cards or tuple(map(str, range(len(self.vram_gib))))
        cards = tuple(Card(name, vram_gib) for name, vram_gib in zip(names, self.vram_gib, strict=True))
        return Capacity(cards, max(1, self.cores), self.ram_gib, self.slots)


def profile(
    capability: Capability,
    policy: HostSpec | None = None,
    granted: Mapping[str, str] | None = None,
    pool: str = "",
) -> Profile:
    """The profile of a host with this policy; without one, everything is allowed.

    `granted` are the labels of its invitation, and `pool` is the pool.
    """
    name = capability.hostname if policy is None else policy.name
    policy = policy or HostSpec(name=name)
    cards = sorted(
        ((bucket_gib(gpu.vram_bytes), gpu.uuid or str(number)) for number, gpu in enumerate(capability.gpus)),
        key=lambda card: -card[0],
    )
    return Profile(
        host=name,
        os=str.lower(capability.os),
        arch=str.lower(capability.arch),
        cores=_at_most(capability.cores, policy.cores),
        ram_gib=_at_most(bucket_gib(capability.ram_bytes), policy.ram_gib),
        cuda=bool(capability.cuda and cards) and policy.cuda is not False,
        vram_gib=tuple(_at_most(vram_gib, policy.vram_gib) for vram_gib, _ in cards),
        cards=tuple(card for _, card in cards),
        labels={**(granted or {}), **policy.labels},
        pool=pool,
        own_labels=capability.labels,
        sandbox=capability.sandbox,
        limits=capability.limits,
        job_ram_limit_gib=capability.job_ram_bytes / GIB if capability.job_ram_bytes else None,
        slots=policy.slots if capability.slots is None else _at_most(capability.slots, policy.slots),
        allow_jobs=policy.allow_jobs,
        deny_jobs=policy.deny_jobs,
    )


def minimum_agent(requirement: RequirementClass) -> tuple[int, int]:
    """Returns the first version of agents that can run jobs of this class; a new kind of job gets its own."""
    del requirement
    return MINIMUM_AGENT


def parse_agent_version(text: str) -> tuple[int, int] | None:
    """None for an agent without a version of ours: nothing is withheld from it."""
    match = _VERSION.match(text)
    return None if match is None else (int(match[1]), int(match[2]))


def bucket_gib(size_bytes: int) -> float:
    """Rounds to the nearest half GiB."""
    return (2 * _BUCKETS_PER_GIB * size_bytes + GIB) // (2 * GIB) / _BUCKETS_PER_GIB


def in_quiet_hours(hours: tuple[QuietHours, ...], capability: Capability, now_s: float) -> QuietHours | None:
    """The quiet hours the host is in, by its own wall clock; it claims nothing then, and finishes what it has."""
    local_min = int(now_s // 60) + capability.utc_offset_min
    # 1 January 1970 was a Thursday; weeks start on Monday.
    day, minute = (local_min // 1440 + 3) % 7, local_min % 1440
    return next((each for each in hours if each.covers(day, minute)), None)


def _at_most(detected: _Amount, declared: _Amount | None) -> _Amount:
    return detected if declared is None else min(detected, declared)
