"""The loop of a recipe: steps sent ahead (2), evaluation, early stop, saved states, resumption, export.

After each saved state the record of the run names it. A run that was killed loads that state, with the optimizer, and
computes the steps after it again. Everything that a step does follows from the recipe, the data and the step's number,
so the resumed run ends with the same weights as one that nothing disturbed. With answers drawn ahead (`pipeline`) the
steps that had begun are the same again; those after them learn from answers of other weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from strata.base import log
from strata.base.clock import SystemClock
from strata.base.digest import digest
from strata.base.errors import Code, StrataError
from strata.base.private import private_folder
from strata.fleet.client.hub_client import HubClient
from strata.sdk.checkpoints import SCHEME, delete_checkpoint, fetch_adapter, import_adapter
from strata.sdk.recipes.batches import learning_rate, save_interval, total_steps
from strata.sdk.recipes.method import ReadMetrics, StepContext, TrainingMethod
from strata.sdk.recipes.pipeline import RolloutPipeline
from strata.sdk.recipes.recipe import Recipe, RecipeEvaluation
from strata.sdk.recipes.rollouts import RolloutFile
from strata.sdk.recipes.run_folder import TASKS, TOKENIZER, BestEvaluation, MetricLine, RecipeRunRecord, RunFolder
from strata.sdk.recipes.tasks import TaskPlace, run_tasks
from strata.sdk.trackers.mirror import MirrorSettings, make_tracker
from strata.sdk.trackers.port import TrackedPoint, TrackedRun, TrackerRun
from strata.sdk.train import Future, Model, TrainingServer
from strata.train.core.router_replay import ROUTER_REPLAY
from strata.train.status.rollouts import KEEP

AHEAD: Final = 2
"""Steps that are sent before the metrics of the first are read: the ranks never wait for the client."""
STARTED: Final = "start"
"""Name of an adapter that a run imports to continue from."""
EVALUATED: Final = "evaluated"
"""Name of the weights that lm-eval samples from."""
LONGEST_NAME: Final = 64
"""Characters of a metric that a server takes."""
_logger = log.get(__name__)

ReportLine = Callable[[MetricLine], None]


@dataclass(frozen=True, kw_only=True)
class RunPlace:
    """Where a run computes, and where it keeps its files."""

    folder: RunFolder
    server: TrainingServer
    files: HubClient
    """The same server, for checkpoints as files."""
    base_model: str
    recipe_folder: Path
    """Relative paths in the recipe count from here."""


def create_model(place: RunPlace, recipe: Recipe) -> Model:
    """The model that training begins with: the same adapter whenever it is created."""
    model, metadata = recipe.model, metadata_of(recipe)
    if model.start:
        path = checkpoint_of(place.files, model.start, place.recipe_folder)
        return place.server.load_model(path, optimizer=False, user_metadata=metadata)
    return place.server.create_model(
        place.base_model,
        rank=model.rank,
        seed=recipe.train.seed,
        alpha=model.alpha,
        train_attn=model.train_attn,
        train_mlp=model.train_mlp,
        train_unembed=model.train_unembed,
        user_metadata=metadata,
    )


def metadata_of(recipe: Recipe) -> Mapping[str, str]:
    wanted = {KEEP: recipe.output.keep_rollouts, ROUTER_REPLAY: recipe.grpo.router_replay}
    return {name: "true" for name, is_wanted in wanted.items() if is_wanted}


def checkpoint_of(files: HubClient, adapter: str, folder: Path) -> str:
    """The path on the server of an adapter that may be a local folder, which is imported then."""
    if adapter.startswith(SCHEME):
        return adapter
    return import_adapter(files, local_adapter(adapter, folder), STARTED)


def local_adapter(adapter: str, folder: Path) -> Path:
    """The folder of an adapter that is not on the server."""
    return folder / Path(adapter).expanduser()


def begin_attempt(place: RunPlace, record: RecipeRunRecord) -> RecipeRunRecord:
    """Close the sessions of processes of this run that have ended, and record that of this one."""
    for session in record.sessions:
        with suppress(StrataError):
            place.server.close_session(session)
    record = msgspec.structs.replace(record, sessions=(place.server.session_id,))
    place.folder.write(record)
    return record


def plan_steps(
    place: RunPlace, recipe: Recipe, method: TrainingMethod[Any], left_out: tuple[str, ...], record: RecipeRunRecord
) -> RecipeRunRecord:
    """Returns how many steps a new run has is known when its data is, and which rows of it are left out."""
    if not record.steps:
        steps = total_steps(len(method.examples), recipe.train)
        record = msgspec.structs.replace(record, steps=steps, left_out=left_out)
        place.folder.write(record)
    return record


class RecipeTrainer:
    """Runs the steps that are left."""

    def __init__(self, place: RunPlace, recipe: Recipe, method: TrainingMethod[Any], record: RecipeRunRecord) -> None:
        self._place = place
        self._recipe = recipe
        self._method = method
        self._record = record
        self._lines = place.folder.cut_metrics(record.step if record.state else -1)
        answers = RolloutFile.open(place.folder.rollouts, record.step if record.state else None)
        self._rollouts = RolloutPipeline(answers, recipe.grpo.staleness, record.steps)
        self._superseded: list[str] = []
        """Checkpoints of best evaluations that the next record will not name."""
        self._sent: deque[tuple[int, ReadMetrics, list[Future[Mapping[str, float]]]]] = deque()
        self._model = self._open_model()
        self._tracker = self._open_tracker()

    def run(self, report: ReportLine) -> RecipeRunRecord:
        """Trains until all steps are done, or training stops early. `report` gets the metrics of each step."""
        self._report = report
        record = self._record
        if self._evaluates and not record.state:
            self._write_line(MetricLine(step=0, values=self._evaluate(0)))
        reason = self._early_stop() or self._method.stop_reason(self._steps)
        step = record.step
        while not reason and step < record.steps:
            self._send_step(step)
            step += 1
            evaluated = self._evaluation_due(step)
            saved = step % save_interval(record.steps, self._recipe.train) == 0 or step == record.steps
            self._read_steps(0 if evaluated or saved else AHEAD - 1)
            if self._method.stop_reason(self._steps):
                # Decided when all that was sent is known, as a run that continues after the saved state decides it.
                self._read_steps()
                reason = self._method.stop_reason(self._steps)
            if evaluated and not reason:
                reason = self._early_stop()
            saved = saved or bool(reason)
            if saved:
                self._save_state(step)
        outcome = self._method.outcome(self._steps)
        self._finish("; ".join(each for each in (reason or "all steps are done", outcome) if each))
        if self._tracker is not None:
            self._tracker.close()
        return self._record

    def _open_model(self) -> Model:
        if not self._record.state:
            return create_model(self._place, self._recipe)
        try:
            return self._place.server.load_model(self._record.state, user_metadata=metadata_of(self._recipe))
        except StrataError as error:
            if error.code not in (Code.INVALID, Code.NOT_FOUND, Code.GONE):
                raise
            raise StrataError(
                error.code,
                f"the server cannot load the state of step {self._record.step}: {error.message}",
                hint=f"is it the server of this run? To start over, remove {self._place.folder.path}",
            ) from error

    def _open_tracker(self) -> TrackerRun | None:
        output = self._recipe.output
        if not output.tracker:
            return None
        folder = private_folder(self._place.folder.path / "tracker")
        tracker = make_tracker(MirrorSettings(to=output.tracker, offline=output.offline, folder=folder))
        name = self._place.folder.path.name
        run = TrackedRun(id=f"{name}_{_short_id(self._record)}", name=name, config=self._record.settings)
        opened = tracker.open_run(run, len(self._lines), self._record.tracker_mark)
        # A process that was killed may not have written all that it logged.
        for number in range(opened.next_number, len(self._lines)):
            opened.log([_point(number, self._lines[number])])
        return opened

    def _send_step(self, step: int) -> None:
        train = self._recipe.train
        steps: list[Future[Mapping[str, float]]] = []

        def optimise(amount: float) -> None:
            # The gradients are sums, so the largest norm is that of a mean times what it is a mean over.
            clip = train.grad_clip_norm * amount
            rate = learning_rate(step, self._record.steps, train)
            steps.append(self._model.optim_step(rate, weight_decay=train.weight_decay, grad_clip_norm=clip))

        read = self._method.step(StepContext(self._model, step, optimise, self._rollouts))
        self._sent.append((step, read, steps))

    @property
    def _steps(self) -> list[Mapping[str, float]]:
        return [line.values for line in self._lines if line.step]

    def _read_steps(self, left: int = 0) -> None:
        while len(self._sent) > left:
            self._read_step()

    def _read_step(self) -> None:
        step, read, steps = self._sent.popleft()
        values = dict(read())
        for each in steps:
            each.result()
        values["learning_rate"] = learning_rate(step, self._record.steps, self._recipe.train)
        done = step + 1
        if self._evaluation_due(done):
            values |= self._evaluate(done)
        self._write_line(MetricLine(step=done, values=values))

    def _evaluation_due(self, step: int) -> bool:
        """Says whether to evaluate: after so many steps, and after the last one."""
        evaluation = self._recipe.eval
        if not self._evaluates or evaluation is None:
            return False
        return step % evaluation.every == 0 or step == self._record.steps

    @property
    def _evaluates(self) -> bool:
        evaluation = self._recipe.eval
        return bool(self._method.evaluation) or (evaluation is not None and bool(evaluation.tasks))

    def _evaluate(self, step: int) -> Mapping[str, float]:
        values: dict[str, float] = {}
        if self._method.evaluation:
            values |= self._method.evaluate(self._model)
            self._model.report(**values)
            self._judge(step, values[self._method.judged])
        if self._recipe.eval is not None and self._recipe.eval.tasks:
            scores = self._score_tasks(self._recipe.eval, step)
            # The first metric of each task: a server keeps few curves of a model.
            self._model.report(
                **{name[:LONGEST_NAME]: value for each in scores for name, value in list(each.items())[:1]}
            )
            values |= {name: value for each in scores for name, value in each.items()}
        return values

    def _score_tasks(self, evaluation: RecipeEvaluation, step: int) -> Sequence[Mapping[str, float]]:
        place, folder = self._place, self._place.folder
        path = self._model.save_for_sampling(EVALUATED, overwrite=True).result()
        try:
            needed = TaskPlace(place.server.calls, folder.path / TOKENIZER, place.recipe_folder)
            return run_tasks(evaluation, needed, path, folder.path / TASKS / f"step-{step}")
        finally:
            self._delete(path)

    def _judge(self, step: int, value: float) -> None:
        """Notes whether this evaluation is the best one, whose weights are exported if training may stop early."""
        evaluation, best = self._recipe.eval, self._record.best
        assert evaluation is not None
        gain = 0.0 if best is None else value - best.value if self._method.higher_is_better else best.value - value
        if best is not None and not gain > evaluation.min_delta:
            self._record = msgspec.structs.replace(self._record, bad_evaluations=self._record.bad_evaluations + 1)
            return
        path = self._model.save(f"best-{step}", overwrite=True).result() if evaluation.patience else ""
        if best is not None and best.path:
            self._superseded.append(best.path)
        self._record = msgspec.structs.replace(self._record, best=BestEvaluation(step, value, path), bad_evaluations=0)

    def _early_stop(self) -> str:
        """Says why training stops before its last step; empty if it goes on."""
        evaluation, best = self._recipe.eval, self._record.best
        if evaluation is None or best is None or not 0 < evaluation.patience <= self._record.bad_evaluations:
            return ""
        return f"no improvement since step {best.step}"

    def _save_state(self, step: int) -> None:
        before = [self._record.state] if self._record.state else []
        state = self._model.save(f"step-{step}", overwrite=True).result()
        mark = self._tracker.mark() if self._tracker is not None else ""
        self._record = msgspec.structs.replace(self._record, step=step, state=state, tracker_mark=mark)
        self._place.folder.write(self._record)
        self._rollouts.clear()
        for path in [*before, *self._superseded]:
            if path != state:
                self._delete(path)
        self._superseded.clear()

    def _delete(self, path: str) -> None:
        """A state that no record names any more. One that stays only takes room."""
        try:
            delete_checkpoint(self._place.files, path)
        except StrataError as error:
            _logger.warning("state_not_deleted", path=path, error=error.message)

    def _finish(self, reason: str) -> None:
        best = self._record.best
        exported = best.path if best is not None and best.path else self._record.state
        adapter = self._place.folder.adapter
        if not adapter.exists():
            self._export(exported, adapter)
        self._record = msgspec.structs.replace(self._record, finished=reason, exported=exported)
        self._place.folder.write(self._record)

    def _export(self, path: str, adapter: Path) -> None:
        try:
            fetch_adapter(self._place.files, path, adapter)
        except StrataError as error:
            if error.code not in (Code.NOT_FOUND, Code.GONE) or path == self._record.state:
                raise
            best = self._record.best
            assert best is not None, "only the best evaluation has a checkpoint beside the state"
            raise StrataError(
                error.code,
                f"the server has lost the checkpoint of the best evaluation, after step {best.step}: {error.message}",
                hint=f"the server has the last state still: strata weights export {self._record.state} ./adapter",
            ) from error

    def _write_line(self, line: MetricLine) -> None:
        self._lines.append(line)
        self._place.folder.append_metrics(line)
        if self._tracker is not None and len(self._lines) > self._tracker.next_number:
            self._tracker.log([_point(len(self._lines) - 1, line)])
        self._report(line)


def _point(number: int, line: MetricLine) -> TrackedPoint:
    return TrackedPoint(number, line.step, SystemClock().wall_s(), line.values)


def _short_id(record: RecipeRunRecord) -> str:
    return digest(record.settings).removeprefix("sha256:")[:12]
