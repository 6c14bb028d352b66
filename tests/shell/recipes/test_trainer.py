"""Which checkpoints a run leaves on its server, with ranks that pretend."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.fleet.client.hub_client import HubClient
from strata.sdk.operations import Datum
from strata.sdk.recipes.method import Metrics, ReadMetrics, StepContext, TrainingMethod, read_after
from strata.sdk.recipes.recipe import Recipe, RecipeData, RecipeEvaluation, RecipeTraining
from strata.sdk.recipes.run_folder import RecipeRunRecord, RunFolder
from strata.sdk.recipes.trainer import RecipeTrainer, RunPlace, begin_attempt, plan_steps
from strata.sdk.train import Model, TrainingServer
from tests.shell.train_api.test_protocol import BASE, Server, listening, served

DATUM = Datum([1, 2], [2, 3])
RECIPE = Recipe(kind="sft", data=RecipeData(path="x"), eval=RecipeEvaluation(path="y", every=1, patience=9))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with served(tmp_path) as found:
        yield found


@dataclass(frozen=True)
class ScriptedMethod(TrainingMethod[Datum]):
    """Trains on one datum, and evaluates to these values, one after the other."""

    values: Sequence[float]
    evaluated: Callable[[Model, int], None] = lambda model, number: None
    examples: Sequence[Datum] = field(default=(DATUM,), kw_only=True)
    evaluation: Sequence[Datum] = field(default=(DATUM,), kw_only=True)
    recipe: Recipe = field(default=RECIPE, kw_only=True)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def step(self, context: StepContext) -> ReadMetrics:
        done = context.model.forward_backward(self.examples)
        context.optimise(1)
        return read_after([done], {})

    def evaluate(self, model: Model) -> Metrics:
        number = next(self.numbers)
        self.evaluated(model, number)
        return {self.judged: self.values[number]}


def run_recipe(folder: Path, url: str, key: str, method: ScriptedMethod, *, exported: bool) -> RecipeRunRecord:
    train = RecipeTraining(steps=len(method.values) - 1, save_every=2)
    recipe = msgspec.structs.replace(RECIPE, train=train)
    run = RunFolder(folder)
    record = run.open_run({})
    if exported:
        # What these ranks save cannot be exported: the run finds an adapter, as if it was killed after the export.
        run.adapter.mkdir()
    with TrainingServer(url, key) as server, HubClient(url, bearer=Secret(key)) as files:
        place = RunPlace(folder=run, server=server, files=files, base_model=BASE, recipe_folder=folder)
        record = plan_steps(place, recipe, method, (), begin_attempt(place, record))
        return RecipeTrainer(place, recipe, method, record).run(lambda line: None)


async def test_only_the_last_state_and_the_best_evaluation_stay(server: Server, tmp_path: Path) -> None:
    method = ScriptedMethod([9.0, 8.0, 7.0, 6.0, 6.5, 5.0, 5.5])
    async with listening(server.root) as url:
        record = await asyncio.to_thread(run_recipe, tmp_path / "run", url, server.alice.key, method, exported=True)
    assert record.best is not None
    assert record.best.step == 5
    assert record.exported == record.best.path
    kept = {each["tinker_path"] for each in (await server.alice.get("checkpoints"))["checkpoints"]}
    assert kept == {record.state, record.best.path}


async def test_a_best_evaluation_that_the_server_has_lost_is_named(server: Server, tmp_path: Path) -> None:
    def lose_best(model: Model, number: int) -> None:
        if number == 2:
            target = f"/api/v1/training_runs/{model.model_id}/checkpoints/weights/best-1"
            with HubClient(url, bearer=Secret(server.alice.key)) as client:
                client.request("DELETE", target, None, "", None, None)

    method = ScriptedMethod([9.0, 8.0, 8.5], lose_best)
    async with listening(server.root) as url:
        with pytest.raises(StrataError, match="has lost the checkpoint of the best evaluation, after step 1") as raised:
            await asyncio.to_thread(run_recipe, tmp_path / "run", url, server.alice.key, method, exported=False)
    assert raised.value.code is Code.NOT_FOUND
    assert "weights/step-2 ./adapter" in (raised.value.hint or "")
