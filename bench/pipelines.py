"""Learning from answers that are drawn ahead: `python -m bench pipelines`.

The recipe of examples/recipes/grpo.toml, whose answers are digits of sums, through a whole server with one rank and the
built-in sampler, three seeds for each pipeline. The pipelines take turns, seed by seed. Bare is the same run with
`pipeline = "synchronous"`.

- `pipelines.one-step-off`, `pipelines.bounded`, `pipelines.in-flight`: steps in a minute, from the third one to the
  last; `bounded` and `in-flight` with `max_staleness = 2`, the default.
- `….drawing`: the share of this time in which at least one sample request is outstanding.
- `….reward`: the mean reward of the last quarter of the steps, seed by seed.
- `pipelines.waiting.…`: steps in a minute if a reward takes a while, as one that runs a program or calls a service.

The rank trains and samples by turns, so nothing but the work of clients can overlap here. With inference engines on
other devices both go on at once, which this bench does not show. Nobody asked for a goal.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Final

import msgspec

from bench.interleave import Comparison
from bench.report import Report
from bench.train.processes import served
from bench.train.protocol import Server
from strata.base.secret import Secret
from strata.sdk.fleet import ClientSettings
from strata.sdk.recipes.connection import open_connection
from strata.sdk.recipes.prepare import OpenedParts, make_method, read_recipe_rows
from strata.sdk.recipes.recipe import Recipe, RecipeReinforcement, read_recipe
from strata.sdk.recipes.reinforcement import ReinforcementTraining
from strata.sdk.recipes.rendering import Renderer
from strata.sdk.recipes.rewards import Reward
from strata.sdk.recipes.rollouts import DrawGroups, Groups, PromptRow
from strata.sdk.recipes.rows import Row
from strata.sdk.recipes.run_folder import MetricLine, RunFolder
from strata.sdk.recipes.trainer import RecipeTrainer, RunPlace, begin_attempt, plan_steps
from strata.sdk.train import Sampler
from strata.train.runner.model.tiny import TinyModel, make

EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "recipes" / "grpo.toml"
SYNCHRONOUS: Final = "synchronous"
PIPELINES: Final = {
    SYNCHRONOUS: RecipeReinforcement(),
    "one-step-off": RecipeReinforcement(pipeline="one-step-off"),
    "bounded": RecipeReinforcement(pipeline="bounded"),
    "in-flight": RecipeReinforcement(pipeline="in-flight"),
}
FILLED: Final = max(each.staleness for each in PIPELINES.values())
"""Steps until each pipeline draws one step for each that learns; before that the first weights draw several."""
REWARD_S: Final = 0.002
"""What a reward takes that is waited for."""
SETTINGS: Final = """
[server]
port = 0
data = "{folder}/d"
log_level = "warning"
[model]
path = "{folder}/model"
[ranks]
nproc = 1
threads = 1
"""


@dataclass(frozen=True)
class Turns:
    seeds: Sequence[int]
    steps: int
    waiting_steps: int


QUICK: Final = Turns(seeds=(1,), steps=8, waiting_steps=6)
LONG: Final = Turns(seeds=(1, 2, 3), steps=18, waiting_steps=10)
"""Later steps have nothing to learn: all answers to a prompt are the same by then."""


@dataclass(frozen=True)
class TimedRun:
    steps_per_minute: float
    drawing: float
    reward: float
    staleness: float


@dataclass(frozen=True)
class TimedDraws:
    """Draws, and when they were under way."""

    draw: DrawGroups
    spans: list[tuple[float, float]] = field(default_factory=list)

    def __call__(self, sampler: Sampler, prompts: Sequence[PromptRow], step: int) -> Groups:
        started = perf_counter()
        groups = self.draw(sampler, prompts, step)
        self.spans.append((started, perf_counter()))
        return groups

    def share(self, since: float, until: float) -> float:
        """The share of this time in which at least one was under way."""
        covered, reached = 0.0, since
        for started, ended in sorted(self.spans):
            begins, ends = max(started, reached), min(ended, until)
            covered += max(0.0, ends - begins)
            reached = max(reached, ends)
        return covered / (until - since)


async def run(report: Report, *, quick: bool) -> None:
    turns = QUICK if quick else LONG
    # A short path: Unix sockets lie below it.
    folder = Path(tempfile.mkdtemp(prefix="strata-bench-"))
    try:
        await asyncio.to_thread(make, folder / "model", TinyModel())
        async with served(folder, SETTINGS.format(folder=folder)) as server:
            found: dict[str, list[TimedRun]] = {name: [] for name in PIPELINES}
            for seed in turns.seeds:
                # Each goes first as often as the others.
                order = [*PIPELINES][seed % len(PIPELINES) :] + [*PIPELINES][: seed % len(PIPELINES)]
                for name in order:
                    recipe = recipe_of(name, seed, turns.steps)
                    found[name].append(await asyncio.to_thread(train, server, folder, recipe, 0.0))
                    report.progress(f"{name}, seed {seed}, {turns.steps} steps: {found[name][-1]}")
            add_runs(report, "pipelines", found)
            waiting = {
                name: [
                    await asyncio.to_thread(train, server, folder, recipe_of(name, 1, turns.waiting_steps), REWARD_S)
                ]
                for name in PIPELINES
            }
            add_rates(report, "pipelines.waiting", waiting)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)


def add_runs(report: Report, case: str, found: dict[str, list[TimedRun]]) -> None:
    add_rates(report, case, found)
    bare = found[SYNCHRONOUS]
    for name, runs in found.items():
        if name != SYNCHRONOUS:
            drawing = Comparison([each.drawing for each in runs], [each.drawing for each in bare])
            report.add(f"{case}.{name}.drawing", "share", drawing)
            rewards = Comparison([each.reward for each in runs], [each.reward for each in bare])
            shown = [", ".join(f"{each:.3f}" for each in side) for side in (rewards.ours, rewards.bare)]
            report.add(f"{case}.{name}.reward", "reward", rewards, note=" beside ".join(shown))


def add_rates(report: Report, case: str, found: dict[str, list[TimedRun]]) -> None:
    bare = [each.steps_per_minute for each in found[SYNCHRONOUS]]
    for name, runs in found.items():
        if name != SYNCHRONOUS:
            rates = Comparison([each.steps_per_minute for each in runs], bare)
            note = f"staleness {fmean(each.staleness for each in runs):.2f} steps in the mean"
            report.add(f"{case}.{name}", "steps/min", rates, note=note)


def recipe_of(name: str, seed: int, steps: int) -> Recipe:
    example = read_recipe(EXAMPLE)
    train = msgspec.structs.replace(example.train, seed=seed, steps=steps, save_every=steps)
    return msgspec.structs.replace(example, train=train, eval=None, grpo=PIPELINES[name])


def train(server: Server, folder: Path, recipe: Recipe, reward_s: float) -> TimedRun:
    """A run in a folder of its own."""
    run = RunFolder(Path(tempfile.mkdtemp(prefix="run-", dir=folder)))
    rows = read_recipe_rows(recipe, EXAMPLE.parent, _fetch_nothing)
    lines: list[tuple[float, MetricLine]] = []
    with open_connection(ClientSettings(url=server.url, token=Secret(server.key))) as connection:
        place = RunPlace(
            folder=run,
            server=connection.server,
            files=connection.files,
            base_model=connection.base_models[0],
            recipe_folder=EXAMPLE.parent,
        )
        record = begin_attempt(place, run.open_run(rows.settings))
        prepared = make_method(recipe, rows, Renderer.load(folder / "model"), place, OpenedParts())
        method = prepared.method
        assert isinstance(method, ReinforcementTraining)
        draws = TimedDraws(method.draw)
        timed = replace(method, draw=draws, reward=slowed(method.reward, reward_s))
        record = plan_steps(place, recipe, timed, prepared.left_out, record)
        RecipeTrainer(place, recipe, timed, record).run(lambda line: lines.append((perf_counter(), line)))
    (first, _), (last, _) = lines[FILLED], lines[-1]
    values = [line.values for _, line in lines]
    return TimedRun(
        steps_per_minute=60 * (len(lines) - 1 - FILLED) / (last - first),
        drawing=draws.share(first, last),
        reward=fmean(each["reward"] for each in values[-max(1, len(values) // 4) :]),
        staleness=fmean(each.get("staleness", 0.0) for each in values),
    )


def slowed(reward: Reward, seconds: float) -> Reward:
    def slow(text: str, row: Row) -> float:
        if seconds:
            time.sleep(seconds)
        return reward(text, row)

    return slow


def _fetch_nothing(path: str) -> bytes:
    raise FileNotFoundError(path)
