"""The step times of a worker, made from its heartbeats: how a report becomes a sample, how pauses are left out, and the
robust median and deviation (MAD).

`straggler_detection` compares the samples of a job's workers with each other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

SIGMA: Final = 1.4826
"""A standard deviation in MADs, for normal noise."""
_NOISE: Final = -1
"""Where a sample keeps its noise, beside medians of so many steps."""


@dataclass(frozen=True)
class StepSample:
    """The steps of one incarnation in one generation. `add_report` makes the next sample from the last."""

    step: int
    moved_s: float
    """When its step last changed."""
    heard_s: float
    times_s: tuple[float, ...] = ()
    """Durations of its last steps, newest last."""
    steps: int = 0
    """How many durations there have been."""
    busy: bool = False
    """It reports that it does something else than training: it cannot hang."""
    compute_s: tuple[float, ...] = ()
    """Computing times of its last steps, newest last."""
    computed_s: tuple[float, ...] = ()
    """The median of those that each report brought, newest last."""
    first_s: tuple[float, ...] = ()
    """The duration in its first report, while there is no other."""
    best_s: float = inf
    """The least median of a whole window of durations; `inf` before there was one."""
    reported: tuple[tuple[float, int], ...] = ()
    """When it reported which step for the first time, newest last."""
    worked_s: float = 0.0
    """Time for its present step until `moved_s`, without what it was busy with."""

    made: dict[int, float] = field(default_factory=dict, compare=False, repr=False)
    """Cached statistics: between two evaluations most workers report nothing new."""

    @property
    def own_s(self) -> tuple[float, ...]:
        """The durations that its speed is judged by."""
        return self.computed_s or self.times_s

    def recent_s(self, steps: int) -> float:
        """The median of the last ones."""
        found = self.made.get(steps)
        if found is None:
            found = self.made[steps] = median(self.own_s[-steps:])
        return found

    def since(self, at_s: float) -> int:
        """Returns how many reports of new steps came later."""
        return len(self.reported) - bisect_right(self.reported, (at_s, inf))

    def step_at(self, at_s: float) -> int:
        """The step that it had reported by then; if none, its first one."""
        return self.reported[max(bisect_right(self.reported, (at_s, inf)) - 1, 0)][1]

    def noise_s(self) -> float:
        found = self.made.get(_NOISE)
        if found is None:
            found = self.made[_NOISE] = SIGMA * mad(self.own_s, median(self.own_s))
        return found


def add_report(  # noqa: PLR0913 - what one heartbeat says
    before: StepSample | None,
    step: int,
    step_time_s: float | None,
    now_s: float,
    *,
    busy: bool = False,
    compute_s: tuple[float, ...] = (),
    window: int = 32,
) -> StepSample:
    """Adds the report of a heartbeat. A duration that is not reported follows from the time and the steps in between.

    `compute_s` are computing times of the last steps, newest last: as many of them as there are new steps are new.
    """
    if before is None:
        # A duration is of this generation too: a worker reports none before its second step.
        first_s = (step_time_s,) if step_time_s is not None and 0 < step_time_s < inf else ()
        return StepSample(
            step, now_s, now_s, busy=busy, compute_s=compute_s[-window:], first_s=first_s, reported=((now_s, step),)
        )
    if step == before.step:
        sample = pause(before, now_s) if busy or before.busy else before
        return replace(sample, heard_s=now_s, busy=busy)
    if step < before.step:
        # It went back to a checkpoint, and loading one is no step.
        return replace(
            before, step=step, moved_s=now_s, heard_s=now_s, busy=busy, reported=((now_s, step),), worked_s=0.0
        )
    times_s: tuple[float, ...] = ()
    if step_time_s is not None and 0 < step_time_s < inf:
        times_s = (step_time_s,)
    elif len(before.reported) > 1 or step - before.step > 1:
        times_s = ((before.worked_s + now_s - before.moved_s) / (step - before.step),)
    # Else its first report came in the middle of this step: nobody knows when it began.
    new_s = compute_s[-min(step - before.step, window) :]
    sample = StepSample(
        step,
        now_s,
        now_s,
        (*before.times_s, *times_s)[-window:],
        before.steps + len(times_s),
        busy,
        # A worker that reports none any more is compared by its step times.
        (*before.compute_s, *new_s)[-window:] if new_s else (),
        (*before.computed_s, median(new_s))[-window:] if new_s else (),
        # A best computing time says nothing about step times.
        best_s=before.best_s if bool(new_s) == bool(before.computed_s) else inf,
        reported=(*before.reported, (now_s, step))[-window:],
    )
    return replace(sample, best_s=min(sample.best_s, median(sample.own_s))) if len(sample.own_s) == window else sample


def pause(sample: StepSample, now_s: float) -> StepSample:
    """It waits or does something else until now: a step should not have ended meanwhile, nor did one last so long."""
    worked_s = sample.worked_s + (0.0 if sample.busy else now_s - sample.moved_s)
    return replace(sample, busy=True, moved_s=now_s, worked_s=worked_s)


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def mad(values: Sequence[float], around: float) -> float:
    return median([abs(value - around) for value in values])
