"""Answers that are drawn ahead, with kills at every moment: each step learns once, from answers of weights that the run
itself has learned, and that are not too old.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.sdk.operations import Sample
from strata.sdk.recipes.pipeline import DrawStep, RolloutPipeline, due_draws
from strata.sdk.recipes.rollouts import Groups, PromptRow, Rollout, RolloutFile

PROMPTS = [PromptRow([1], {})]


class Killed(Exception):  # noqa: N818 (it is no error)
    pass


@dataclass(frozen=True)
class Learned:
    """A step in the weights: its number, and which draw it learned from."""

    step: int
    draw: int


Weights = tuple[Learned, ...]


@dataclass
class Run:
    """A run whose weights are the list of what they have learned; what outlives a kill is in the fields."""

    folder: Path
    steps: int
    max_staleness: int
    save_every: int
    kills: list[int]
    """After how many moments each process is killed."""
    torn: bool
    """Whether a kill leaves the last line of the journal without its end."""
    state: Weights | None = None
    drawn_by: dict[int, Weights] = field(default_factory=dict)
    """The weights of each draw."""
    handed_out: dict[int, int] = field(default_factory=dict)
    """Which draw each step after the state has learned from."""

    def finish(self) -> Weights:
        while True:
            self._left = self.kills.pop(0) if self.kills else None
            try:
                return self._attempt()
            except Killed:
                if self.state is None:
                    self.handed_out.clear()
                if self.torn and self._file.exists():
                    self._file.write_bytes(self._file.read_bytes()[:-1])
                    self.handed_out.pop(max(self.handed_out, default=-1), None)

    @property
    def _file(self) -> Path:
        return self.folder / "rollouts.jsonl"

    def _moment(self) -> None:
        if self._left is not None:
            if not self._left:
                raise Killed
            self._left -= 1

    def _attempt(self) -> Weights:
        first = None if self.state is None else len(self.state)
        file = RolloutFile.open(self._file, first)
        pipeline = RolloutPipeline(file, self.max_staleness, self.steps)
        weights = self.state or ()
        for step in range(first or 0, self.steps):
            self._moment()
            groups, staleness = pipeline.take(step, PROMPTS, partial(self._copy, weights))
            draw = groups[0][0].sample.tokens[0]
            assert self.handed_out.setdefault(step, draw) == draw, "a step that had begun learns from other answers"
            assert staleness == step - len(self.drawn_by[draw])
            self._moment()
            weights = (*weights, Learned(step, draw))
            self._moment()
            if (step + 1) % self.save_every == 0:
                self.state = weights
                self.handed_out.clear()
                self._moment()
                pipeline.clear()
        return weights

    def _copy(self, weights: Weights) -> DrawStep:
        def draw_step(step: int) -> Groups:
            with _NUMBERING:
                number = len(self.drawn_by)
                self.drawn_by[number] = weights
            return answers(number)

        return draw_step


_NUMBERING = threading.Lock()


def answers(number: int) -> Groups:
    return [[Rollout(prompt, Sample([number], [0.0], "stop"))] for prompt in PROMPTS]


@settings(max_examples=200, deadline=None)
@given(
    steps=st.integers(1, 9),
    max_staleness=st.integers(0, 4),
    save_every=st.integers(1, 4),
    kills=st.lists(st.integers(0, 30), max_size=6),
    torn=st.booleans(),
)
def test_each_step_learns_once_from_answers_of_its_own_run(
    steps: int, max_staleness: int, save_every: int, kills: list[int], torn: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), steps, max_staleness, save_every, kills, torn)
        weights = run.finish()
    assert [each.step for each in weights] == list(range(steps))
    assert len({each.draw for each in weights}) == steps, "a draw was learned from twice"
    for each in weights:
        drawn_by = run.drawn_by[each.draw]
        assert 0 <= each.step - len(drawn_by) <= max_staleness
        assert weights[: len(drawn_by)] == drawn_by, "weights that the run has lost drew it"


def test_draws_reach_as_far_as_the_bound_and_the_run() -> None:
    assert due_draws(0, 0, 9, ()) == [0]
    assert due_draws(0, 2, 9, ()) == [0, 1, 2]
    assert due_draws(1, 2, 9, {1, 2}) == [3]
    assert due_draws(7, 2, 9, {7, 8}) == []


def test_the_draws_of_coming_steps_run_beside_that_of_this_one(tmp_path: Path) -> None:
    together = threading.Barrier(3)

    def draw_step(step: int) -> Groups:
        together.wait(60)
        return answers(step)

    pipeline = RolloutPipeline(RolloutFile.open(tmp_path / "rollouts.jsonl", None), 2, 3)
    assert pipeline.take(0, PROMPTS, lambda: draw_step) == (answers(0), 0)
    assert pipeline.take(1, PROMPTS, lambda: draw_step) == (answers(1), 1)


def failing(error: Exception) -> Callable[[], DrawStep]:
    def draw_step(step: int) -> Groups:
        raise error

    return lambda: draw_step


def test_a_draw_that_fails_ends_its_step_with_the_reason(tmp_path: Path) -> None:
    pipeline = RolloutPipeline(RolloutFile.open(tmp_path / "rollouts.jsonl", None), 1, 9)
    with pytest.raises(StrataError, match="it was evicted"):
        pipeline.take(0, PROMPTS, failing(StrataError(Code.NOT_FOUND, "it was evicted")))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_draw_with_a_defect_does_not_hold_its_step_up(tmp_path: Path) -> None:
    pipeline = RolloutPipeline(RolloutFile.open(tmp_path / "rollouts.jsonl", None), 0, 9)
    with pytest.raises(StrataError, match="drawing for step 1 failed") as raised:
        pipeline.take(0, PROMPTS, failing(ZeroDivisionError()))
    assert raised.value.code is Code.INTERNAL
