"""What a job requires of a host (`needs` with names, bounds and defaults: cards, VRAM, memory, labels, sandbox and
limits levels), the patterns of names and labels, and the requirement class as its canonical key.

Jobs are many, classes few: a class is matched against a host once and not once per claim, and a claim compares numbers.
Two jobs are in one class when their classes are equal; lists that mean sets are sorted here, so their order is no
difference. Fields at their defaults are left out of the key: a field added later does not change old classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from strata.base.digest import without_defaults
from strata.base.ids import content_id

NAME_PATTERN: Final = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
NAME_RULE: Final = "a name of ASCII letters, digits, dots, - and _, at most 64 of them"
"""Names of models, modes, trainers, hosts: they appear in paths of exported views and in host policies."""
LABEL_PATTERN: Final = r"\A[A-Za-z0-9][A-Za-z0-9._/-]{0,63}\Z"

Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
Pool = Annotated[str, msgspec.Meta(pattern=r"\A([A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z")]
HostPattern = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9*?\[][A-Za-z0-9._*?\[\]!-]{0,63}\Z")]
Label = Annotated[str, msgspec.Meta(pattern=LABEL_PATTERN)]
LabelValue = Annotated[str, msgspec.Meta(max_length=128)]
Gib = Annotated[float, msgspec.Meta(ge=0, le=1_048_576)]
Count = Annotated[int, msgspec.Meta(ge=0, le=65_536)]
Slots = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=31_536_000)]
SandboxLevel = Literal["none", "user", "namespaces"]
SANDBOX_LEVELS: Final[tuple[SandboxLevel, ...]] = ("none", "user", "namespaces")
"""What confines the jobs of a host, the weakest first."""
LimitsLevel = Literal["none", "watched", "enforced"]
LIMITS_LEVELS: Final[tuple[LimitsLevel, ...]] = ("none", "watched", "enforced")
"""How a host keeps jobs to the amounts they declared, the weakest first."""


def _sort(struct: msgspec.Struct, field: str, values: tuple[str, ...]) -> None:
    msgspec.structs.force_setattr(struct, field, tuple(sorted(set(values))))


class Needs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The constraints of a job (`require_*`, `min_*`, …) and its wishes (`prefer_*`).

    What it needs at least of a host (`min_*`) is also what it takes of it while it runs (`core.amounts`).
    """

    require_cuda: bool = False
    min_vram_gib: Gib = 0.0
    """The least VRAM of one GPU. It implies a GPU, of whatever make."""
    min_ram_gib: Gib = 0.0
    min_cores: Count = 0
    min_gpus: Count = 0
    """GPUs that have at least `min_vram_gib` each."""
    gpu_share: Share = 0.0
    """The share of each card that the job takes, so that others may have the rest. 0: whole cards."""
    above_ram_gib: Gib = 0.0
    """Only hosts with more memory than this. The hub sets it when the job ran out of memory with the whole host."""
    above_vram_gib: Gib = 0.0
    """Only hosts with a GPU that has more memory than this; likewise."""
    allowed_hosts: tuple[HostPattern, ...] = ()
    """Names or globs; empty: any host."""
    pool: Pool = ""
    """The pool of hosts that runs it; empty: the hosts that are in none."""
    require_labels: dict[Label, LabelValue] = {}
    """Labels with the values they must have; `*` stands for any value."""
    require_os: str = ""
    require_arch: str = ""
    require_sandbox: SandboxLevel = "none"
    """How well the host must confine the job, at least."""
    require_limits: LimitsLevel = "none"
    """How the host must keep all its jobs to what they declared, at least."""
    slots: Slots = 1
    """How many of a host's slots the job takes, where the host has slots."""
    prefer_cuda: bool = False
    prefer_hosts: tuple[HostPattern, ...] = ()
    prefer_labels: dict[Label, LabelValue] = {}
    prefer_wait_s: Seconds = 0.0
    """How long a preferred host is waited for before any eligible one may take the job."""

    def __post_init__(self) -> None:
        _sort(self, "allowed_hosts", self.allowed_hosts)
        _sort(self, "prefer_hosts", self.prefer_hosts)

    @property
    def gpus(self) -> int:
        """Returns how many GPUs the job takes."""
        return self.min_gpus or int(self.require_cuda or self.min_vram_gib > 0 or self.gpu_share > 0)


def with_sandbox(needs: Needs, required: Mapping[str, SandboxLevel], project: str) -> Needs:
    """The needs with at least the sandbox that the hub requires of this project; `*` stands for the other projects."""
    level = max(needs.require_sandbox, required.get(project, required.get("*", "none")), key=SANDBOX_LEVELS.index)
    return msgspec.structs.replace(needs, require_sandbox=level)


class RequirementClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All that decides which hosts may take a job. Model and mode belong to it because host policies name them."""

    model: Name
    mode: Name
    needs: Needs = Needs()
    gang: bool = False
    """Jobs of gangs: no claim takes one by itself (`core.reservation`)."""

    @property
    def key(self) -> str:
        """The same for equal classes, on every machine and in every version."""
        return content_id("class", 1, without_defaults(self))

    @property
    def label(self) -> str:
        """`model-mode`, as host policies and people write it."""
        return f"{self.model}-{self.mode}"
