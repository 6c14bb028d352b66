"""Which answers are drawn while the ranks train: `RolloutPipeline` requests those of coming steps from the weights as
they are, and gives each step its own once.

At most `max_staleness` steps lie between the weights that draw an answer and those that learn from it; 0 is on policy.
Steps learn in their order, whichever draw is done first: the answers that take longest are not learned last. The
answers of a step are journaled when it begins, before anything is learned from them. So a run that was killed has no
step in its journal without those before it, and what it draws anew comes from weights that it has learned itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from contextvars import copy_context

from strata.base.errors import Code, StrataError
from strata.sdk.recipes.rollouts import Groups, PromptRow, RolloutFile

DrawStep = Callable[[int], Groups]
CopyWeights = Callable[[], DrawStep]
"""Copies the weights as they are after the steps that were sent; what it returns draws one step with the copy."""


def due_draws(step: int, max_staleness: int, steps: int, begun: Container[int]) -> list[int]:
    """The steps to draw for when `step` steps were sent: as far ahead as the bound allows, without those begun."""
    return [each for each in range(step, min(step + max_staleness + 1, steps)) if each not in begun]


class RolloutPipeline:
    def __init__(self, file: RolloutFile, max_staleness: int, steps: int) -> None:
        self._file = file
        self._max_staleness = max_staleness
        self._steps = steps
        self._draws: dict[int, _Draw] = {}

    def take(self, step: int, prompts: Sequence[PromptRow], copy_weights: CopyWeights) -> tuple[Groups, int]:
        """Returns the answers of the next step, and how many steps the weights lacked that drew them.

        Before it waits for them it requests those of the steps after it.
        """
        begun = {*self._draws, *self._file.steps}
        for each in due_draws(step, self._max_staleness, self._steps, begun):
            self._draws[each] = _Draw(copy_weights(), each, step)
        if (draw := self._draws.pop(step, None)) is not None:
            self._file.keep(step, draw.result(), draw.drawn_at)
        groups, drawn_at = self._file.take(step, prompts)
        return groups, step - drawn_at

    def clear(self) -> None:
        """Forget what is journaled: a saved state has what was learned from it."""
        self._file.clear()


class _Draw(threading.Thread):
    """A draw under way. It holds up no exit: a client that stops need not wait for long answers."""

    def __init__(self, draw_step: DrawStep, step: int, drawn_at: int) -> None:
        super().__init__(name=f"draw-{step}", daemon=True)
        self.drawn_at = drawn_at
        # A defect's exception goes to the thread's hook; the waiting step must get an error all the same.
        self._outcome: Groups | StrataError = StrataError(
            Code.INTERNAL, f"drawing for step {step + 1} failed; standard error has the reason"
        )
        self._draw = lambda: draw_step(step)
        self._context = copy_context()
        self.start()

    def run(self) -> None:
        try:
            self._outcome = self._context.run(self._draw)
        except StrataError as error:
            self._outcome = error

    def result(self) -> Groups:
        self.join()
        if isinstance(self._outcome, StrataError):
            raise self._outcome
        return self._outcome
