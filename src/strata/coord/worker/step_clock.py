"""Measures the steps of a worker and how much of each it computes rather than waits: how many times are kept (32), and
when the first is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KEPT: Final = 32
"""Computing times that a heartbeat reports."""
FIRST_REPORT: Final = 5
"""Computing times that are enough to tell a slow worker."""


@dataclass(frozen=True)
class StepTimes:
    """What heartbeats report. Replaced as a whole, because another thread reads it."""

    step_ms: float | None = None
    """Duration of the last step, with all waiting in it; None: one step alone has no duration. None: one step alone has
    no duration."""
    compute_ms: tuple[float, ...] = ()
    """Durations of the last steps without waiting, newest last."""


class StepClock:
    """The steps of one training loop in one generation."""

    def __init__(self) -> None:
        self._times = StepTimes()
        self._stepped_s: float | None = None
        self._waited_s = 0.0
        self._has_met = False
        """Whether the worker met the others at a barrier since its last step."""
        self._met_before = False
        """Whether it did so in the step before that."""
        self._pauses = 0
        self._paused_s = 0.0

    def waited(self, seconds: float) -> None:
        """The worker has waited for the others at a barrier."""
        self._waited_s += 0.0 if self._pauses else seconds
        self._has_met = True

    def pause(self, now_s: float) -> None:
        """Stops the clock: the program does something else than steps, until it has resumed as often."""
        if not self._pauses:
            self._paused_s = now_s
        self._pauses += 1

    def resume(self, now_s: float) -> None:
        self._pauses -= 1
        if not self._pauses and self._stepped_s is not None:
            self._stepped_s += now_s - max(self._paused_s, self._stepped_s)

    def next(self, now_s: float, compute_s: float | None = None) -> StepTimes:
        """A step is finished."""
        step_s = None if self._stepped_s is None else now_s - self._stepped_s
        if compute_s is None:
            compute_s = self._compute_s(step_s)
        compute_ms = () if compute_s is None else (*self._times.compute_ms, compute_s * 1000)[-KEPT:]
        self._times = StepTimes(None if step_s is None else step_s * 1000, compute_ms)
        self._stepped_s, self._waited_s = now_s, 0.0
        self._has_met, self._met_before = False, self._has_met
        return self._times

    def _compute_s(self, step_s: float | None) -> float | None:
        """Only of workers that meet in every step: a barrier now and then goes with checkpoints, which are no step."""
        if step_s is None or not (self._has_met and self._met_before):
            return None
        return max(0.0, step_s - self._waited_s)


@dataclass
class AskedSteps:
    """Records the steps after which the program asks whether a checkpoint is due."""

    last: int | None = None
    stride: int = 0
    """Its distance from the one before; 0: there was none."""

    def ask(self, step: int) -> None:
        # After a recovery the steps begin at an earlier one, at the same distance.
        if self.last is not None and self.last < step:
            self.stride = step - self.last
        self.last = step
