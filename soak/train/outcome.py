"""The outcome of a campaign against a training server so far."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from soak.trials import CampaignResult, spread_s


@dataclass
class Outcome:
    times: int = 0
    problems: list[str] = field(default_factory=list)
    operations: int = 0
    steps: int = 0
    recovered_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By victim, from a kill to the result of an operation that was sent after it."""
    victims: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    """Kills at each failpoint."""
    missed: list[str] = field(default_factory=list)
    """Failpoints that no process reached in time."""
    restored: int = 0
    """Groups of ranks that began from a snapshot."""
    snapshots: int = 0
    """That the journals know of at the end of each round."""
    shared: int = 0
    """Passes that several models had together."""
    equal: int = 0
    """Models whose final files are, byte by byte, those of an undisturbed run."""
    replayed: int = 0
    """Models whose final files are, byte by byte, those of a clean replay of the journal."""

    def recovered(self, victim: str, seconds: float) -> None:
        self.victims[victim] += 1
        self.recovered_s[victim].append(seconds)

    def result(self, failpoints: Sequence[str] = ()) -> CampaignResult:
        killed = ", ".join(f"{count} {name}" for name, count in sorted(self.victims.items()))
        each = "; ".join(f"{name} {spread_s(found)}" for name, found in sorted(self.recovered_s.items()))
        every = [seconds for found in self.recovered_s.values() for seconds in found]
        figures = (
            f"{self.operations} operations, of them {self.steps} steps of the optimizer, none lost or doubled; "
            f"killed {killed}, {self.reached.total()} of these at {len(self.reached)} of {len(failpoints)} failpoints; "
            f"{self.restored} groups of ranks restored a snapshot; final files of {self.equal} models equal to those "
            f"of an undisturbed run, of {self.replayed} that shared {self.shared} passes to a replay of the journal; "
            f"kill to the result of an operation sent after it {spread_s(every)}: {each}"
        )
        if self.problems:
            figures = figures.replace(", none lost or doubled", "")
        if self.missed:
            figures += f"; not reached in time: {', '.join(self.missed)}"
        return CampaignResult(
            times=self.times, problems=self.problems, figures=figures, worst_s=max(every, default=0.0)
        )
