"""What a coordinator knows: per job what the facts built (`JobState`), and what only this process has seen (`Live`).

A snapshot holds the first and never the second: after a restart the workers say again what `Live` needs.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import msgspec

from strata.coord.core.facts import (
    CommandKind,
    JobConfig,
    Part,
    Verdict,
    Worker,
)
from strata.coord.core.ledger import DatasetLedger, DatasetPosition, Late
from strata.coord.core.picker import Picker
from strata.coord.core.placement import Assignment

EVICTED_KEPT: Final = 10_000
VERDICTS_KEPT: Final = 4_096
ACKS_KEPT: Final = 256
TOMBSTONES_KEPT: Final = 16_384


class Member(msgspec.Struct):
    worker: Worker
    acked: list[int] = []
    """The last leases it acked: a repeated ack is recognised, not refused."""


class Decided(msgspec.Struct, frozen=True):
    """A barrier's end, kept so that a repeated call gets the same answer."""

    generation: int
    barrier_id: str
    verdict: Verdict
    missing: tuple[str, ...]


class Collecting(msgspec.Struct):
    """A checkpoint some ranks have reported."""

    checkpoint_id: str
    generation: int
    step: int
    parts: dict[str, Part] = {}
    read_until: dict[int, int] = {}
    late: dict[str, Late] = {}
    """By dataset, what a worker consumed after its own part: it is not in the checkpoint."""


class Checkpoint(msgspec.Struct, frozen=True):
    """A committed one: parts of all ranks, and where every dataset stood at that step."""

    checkpoint_id: str
    generation: int
    step: int
    parts: tuple[Part, ...]
    positions: dict[str, DatasetPosition]


class Command(msgspec.Struct):
    command_id: int
    kind: CommandKind
    waiting: dict[str, None]
    """Workers that have not acknowledged it."""
    reason: str


class JobState(msgspec.Struct):
    job: str
    config: JobConfig
    members: dict[str, Member] = {}
    evicted: dict[str, str] = {}
    """The last incarnation of workers that are no members any more, oldest first."""
    generation: int = 0
    ranks: dict[str, int] = {}
    """The members of the generation and their ranks, in order of rank."""
    settled: bool = True
    """Whether nobody has come or gone since the generation was formed."""
    recovered_generation: int = 0
    """The generation that began with the last recovery; who observed an older one has been rewound already."""
    recovered_to: str | None = None
    datasets: dict[str, DatasetLedger] = {}
    verdicts: dict[tuple[int, str], Decided] = {}
    """By generation and id; oldest first."""
    collecting: dict[str, Collecting] = {}
    checkpoints: list[Checkpoint] = []
    tombstones: dict[str, int] = {}
    """Parts of checkpoints that are kept no longer, and the ranks that wrote them; oldest first."""
    commands: dict[int, Command] = {}
    last_command: int = 0

    def checkpoint(self, checkpoint_id: str | None) -> Checkpoint | None:
        return next((each for each in self.checkpoints if each.checkpoint_id == checkpoint_id), None)


@dataclass
class OpenBarrier:
    barrier_id: str
    expected: int
    """How many have to come; 0 means all of the generation."""
    step: int
    deadline_s: float
    arrived: dict[str, None] = field(default_factory=dict)
    missing: dict[str, None] = field(default_factory=dict)
    """Members of the generation that have not arrived, in order of rank."""


@dataclass(frozen=True)
class Placed:
    generation: int
    assignment: Assignment
    by_worker: dict[str, list[int]]


@dataclass
class Live:
    """What this process has seen of a job. All times are this process's monotonic seconds."""

    seen_s: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """When each member last said anything; longest silent first."""
    suspect_s: dict[str, float] = field(default_factory=dict)
    """Since when a member's presence is broken."""
    amnesty: bool = False
    """Whether the members known from the journal were given time to be heard of."""
    unheard: dict[str, None] = field(default_factory=dict)
    """Those of them who have said nothing yet. Their `seen_s` lies ahead, out of order: they are looked at apart."""
    unsettled_s: float | None = None
    """Since when members have been coming and going without a generation being formed."""
    changed_s: float | None = None
    """When the members last changed since the generation was formed."""
    barriers: dict[str, OpenBarrier] = field(default_factory=dict)
    pickers: dict[tuple[str, int], Picker] = field(default_factory=dict)
    file_ends: dict[str, list[int]] = field(default_factory=dict)
    """By dataset, the sample after the last one of each file."""
    placements: dict[int, Placed] = field(default_factory=dict)
    """By number of buckets, who owns each of them. Gives affinity only; the ledger gives truth."""


@dataclass
class CoordState:
    """One partition: its jobs, and what this process needs to give out lease ids of its own."""

    jobs: dict[str, JobState] = field(default_factory=dict)
    live: dict[str, Live] = field(default_factory=dict)
    leader_epoch: int = 0
    leases_given: int = 0
    ticked_s: float | None = None

    def live_of(self, job: str) -> Live:
        found = self.live.get(job)
        if found is None:
            found = self.live[job] = Live()
        return found
