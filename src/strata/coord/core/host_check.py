"""The verdict of the check of hosts before a generation starts: a host is compared with the median of the others, and a
second measurement has to confirm; at most four rounds.

A host is compared with the median of the others. One measurement convicts no host: a second one has to confirm it. For
an all-reduce hosts meet in pairs, so two of them are suspect if it is slow or fails; each of the two then meets a host
whose first one was well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from strata.coord.core.step_samples import median

MOST_ROUNDS: Final = 4
"""Suspects that have met no other host by then are not convicted: half of all hosts were suspect."""


class HostMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """What one host measured, each figure the best of several runs; None: not measured."""

    matmul_s: float | None = None
    memory_s: float | None = None
    all_reduce_s: float | None = None
    problem: str = ""
    """What of matrix product and memory was wrong, or why the host measured nothing."""
    link_problem: str = ""
    """Why the all-reduce failed, or that its result was wrong."""


Groups = list[tuple[int, ...]]
"""Ranks of hosts that all-reduce with each other; who is in none makes no all-reduce in this round."""


@dataclass
class HostTrial:
    """The rounds of one check. All hosts record the same measurements, and come to the same verdict."""

    hosts: int
    factor: float
    rounds: int = 0
    _own: dict[int, str] = field(default_factory=dict)
    _links: dict[int, str] = field(default_factory=dict)
    _untried: list[int] = field(default_factory=list)
    """Suspects whose all-reduce was measured once."""
    _usual_s: list[float] = field(default_factory=list)
    """All-reduces of the first round that were well."""

    @property
    def convicted(self) -> dict[int, str]:
        """Says what each convicted rank is convicted of, once the check is over."""
        return {rank: reason for rank, reason in self._links.items() if rank not in self._untried} | self._own

    @property
    def is_over(self) -> bool:
        if self.rounds < 2:
            return self.rounds == 1 and not (self._own or self._links)
        return not self._untried or self.rounds == MOST_ROUNDS

    def groups(self) -> Groups:
        """Forms the groups of the next round: first all hosts, in pairs and one group of three if they are odd; then
        suspects."""
        well = [rank for rank in range(self.hosts) if rank not in self._links]
        if self.rounds and well:
            return list(zip(self._untried, well, strict=False))
        if self.hosts < 2:
            return []
        ends = [*range(2, self.hosts - 1, 2), self.hosts]
        return [tuple(range(start, end)) for start, end in zip([0, *ends], ends, strict=False)]

    def record(self, measurements: Sequence[HostMeasurement]) -> None:
        """Records what all hosts measured in the next round, in order of rank."""
        groups = self.groups()
        own = _suspects(measurements, self.factor)
        links = self._suspect_links(measurements, groups)
        if self.rounds == 0:
            self._own, self._links, self._untried = own, links, list(links)
        else:
            tried = {rank for group in groups for rank in group}
            self._own = {rank: own[rank] for rank in self._own if rank in own}
            self._links = {
                rank: links.get(rank, reason)
                for rank, reason in self._links.items()
                if rank in links or rank not in tried
            }
            self._untried = [rank for rank in self._untried if rank not in tried]
        self.rounds += 1

    def _suspect_links(self, measurements: Sequence[HostMeasurement], groups: Groups) -> dict[int, str]:
        found: dict[int, str] = {}
        times_s: dict[int, float | None] = {}
        for number, group in enumerate(groups):
            parts = [measurements[rank] for rank in group]
            problem = next((each.link_problem for each in parts if each.link_problem), "")
            if any(each.problem for each in parts):
                # The others may have waited in vain for a host that has another fault.
                continue
            if problem:
                found |= dict.fromkeys(group, f"the all-reduce with it fails: {problem}")
            else:
                times_s[number] = max((each.all_reduce_s for each in parts if each.all_reduce_s), default=None)
        slow = _slow(times_s, self.factor, self._usual_s)
        for number, reason in slow.items():
            found |= dict.fromkeys(groups[number], f"an all-reduce with it takes {reason}")
        if self.rounds == 0:
            self._usual_s = [time_s for number, time_s in times_s.items() if time_s and number not in slow]
        return found


def _suspects(measurements: Sequence[HostMeasurement], factor: float) -> dict[int, str]:
    """Says what is wrong or slow about a host itself, by rank."""
    found = {rank: each.problem for rank, each in enumerate(measurements) if each.problem}
    figures = {
        "matrix product": {rank: each.matmul_s for rank, each in enumerate(measurements)},
        "copy of memory": {rank: each.memory_s for rank, each in enumerate(measurements)},
    }
    for what, times_s in figures.items():
        for rank, reason in _slow(times_s, factor).items():
            found.setdefault(rank, f"its {what} takes {reason}")
    return found


def _slow(times_s: Mapping[int, float | None], factor: float, usual_s: Collection[float] = ()) -> dict[int, str]:
    """Those that take longer than `factor` times the median of the others."""
    found = {}
    measured = {key: time_s for key, time_s in times_s.items() if time_s is not None}
    for key, time_s in measured.items():
        others = [*usual_s, *(other_s for other, other_s in measured.items() if other != key)]
        median_s = median(others or [time_s])
        if time_s > factor * median_s:
            found[key] = f"{time_s / median_s:.1f} times as long as on the others ({time_s * 1e3:.2f} ms)"
    return found
