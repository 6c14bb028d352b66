"""The outcome of a kill campaign so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from soak.trials import CampaignResult, spread_s

LEASE_S: Final = 8.0
LIMIT_S: Final = 2.0
"""Limit from the death of a child to its report at the hub, and from the expiry of a dead host's lease to free jobs."""


@dataclass
class KillOutcome:
    kills: int = 0
    trials: int = 0
    problems: list[str] = field(default_factory=list)
    victims: dict[str, int] = field(default_factory=dict)
    moments: dict[str, int] = field(default_factory=dict)
    """Kills at each failpoint."""
    crash_s: list[float] = field(default_factory=list)
    claimable_s: list[float] = field(default_factory=list)
    """Beyond the lease."""
    back_s: list[float] = field(default_factory=list)
    kept: int = 0
    """Attempts that continued after their agent was killed."""
    slow: int = 0
    """Agents that were away longer than their leases last: their attempts may be lost."""
    jobs: int = 0
    attempts: int = 0
    log_bytes: int = 0
    dropped: int = 0
    """Reports of attempts that another host had finished: rejected by the hub."""

    killed_s: float = 0.0
    """The last kill, by the monotonic clock."""

    def killed(self, what: str, moment: str = "") -> None:
        self.kills += 1
        self.killed_s = time.monotonic()
        self.victims[what] = self.victims.get(what, 0) + 1
        if moment:
            self.moments[moment] = self.moments.get(moment, 0) + 1

    def result(self) -> CampaignResult:
        late = [sum(each > LIMIT_S for each in times) for times in (self.crash_s, self.claimable_s)]
        victims = ", ".join(f"{count} {what}" for what, count in sorted(self.victims.items()))
        figures = (
            f"killed: {victims}; {sum(self.moments.values())} of them at {len(self.moments)} failpoints; death of a"
            f" child to the hub that knows of it {spread_s(self.crash_s)}, {late[0]} over {LIMIT_S:g} s; a dead host's"
            f" job claimable after its lease of {LEASE_S:g} s + {spread_s(self.claimable_s)}, {late[1]} over"
            f" {LIMIT_S:g} s; agent back {spread_s(self.back_s)}, {self.slow} too late to keep its leases;"
            f" {self.kept} attempts went on after the death of their agent;"
            f" {self.jobs} jobs in {self.attempts} attempts, {self.log_bytes / 1e6:.1f} MB of logs compared;"
            f" {self.dropped} late reports refused"
        )
        worst_s = max((*self.crash_s, *self.claimable_s), default=0.0)
        return CampaignResult(times=self.kills, problems=self.problems, figures=figures, worst_s=worst_s)
