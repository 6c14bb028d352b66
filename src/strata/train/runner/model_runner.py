"""ModelRunner: what every rank does with a command. All ranks get the same commands in the same order.

Whatever can fail for a reason of the request (its shape, a name, a file) fails before the ranks begin to communicate,
and on all of them together (`Ranks.in_step`). A failure in the midst of the arithmetic, where the others may already
wait in a collective, ends the process instead: the group starts anew, from the last snapshot.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final, TypeVar, assert_never

import torch

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.train.checkpoints.checkpoint import Manifest
from strata.train.core import commands, ops
from strata.train.runner import saving, snapshot, snapshot_files, weights
from strata.train.runner.asleep import Asleep
from strata.train.runner.lora import Adapter, targets_of
from strata.train.runner.memory import RowMemory
from strata.train.runner.model import DTYPES, checked_base
from strata.train.runner.passes import PassRunner, Times
from strata.train.runner.ranks import Ranks
from strata.train.runner.rows import RankPass, RankReport, Refused, failed
from strata.train.runner.sampling.sampler import Sampler
from strata.train.runner.sampling.terms import SamplerLimits
from strata.train.runner.settings import RunnerSettings
from strata.train.runner.slots import Slots
from strata.train.runner.snapshot_files import Copied, SnapshotWriter
from strata.train.runner.trained import AdapterModel, Trained, WholeModel, local, sharded

Single = commands.SaveState | commands.LoadState | commands.Manage | commands.MakeSampler
Executed = commands.Steps | Single
Whole = Executed | commands.TakeSnapshot | commands.Restore
"""Work that every rank gets whole."""
MOST_SAMPLERS: Final = 1 << 20
"""The orchestrator decides who makes room for whom; what it was once told to open is opened again after a restart."""
Made = TypeVar("Made")
Managed = ops.CreateModel | ops.UnloadModel | ops.AbortGradients | ops.Sleep | ops.Wake


class ModelRunner:
    def __init__(self, settings: RunnerSettings, ranks: Ranks) -> None:
        self.settings = settings
        self.ranks = ranks
        self.base = checked_base(settings, ranks)
        self.memory = RowMemory(self.base, ranks, settings.sleep_folder / f"rank-{ranks.rank}.row")
        self.models: dict[str, Trained] = {}
        self._asleep: Asleep | None = None
        self._touched = False
        """Whether the weights of the base are still those of its folder."""
        # Before anything is trained: it tries out whether it computes as the base does, which has no adapter yet.
        self.sampler = Sampler(
            self.base,
            ranks,
            SamplerLimits(
                sequences=settings.sequences,
                cached_tokens=settings.cached_tokens,
                samplers=MOST_SAMPLERS,
                requests=MOST_SAMPLERS,
            ),
        )
        self._passes = PassRunner(self.base, ranks, self.models, self.memory)
        self._slots = Slots(
            self.models,
            settings.sleep_folder / f"rank-{ranks.rank}-idle",
            slots=settings.slots,
            in_memory=settings.models_in_memory,
        )
        self.snapshots = SnapshotWriter(ranks.rank, settings.snapshot_timeout_s)

    @property
    def times(self) -> Times:
        """Of the last pass."""
        return self._passes.times

    def execute(self, work: Executed) -> list[ops.Result]:
        """Do it, on all ranks together: a result of each operation."""
        if isinstance(work, commands.Steps):
            return self._steps(work.operations)
        return [_tried(partial(self._execute, work))]

    def _steps(self, operations: Sequence[ops.OptimStep]) -> list[ops.Result]:
        """All are begun before the first is ended: the sums of those behind it travel while it computes."""
        if self._asleep is not None:
            return [failed(_ASLEEP.code, str(_ASLEEP)) for _ in operations]
        self._slots.use(each.model_id for each in operations if each.model_id in self.models)
        # Also without a gradient: weights decay.
        self._touched = True
        begun = [_tried(partial(self._start_step, each)) for each in operations]
        return [each if isinstance(each, ops.Failed) else _tried(each) for each in begun]

    def _start_step(self, operation: ops.OptimStep) -> Callable[[], ops.StepDone]:
        step = self._known(operation.model_id).start_step(operation.adam)
        return lambda: ops.StepDone(step().metrics)

    def _execute(self, work: Single) -> ops.Result:
        if self._asleep is not None and not _may_sleep(work):
            raise _ASLEEP
        match work:
            case commands.SaveState(operation, path):
                return self.save(operation, Path(path))
            case commands.LoadState(operation, path):
                return self.load(operation, Path(path))
            case commands.MakeSampler(making, path, close):
                return self.make_sampler(making, Path(path), close)
            case commands.Manage(operation):
                return self._manage(operation)
            case _:
                assert_never(work)

    def _manage(self, operation: Managed) -> ops.Result:
        match operation:
            case ops.CreateModel():
                return self.create_model(operation)
            case ops.UnloadModel(model_id):
                return self.unload(model_id)
            case ops.AbortGradients(model_id):
                self._known(model_id).abort()
                return ops.GradientsAborted()
            case ops.Sleep():
                return self.sleep()
            case ops.Wake():
                return self.wake()
            case _:
                assert_never(operation)

    def forward_backward(self, work: RankPass) -> RankReport:
        """This rank's rows of a pass; the report is put together on rank 0."""
        if self._asleep is not None:
            return RankReport((), [Refused(item, -1, _ASLEEP.code, str(_ASLEEP)) for item in range(len(work.items))])
        self._touched = self._touched or self.settings.full
        self._slots.use(item.model_id for item in work.items if item.model_id in self.models)
        return self._passes.run(work)

    def create_model(self, operation: ops.CreateModel) -> ops.ModelCreated:
        """The same again is the same model: a create that is told twice resets nothing."""
        if operation.model_id in self.models:
            raise StrataError(Code.CONFLICT, f"there is a model {operation.model_id!r} already")
        if len(self.models) >= (1 if self.settings.full else self.settings.max_models):
            raise StrataError(Code.EXHAUSTED, f"all {len(self.models)} places for models are taken; unload one first")
        model = self._whole(operation) if self.settings.full else self._adapter(operation)
        self.models[operation.model_id] = model
        self._slots.use([operation.model_id])
        return ops.ModelCreated(operation.model_id)

    def _adapter(self, operation: ops.CreateModel) -> AdapterModel:
        lora = operation.lora
        if lora is None:
            raise StrataError(Code.INVALID, "this server trains adapters: give a lora_config")
        if not 1 <= lora.rank <= self.settings.max_lora_rank or not (math.isfinite(lora.alpha) and lora.alpha > 0):
            raise StrataError(Code.INVALID, f"rank must be 1 to {self.settings.max_lora_rank}, and alpha above 0")
        adapter = Adapter(lora, targets_of(self.base.lm, lora), self.ranks.device)
        # A model without a seed has one all the same, its name: told again after a restart, it begins the same.
        seed = f"seed/{lora.seed}" if lora.seed is not None else f"model/{operation.model_id}"
        adapter.initialise(hashlib.sha256(seed.encode()).hexdigest())
        return AdapterModel(operation, adapter, self.ranks)

    def _whole(self, operation: ops.CreateModel) -> WholeModel:
        if operation.lora is not None:
            raise StrataError(Code.INVALID, "this server trains the whole model: it takes no lora_config")
        model = WholeModel(operation, self.base.packed, self.ranks)
        if self._touched:
            with self.ranks.in_step():
                found = weights.whole_weights(self.settings.model, model)
            weights.put_whole(found, model)
            self._touched = False
        return model

    def unload(self, model_id: str) -> ops.ModelUnloaded:
        self._known(model_id).abort()
        self._slots.forget(model_id)
        del self.models[model_id]
        return ops.ModelUnloaded(model_id)

    def save(self, operation: ops.SaveWeights, folder: Path) -> ops.WeightsSaved:
        model = self._model(operation.model_id)
        manifest = Manifest(
            model_id=operation.model_id,
            seq_id=operation.seq_id,
            kind=operation.kind,
            base_model=self.base.info().name,
            arch=self.base.arch,
            lora=model.created.lora,
            steps=model.optimizer.steps,
            user_metadata=operation.user_metadata,
        )
        saving.save(folder, manifest, model, self.base, self.ranks, overwrite=operation.overwrite)
        return ops.WeightsSaved(f"tinker://{operation.model_id}/{operation.kind}/{operation.name}")

    def load(self, operation: ops.LoadWeights, folder: Path) -> ops.WeightsLoaded:
        """Weights, and the optimizer if asked for (else it begins anew). Gradients that wait for a step are dropped."""
        model = self._model(operation.model_id)
        put = saving.load(folder, model, self.base, self.ranks, optimizer=operation.optimizer)
        self._touched = True
        put()
        return ops.WeightsLoaded(f"tinker://{operation.run_id}/{operation.kind}/{operation.name}")

    def make_sampler(
        self, operation: ops.SaveSampler | ops.OpenSampler, folder: Path, close: Sequence[str]
    ) -> ops.SamplerOpened:
        sampler, sampler_id = self.sampler, operation.sampler_id
        for other in close:
            if other in sampler:
                sampler.close(other)
        if isinstance(operation, ops.SaveSampler):
            model = self._model(operation.model_id)
            if isinstance(model, AdapterModel):
                sampler.open_adapter(sampler_id, model.adapter)
            else:
                sampler.open_whole(sampler_id)
        elif operation.weights is None:
            sampler.open_base(sampler_id)
        else:
            self._open_saved(sampler, sampler_id, folder)
        return ops.SamplerOpened(sampler_id)

    def _open_saved(self, sampler: Sampler, sampler_id: str, folder: Path) -> None:
        found = saving.open_weights(folder, self.base, self.ranks)
        if isinstance(found, Adapter):
            sampler.open_adapter(sampler_id, found)
        else:
            sampler.open_whole(sampler_id, found)

    def take_snapshot(self, number: int, folder: Path) -> ops.Failed | None:
        """Copy everything; it is written while training goes on. The time until this returns is all that it costs."""
        started_s = perf_counter()
        copy: Copied | None = None
        try:
            with self.ranks.in_step():
                self.snapshots.check_free()
                if self._asleep is not None:
                    raise _ASLEEP
                failpoint("train.snapshot.before_copy")
                copy = snapshot.copied(self._manifest(), self._slots.each(), self._kept(), first=self.ranks.first)
        except StrataError as error:
            return failed(error.code, str(error))
        assert copy is not None
        failpoint("train.snapshot.copied")
        self.snapshots.start(number, folder, copy, perf_counter() - started_s)
        return None

    def restore(self, folder: Path, digest: str) -> None:
        """Begin where the snapshot was taken. An error leaves these ranks as they are, which is as they began."""
        ranks = self.ranks
        with ranks.in_step():
            manifest = snapshot_files.read_manifest(folder, digest)
            snapshot.check_base(manifest, self._manifest())
            snapshot_files.verify(folder, manifest, rank=ranks.rank, ranks=ranks.size)
        failpoint("train.snapshot.before_restore")
        models: dict[str, Trained] = {}
        puts: list[Callable[[], None]] = []
        with ranks.in_step():
            opened = snapshot.Opened(folder, manifest, rank=ranks.rank, ranks=ranks.size)
            for place, part in enumerate(manifest.models):
                created = part.created
                full = self.settings.full
                model = WholeModel(created, self.base.packed, ranks) if full else self._adapter(created)
                models[created.model_id] = model
                puts.append(snapshot.restorer(opened, place, part.steps, model))
            puts += [self._reopened(opened, place, part) for place, part in enumerate(manifest.samplers)]
        failpoint("train.snapshot.before_put")
        for put in puts:
            put()
        # The same dictionary as before: the passes look into it.
        self.models.update(models)
        for name in models:
            self._slots.use([name])
        self._touched = manifest.touched

    def _reopened(self, opened: snapshot.Opened, place: int, part: snapshot_files.SamplerPart) -> Callable[[], None]:
        self.sampler.check_architecture()
        match part.kind:
            case "base":
                return lambda: self.sampler.open_base(part.sampler_id)
            case "adapter":
                lora = snapshot.lora_of(part)
                adapter = Adapter(lora, targets_of(self.base.lm, lora), self.ranks.device)
                snapshot.sampled_from(opened, place, adapter)
                return lambda: self.sampler.open_adapter(part.sampler_id, adapter)
            case "whole":
                live, dtype = dict(sharded(self.base.packed)), DTYPES[self.settings.dtype]
                found = snapshot.sampled_whole(opened, place, live, dtype)
                return lambda: self.sampler.open_whole(part.sampler_id, found)

    def _manifest(self) -> snapshot_files.Manifest:
        base = self.base.info()
        return snapshot_files.Manifest(
            base_model=base.name,
            arch=base.arch,
            parameters=base.parameters,
            full=base.full,
            ranks=self.ranks.size,
            touched=self._touched,
            models=snapshot.parts_of(list(self.models.values())),
            samplers=[each.part for each in self._kept()],
        )

    def _kept(self) -> list[snapshot.Kept]:
        return [snapshot.Kept(*each) for each in self.sampler.kept()]

    def sleep(self) -> ops.Asleep:
        """Asleep already is asleep: nothing more is freed."""
        if self._asleep is not None:
            return ops.Asleep(0)
        file = self.settings.sleep_folder / f"rank-{self.ranks.rank}-{os.getpid()}.safetensors"
        asleep: Asleep | None = None
        try:
            with self.ranks.in_step():
                asleep = Asleep(self._tensors(), file)
        except StrataError:
            if asleep is not None:
                asleep.wake()
            raise
        self._asleep = asleep
        return ops.Asleep(sum(self.ranks.numbers(asleep.freed)))

    def wake(self) -> ops.Awake:
        """A rank that cannot get its weights back has lost them: it dies, and the group starts anew."""
        if self._asleep is not None:
            self._asleep.wake()
            self._asleep = None
        return ops.Awake()

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (local(parameter) for parameter in self.base.packed.parameters())
        for model in self._slots.resident():
            yield from model.tensors()
        yield from self.sampler.tensors()

    def _model(self, model_id: str) -> Trained:
        """On the device, to be worked with."""
        model = self._known(model_id)
        self._slots.use([model_id])
        return model

    def _known(self, model_id: str) -> Trained:
        model = self.models.get(model_id)
        if model is None:
            raise StrataError(Code.NOT_FOUND, f"there is no model {model_id!r}")
        return model


_ASLEEP = StrataError(Code.PRECONDITION, ops.ASLEEP)


def _tried(make: Callable[[], Made]) -> Made | ops.Failed:
    """What fails is a result too, and the same one on all ranks."""
    try:
        return make()
    except StrataError as error:
        return failed(error.code, str(error))


def _may_sleep(work: Single) -> bool:
    return isinstance(work, commands.Manage) and isinstance(work.operation, ops.WHILE_ASLEEP)
