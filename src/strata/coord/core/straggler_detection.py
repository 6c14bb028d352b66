"""Decides which workers are slow or hung, and the level of the reaction: the thresholds (`StragglerLimits`: ratios,
z-score, numbers of steps, hang timeouts), the ladder reweight, rebalance, stop, and the wording of the reasons.

**Slow** is a worker whose recent steps take much longer than those of the others: by a robust z-score (median and MAD
over the workers of a generation, so that the slow one does not hide itself) and by a plain ratio, because a z-score
alone would complain about microseconds among equals. Of two workers the slower one is compared with the other. Ranks
that step together all have the step time of the slowest: among them the computing times count, which leave out the
waiting for others. There one slow rank delays all, so a worker whose last few steps all took far more computing than
the same steps of the others is found at once.

A worker is also compared with its own past, which finds one among unequal workers: slow is one whose steps take much
longer than at its best, by a larger factor than the others' do, unless it still keeps up with them. Longer data makes
all workers slower by the same factor: such a job has no slow worker, and a job of one worker never has.

**Hung** is a worker whose step does not grow while its process lives, for much longer than steps of this job take.
If most workers stand at the same step, none of them is the cause: all are named, and only a worker that
`hang_diagnosis` finds is stopped. Until a few steps of the generation are known, the timeout is several times longer.

The reaction escalates: less data, then REBALANCE, then STOP. A worker goes up one level when the finding lasted, comes
down when the opposite lasted, and stays where it is in between. Few samples mean no finding.
No clock, no chance, no I/O. `judge` takes the samples and the standing of each worker, and returns the new standings.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, sqrt
from typing import Final, assert_never

from strata.coord.core.facts import CommandKind, StragglerFinding
from strata.coord.core.hang_diagnosis import HangDiagnosis
from strata.coord.core.job_config import EscalationLevel
from strata.coord.core.step_samples import SIGMA, StepSample, mad, median

_MEDIAN_NOISE: Final = 1.2533
"""How much noisier a median is than a mean."""


@dataclass(frozen=True, kw_only=True)
class StragglerLimits:
    recent: int = 8
    """Steps that make a worker's present speed."""
    window: int = 32
    """Steps remembered of each worker, for the noise and for the job's own idea of a long step."""
    min_workers: int = 2
    slow_z: float = 3.5
    slow_ratio: float = 1.5
    """Both have to be reached; time over the median of all."""
    fine_ratio: float = 1.2
    """A worker below this ratio is as fast as the others; between the two ratios nothing changes."""
    patience_steps: int = 8
    """How many reports of its steps a finding has to last, for each level, and a slow one as many of the others'."""
    far_steps: int = 5
    """Computing times that find a worker far slower without patience, each of them."""
    far_ratio: float = 3.0
    far_s: float = 1.0
    """So much time those steps must have taken: a short disturbance covers many short steps."""
    hang_factor: float = 10.0
    """Hung after so many long steps (the 95th percentile of the job)."""
    hang_floor_s: float = 60.0
    hang_first_factor: float = 5.0
    """The timeout is so much longer for a worker's first step, which compiles, and while few steps are known."""
    alive_s: float = 15.0
    """A worker that was silent for so long is left to the liveness check."""
    slow_until: EscalationLevel = EscalationLevel.REWEIGHT
    """The last level for being slow. Slow hardware is no fault: it gets less data and stays."""


NEXT: Final[dict[tuple[EscalationLevel, StragglerFinding], EscalationLevel]] = {
    (EscalationLevel.NONE, StragglerFinding.SLOW): EscalationLevel.REWEIGHT,
    (EscalationLevel.REWEIGHT, StragglerFinding.SLOW): EscalationLevel.REBALANCE,
    (EscalationLevel.REBALANCE, StragglerFinding.SLOW): EscalationLevel.STOP,
    # Less data does not help one that reads none.
    (EscalationLevel.NONE, StragglerFinding.HUNG): EscalationLevel.REBALANCE,
    (EscalationLevel.REWEIGHT, StragglerFinding.HUNG): EscalationLevel.REBALANCE,
    (EscalationLevel.REBALANCE, StragglerFinding.HUNG): EscalationLevel.STOP,
    (EscalationLevel.REWEIGHT, StragglerFinding.FINE): EscalationLevel.NONE,
    (EscalationLevel.REBALANCE, StragglerFinding.FINE): EscalationLevel.NONE,
}
"""The transitions of escalation. There is none after STOP: the next incarnation begins at NONE."""

LADDER: Final = tuple(EscalationLevel)

COMMAND: Final[dict[EscalationLevel, CommandKind]] = {
    EscalationLevel.REBALANCE: CommandKind.REBALANCE,
    EscalationLevel.STOP: CommandKind.STOP,
}


@dataclass(frozen=True)
class StragglerStanding:
    """Where a worker stands, and the finding that may move it, with its beginning."""

    level: EscalationLevel = EscalationLevel.NONE
    finding: StragglerFinding | None = None
    since_steps: int = 0
    since_s: float = 0.0
    by_past: bool = False
    """The level follows from its own past: it comes down when it is as fast as it was."""


@dataclass(frozen=True)
class StragglerIncident:
    """A worker moved on the ladder."""

    worker_id: str
    finding: StragglerFinding
    level: EscalationLevel
    """What to do now; NONE takes back what was done."""
    weight: float
    """What its share of the data should be multiplied with."""
    reason: str
    blocks_others: bool = False
    """It hangs while others wait for it in a collective: they go on only when its process ends."""


@dataclass(frozen=True)
class StragglerVerdicts:
    incidents: tuple[StragglerIncident, ...]
    standings: dict[str, StragglerStanding]


@dataclass(frozen=True)
class _Reports:
    """The reports of the workers that are compared: times that one reported before it waited say nothing about the
    present."""

    samples: Sequence[StepSample] = ()
    found: dict[float, int] = field(default_factory=dict)

    def since(self, at_s: float) -> int:
        """Counts as many later ones as each of more than half of the workers has sent; of two, both."""
        if at_s not in self.found:
            counts = sorted(each.since(at_s) for each in self.samples)
            self.found[at_s] = counts[(len(counts) - 1) // 2] if counts else 0
        return self.found[at_s]


@dataclass(frozen=True)
class _Speed:
    """The speed of all workers with enough samples."""

    own_s: dict[str, float] = field(default_factory=dict)
    median_s: float = 0.0
    """The median; of two workers the time of the faster one."""
    sigma_s: float = 0.0
    slow: frozenset[str] = frozenset()
    """Compared with the others."""
    past: dict[str, float] = field(default_factory=dict)
    """Its time divided by its best, of those that have one."""
    typical_past: float = 1.0
    """The same of all: what the job itself became slower by."""
    reports: _Reports = field(default_factory=_Reports)

    def slowed(self, worker_id: str) -> float | None:
        """The factor by which it became slower and the others did not."""
        past = self.past.get(worker_id)
        return None if past is None else past / max(self.typical_past, 1.0)


@dataclass(frozen=True)
class _Lockstep:
    """Computing times of workers that report them."""

    own_s: dict[str, float] = field(default_factory=dict)
    median_s: float = 0.0
    far_slower: frozenset[str] = frozenset()
    """Each of their last steps took far more computing than the others' take."""


@dataclass(frozen=True)
class _Hang:
    timeout_s: float
    long_s: float
    """The 95th percentile of the job's steps."""
    hung: frozenset[str]
    of: int
    """The number of workers that were compared."""
    overdue: int
    """So many make no step; those that are ahead wait for the hung ones."""

    @property
    def most(self) -> bool:
        """Says whether most are slow: stopping them would end the job, and what they all wait for is likely not
        theirs."""
        return 2 * len(self.hung) > self.of


def judge(
    samples: Mapping[str, StepSample],
    standings: Mapping[str, StragglerStanding],
    now_s: float,
    limits: StragglerLimits | None = None,
    diagnosis: HangDiagnosis | None = None,
) -> StragglerVerdicts:
    """Incidents since the last time, and the standings for the next. `samples` are of one generation's members."""
    limits, diagnosis = limits or StragglerLimits(), diagnosis or HangDiagnosis()
    speed, lockstep, hang = _speed(samples, limits), _lockstep(samples, limits), _hang(samples, now_s, limits)
    incidents: list[StragglerIncident] = []
    after: dict[str, StragglerStanding] = {}
    for worker_id, sample in samples.items():
        standing = standings.get(worker_id, StragglerStanding())
        if worker_id in diagnosis.suspects:
            incidents.append(_blocking(worker_id, sample, len(samples), now_s, diagnosis.suspects[worker_id]))
            after[worker_id] = StragglerStanding(EscalationLevel.STOP, StragglerFinding.HUNG, sample.steps, now_s)
            continue
        if diagnosis.pending and hang is not None and worker_id in hang.hung:
            after[worker_id] = standing
            continue
        far_slower = worker_id in lockstep.far_slower
        finding = _finding(worker_id, standing, speed, hang, limits, far_slower=far_slower)
        lasting_steps = 0 if far_slower and standing.level is EscalationLevel.NONE else limits.patience_steps
        level = _rung(
            standing, finding, sample, now_s, hang, limits, reports=speed.reports, lasting_steps=lasting_steps
        )
        if finding is StragglerFinding.HUNG and diagnosis.reported and level is EscalationLevel.STOP:
            # It has reported, and nothing shows that it is the cause.
            level = standing.level
        after[worker_id] = _standing(standing, finding, level, sample, now_s)
        if level is not standing.level and finding is not None:
            hung = _hung_reason(worker_id, sample, hang, now_s)
            incidents.append(_incident(worker_id, finding, level, speed, lockstep, hung))
            by_past = finding is StragglerFinding.SLOW and not (far_slower or worker_id in speed.slow)
            after[worker_id] = replace(after[worker_id], by_past=by_past)
    return StragglerVerdicts(tuple(incidents), after)


def _finding(
    worker_id: str,
    standing: StragglerStanding,
    speed: _Speed,
    hang: _Hang | None,
    limits: StragglerLimits,
    *,
    far_slower: bool,
) -> StragglerFinding | None:
    if hang is not None and worker_id in hang.hung:
        return StragglerFinding.HUNG
    if far_slower:
        return StragglerFinding.SLOW
    own_s = speed.own_s.get(worker_id)
    if own_s is None:
        return None
    if own_s <= speed.median_s * limits.fine_ratio:
        return StragglerFinding.FINE
    slowed = speed.slowed(worker_id)
    if worker_id in speed.slow or (slowed is not None and slowed >= limits.slow_ratio):
        return StragglerFinding.SLOW
    return StragglerFinding.FINE if standing.by_past and slowed is not None and slowed <= limits.fine_ratio else None


def _rung(  # noqa: PLR0913 - what an evaluation knows of a worker
    standing: StragglerStanding,
    finding: StragglerFinding | None,
    sample: StepSample,
    now_s: float,
    hang: _Hang | None,
    limits: StragglerLimits,
    *,
    reports: _Reports,
    lasting_steps: int,
) -> EscalationLevel:
    """The same, or the next one if the finding lasted long enough."""
    following = NEXT.get((standing.level, finding), standing.level) if finding else standing.level
    if finding is StragglerFinding.HUNG and hang is not None:
        return _hung_rung(standing, following, now_s, hang)
    if finding is StragglerFinding.SLOW and LADDER.index(following) > LADDER.index(limits.slow_until):
        return standing.level
    lasted = sample.steps - standing.since_steps if standing.finding is finding else 0
    if finding is StragglerFinding.SLOW and lasted >= lasting_steps > 0:
        # Nobody is slow by what the others did before.
        lasted = reports.since(standing.since_s)
    return following if lasted >= lasting_steps else standing.level


def _hung_rung(standing: StragglerStanding, following: EscalationLevel, now_s: float, hang: _Hang) -> EscalationLevel:
    if hang.most and following is EscalationLevel.STOP:
        return standing.level
    # The timeout has passed once; the next level takes another one.
    began = standing.finding is not StragglerFinding.HUNG
    return following if began or now_s - standing.since_s >= hang.timeout_s else standing.level


def _standing(
    standing: StragglerStanding,
    finding: StragglerFinding | None,
    level: EscalationLevel,
    sample: StepSample,
    now_s: float,
) -> StragglerStanding:
    goes_on = (
        finding is standing.finding
        and level is standing.level
        # After a new generation its steps count from the start.
        and sample.steps >= standing.since_steps
    )
    return standing if goes_on else StragglerStanding(level, finding, sample.steps, now_s, standing.by_past)


def _speed(samples: Mapping[str, StepSample], limits: StragglerLimits) -> _Speed:
    compared = {worker_id: each for worker_id, each in samples.items() if len(each.own_s) >= limits.recent}
    # A step time has the waiting in it: it cannot be compared with computing times.
    computing = 2 * sum(bool(each.computed_s) for each in samples.values()) > len(samples)
    compared = {worker_id: each for worker_id, each in compared.items() if bool(each.computed_s) == computing}
    if len(compared) < limits.min_workers:
        return _Speed()
    own_s = {worker_id: each.recent_s(limits.recent) for worker_id, each in compared.items()}
    median_s = _typical(own_s.values())
    if median_s <= 0:
        # No time has passed between their heartbeats: there is nothing to compare.
        return _Speed()
    # The distance of two says nothing about how far apart workers are as a rule.
    between_s = SIGMA * mad(list(own_s.values()), median_s) if len(own_s) > 2 else 0.0
    # Few workers may happen to be very equal at the moment: their own noise says how little that means.
    noise_s = _typical([each.noise_s() for each in compared.values()])
    within_s = noise_s * _MEDIAN_NOISE / sqrt(limits.recent)
    past = {worker_id: own_s[worker_id] / each.best_s for worker_id, each in compared.items() if 0 < each.best_s < inf}
    # Without the past of all, a factor of the job cannot be distinguished from one of a worker.
    past = past if len(past) == len(compared) else {}
    sigma_s = max(between_s, within_s, 0.01 * median_s, 1e-9)
    slow_s = median_s + max(limits.slow_z * sigma_s, (limits.slow_ratio - 1) * median_s)
    slow = frozenset(worker_id for worker_id, each_s in own_s.items() if each_s >= slow_s)
    reports = _Reports(tuple(compared.values()))
    return _Speed(own_s, median_s, sigma_s, slow, past, _typical(past.values()) if past else 1.0, reports)


def _lockstep(samples: Mapping[str, StepSample], limits: StragglerLimits) -> _Lockstep:
    """Compares the last steps of each worker, and the same steps of all.

    Else the first heartbeat that reports longer steps would accuse its worker. Nothing for workers that do not step
    together: only the slower ones of those wait, and patience finds them.
    """
    newest = max((each.step for each in samples.values() if each.compute_s), default=0)
    least = newest - limits.window + limits.far_steps
    last_s = {worker_id: each.compute_s for worker_id, each in samples.items() if each.compute_s}
    near = {worker_id: samples[worker_id].step for worker_id in last_s if samples[worker_id].step >= least}
    common = min(near.values(), default=0)
    same_s = {
        worker_id: last_s[worker_id][: len(last_s[worker_id]) - step + common] for worker_id, step in near.items()
    }
    by_last, by_same = _compare_computing(last_s, limits), _compare_computing(same_s, limits)
    far = by_same.far_slower & by_last.far_slower
    together = (each for each in far if _steps_with(samples[each], (samples[other] for other in last_s), limits))
    return replace(by_same, far_slower=frozenset(together))


def _steps_with(slow: StepSample, others: Iterable[StepSample], limits: StragglerLimits) -> bool:
    """Says whether no worker is further ahead or behind than steps as long as these explain, from heartbeat to
    heartbeat.

    Nor was one ahead in any report since before these steps: it may have made the same steps earlier, and wait now. Of
    steps before its first report nobody knows when it made them.
    """
    least_s = min(slow.compute_s[-limits.far_steps :])
    begun = bisect_right(slow.reported, slow.step - limits.far_steps, key=lambda report: report[1])
    reported, ahead = slow.reported[begun - 1 :], limits.far_steps // 2
    return begun > 0 and all(
        abs(each.step - slow.step) <= 1 + abs(each.heard_s - slow.heard_s) / least_s
        and each.reported[0][1] <= min(each.step, slow.step) - limits.far_steps
        and all(each.step_at(at_s) <= step + ahead for at_s, step in reported)
        for each in others
    )


def _compare_computing(times_s: Mapping[str, Sequence[float]], limits: StragglerLimits) -> _Lockstep:
    steps = limits.far_steps
    own_s = {worker_id: median(each[-steps:]) for worker_id, each in times_s.items() if len(each) >= steps}
    if len(own_s) < limits.min_workers:
        return _Lockstep()
    median_s = _typical(own_s.values())
    if median_s <= 0:
        return _Lockstep()
    far_s = limits.far_ratio * median_s
    far = (worker_id for worker_id, each in own_s.items() if each >= far_s)
    return _Lockstep(own_s, median_s, frozenset(each for each in far if _all_far(times_s[each], far_s, limits)))


def _all_far(times_s: Sequence[float], far_s: float, limits: StragglerLimits) -> bool:
    """Says whether all its last steps took so long, for long enough."""
    steps, total_s = 0, 0.0
    for time_s in reversed(times_s):
        if time_s < far_s:
            return False
        steps, total_s = steps + 1, total_s + time_s
        if steps >= limits.far_steps and total_s >= limits.far_s:
            return True
    return steps >= limits.window


def _hang(samples: Mapping[str, StepSample], now_s: float, limits: StragglerLimits) -> _Hang | None:
    """None if no worker's step is overdue."""
    able = {worker_id: each for worker_id, each in samples.items() if _can_hang(each, now_s, limits)}
    if not any(now_s - each.moved_s >= limits.hang_floor_s for each in able.values()):
        return None
    pooled = sorted(time_s for each in samples.values() for time_s in (each.times_s or each.first_s))
    long_s = pooled[ceil(0.95 * len(pooled)) - 1]
    timeout_s = max(limits.hang_factor * long_s, limits.hang_floor_s)
    first_s = limits.hang_first_factor * timeout_s
    if len(pooled) < limits.recent:
        timeout_s = first_s
    overdue = {
        worker_id: each
        for worker_id, each in able.items()
        if now_s - each.moved_s >= (timeout_s if each.steps else first_s)
    }
    if not overdue:
        return None
    return _Hang(timeout_s, long_s, _last_of(overdue), len(samples), len(overdue))


def standstill(samples: Mapping[str, StepSample], now_s: float, limits: StragglerLimits) -> tuple[float | None, bool]:
    """The timeout that all of them have exceeded, none of them busy with something else; None if one has not.

    Then also whether the others stopped at the same time, as far as heartbeats can show it, and are overdue soon.
    """
    hang = _hang(samples, now_s, limits)
    if hang is None:
        return None, False
    if hang.overdue == hang.of:
        return hang.timeout_s, False
    moved_s = [each.moved_s for each in samples.values()]
    at_once = max(moved_s) - min(moved_s) <= limits.alive_s
    return None, at_once and now_s - max(moved_s) < hang.timeout_s + limits.alive_s


def _can_hang(sample: StepSample, now_s: float, limits: StragglerLimits) -> bool:
    """One that has made no step yet may compile, or wait for the others to come."""
    return bool(sample.times_s or sample.first_s) and not sample.busy and now_s - sample.heard_s <= limits.alive_s


def _last_of(overdue: Mapping[str, StepSample]) -> frozenset[str]:
    """Workers in step with each other wait for the one that hangs: it is behind them."""
    behind = min(each.step for each in overdue.values())
    return frozenset(worker_id for worker_id, each in overdue.items() if each.step == behind)


def _incident(
    worker_id: str,
    finding: StragglerFinding,
    level: EscalationLevel,
    speed: _Speed,
    lockstep: _Lockstep,
    hung: str,
) -> StragglerIncident:
    """`hung` is the sentence for one that hangs."""
    if finding is StragglerFinding.SLOW and worker_id in lockstep.far_slower:
        return _far_slower(worker_id, level, lockstep)
    own_s, median_s = speed.own_s.get(worker_id, 0.0), speed.median_s
    among = f"{own_s:.3g} s for a step where {_others(len(speed.own_s), median_s)}"
    match finding:
        case StragglerFinding.HUNG:
            return StragglerIncident(worker_id, finding, level, 1.0, hung)
        case StragglerFinding.SLOW:
            times, z = own_s / median_s, (own_s - median_s) / speed.sigma_s
            reason = f"{worker_id} is slow: {among}, {times:.1f} times as long (z {z:.1f})"
            if worker_id not in speed.slow:
                past = speed.past[worker_id]
                reason = (
                    f"{worker_id} is slow: {among}, and {past:.1f} times as long as its own best of"
                    f" {own_s / past:.3g} s; the others take {speed.typical_past:.1f} times as long as at their best"
                )
            return StragglerIncident(worker_id, finding, level, 1 / times, reason)
        case StragglerFinding.FINE:
            return StragglerIncident(worker_id, finding, level, 1.0, f"{worker_id} keeps up again: {among}")
        case _:
            assert_never(finding)


def _far_slower(worker_id: str, level: EscalationLevel, lockstep: _Lockstep) -> StragglerIncident:
    own_s, median_s = lockstep.own_s[worker_id], lockstep.median_s
    reason = (
        f"{worker_id} is slow: {own_s:.3g} s of computing for a step where {_others(len(lockstep.own_s), median_s)},"
        f" {own_s / median_s:.1f} times as long; all that step together wait for it"
    )
    return StragglerIncident(worker_id, StragglerFinding.SLOW, level, median_s / own_s, reason)


def _others(workers: int, median_s: float) -> str:
    return (
        f"the median of {workers} workers is {median_s:.3g} s"
        if workers > 2
        else f"the other worker takes {median_s:.3g} s"
    )


def _blocking(worker_id: str, sample: StepSample, workers: int, now_s: float, where: str) -> StragglerIncident:
    reason = (
        f"{worker_id} hangs: no worker of {workers} has made a step for {now_s - sample.moved_s:.0f} s, and the others"
        f" wait for it in a collective; {where}"
    )
    return StragglerIncident(worker_id, StragglerFinding.HUNG, EscalationLevel.STOP, 1.0, reason, blocks_others=True)


def _hung_reason(worker_id: str, sample: StepSample, hang: _Hang | None, now_s: float) -> str:
    if hang is None:
        return ""
    others = len(hang.hung) - 1
    who = "it" if not others else "like all others it" if others == hang.of - 1 else f"it, like {others} more,"
    return (
        f"{worker_id} hangs: {who} is at step {sample.step} for {now_s - sample.moved_s:.0f} s while its process"
        f" lives; 95 % of this job's steps take up to {hang.long_s:.3g} s, and {hang.timeout_s:.0f} s are too long"
    )


def _typical(values: Collection[float]) -> float:
    """The median; of two, whose median would be half of the slow one, the smaller."""
    return median(list(values)) if len(values) > 2 else min(values)
