"""ModelRunner: what every rank does with a command. All ranks get the same commands in the same order.

Whatever can fail for a reason of the request (its shape, a name, a file) fails before the ranks begin to communicate,
and on all of them together (`RankGroup.collective_errors`). A failure amid the arithmetic, where the others may already
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
from strata.train.runner.checkpoint import formats, save_load
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter, targets_of
from strata.train.runner.lora.slots import Slots
from strata.train.runner.model.base import DTYPES, checked_base
from strata.train.runner.model.memory import RowMemory
from strata.train.runner.model.offload import SleepOffload
from strata.train.runner.model.trained import FullModel, LoraModel, TrainedModel, local, sharded
from strata.train.runner.passes.partition import RankPass, RankReport, Refused, failed
from strata.train.runner.passes.pass_runner import PassRunner, Times
from strata.train.runner.sampling.request_validator import SamplerLimits
from strata.train.runner.sampling.sampler import Sampler
from strata.train.runner.settings import RunnerSettings
from strata.train.runner.snapshot import files, state
from strata.train.runner.snapshot.files import Copied, SnapshotWriter

Single = commands.SaveState | commands.LoadState | commands.ManageModel | commands.MakeSampler
Executed = commands.StepsCommand | Single
Whole = Executed | commands.TakeSnapshot | commands.Restore
"""Work that every rank gets whole."""
MOST_SAMPLERS: Final = 1 << 20
"""The orchestrator decides who makes room for whom; what it was once told to open is opened again after a restart."""
Made = TypeVar("Made")
Managed = ops.CreateModel | ops.UnloadModel | ops.AbortGradients | ops.Sleep | ops.Wake


class ModelRunner:
    def __init__(self, settings: RunnerSettings, ranks: RankGroup) -> None:
        self.settings = settings
        self.ranks = ranks
        self.base = checked_base(settings, ranks)
        self.memory = RowMemory(self.base, ranks, settings.sleep_folder / f"rank-{ranks.rank}.row")
        self.models: dict[str, TrainedModel] = {}
        self._sleeping: SleepOffload | None = None
        self._base_modified = False
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
        if isinstance(work, commands.StepsCommand):
            return self._steps(work.operations)
        return [_tried(partial(self._execute, work))]

    def _steps(self, operations: Sequence[ops.OptimStep]) -> list[ops.Result]:
        """All are begun before the first is ended: the sums of those behind it travel while it computes."""
        if self._sleeping is not None:
            return [failed(_ASLEEP.code, str(_ASLEEP)) for _ in operations]
        self._slots.use(each.model_id for each in operations if each.model_id in self.models)
        # Also without a gradient: weights decay.
        self._base_modified = True
        begun = [_tried(partial(self._start_step, each)) for each in operations]
        return [each if isinstance(each, ops.Failed) else _tried(each) for each in begun]

    def _start_step(self, operation: ops.OptimStep) -> Callable[[], ops.StepDone]:
        step = self._known(operation.model_id).start_step(operation.adam)
        return lambda: ops.StepDone(step().metrics)

    def _execute(self, work: Single) -> ops.Result:
        if self._sleeping is not None and not _may_sleep(work):
            raise _ASLEEP
        match work:
            case commands.SaveState(operation, path):
                return self.save(operation, Path(path))
            case commands.LoadState(operation, path):
                return self.load(operation, Path(path))
            case commands.MakeSampler(making, path, close):
                return self.make_sampler(making, Path(path), close)
            case commands.ManageModel(operation):
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
        if self._sleeping is not None:
            return RankReport((), [Refused(item, -1, _ASLEEP.code, str(_ASLEEP)) for item in range(len(work.items))])
        self._base_modified = self._base_modified or self.settings.full
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

    def _adapter(self, operation: ops.CreateModel) -> LoraModel:
        lora = operation.lora
        if lora is None:
            raise StrataError(Code.INVALID, "this server trains adapters: give a lora_config")
        if not 1 <= lora.rank <= self.settings.max_lora_rank or not (math.isfinite(lora.alpha) and lora.alpha > 0):
            raise StrataError(Code.INVALID, f"rank must be 1 to {self.settings.max_lora_rank}, and alpha above 0")
        adapter = Adapter(lora, targets_of(self.base.lm, lora), self.ranks.device)
        # A model without a seed has one all the same, its name: told again after a restart, it begins the same.
        seed = f"seed/{lora.seed}" if lora.seed is not None else f"model/{operation.model_id}"
        adapter.initialise(hashlib.sha256(seed.encode()).hexdigest())
        return LoraModel(operation, adapter, self.ranks)

    def _whole(self, operation: ops.CreateModel) -> FullModel:
        if operation.lora is not None:
            raise StrataError(Code.INVALID, "this server trains the whole model: it takes no lora_config")
        model = FullModel(operation, self.base.packed, self.ranks)
        if self._base_modified:
            with self.ranks.collective_errors():
                found = formats.whole_weights(self.settings.model, model)
            formats.put_whole(found, model)
            self._base_modified = False
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
        save_load.save(folder, manifest, model, self.base, self.ranks, overwrite=operation.overwrite)
        return ops.WeightsSaved(f"tinker://{operation.model_id}/{operation.kind}/{operation.name}")

    def load(self, operation: ops.LoadWeights, folder: Path) -> ops.WeightsLoaded:
        """Weights, and the optimizer if asked for (else it begins anew). Gradients that wait for a step are dropped."""
        model = self._model(operation.model_id)
        put = save_load.load(folder, model, self.base, self.ranks, optimizer=operation.optimizer)
        self._base_modified = True
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
            if isinstance(model, LoraModel):
                sampler.open_adapter(sampler_id, model.adapter)
            else:
                sampler.open_whole(sampler_id)
        elif operation.weights is None:
            sampler.open_base(sampler_id)
        else:
            self._open_saved(sampler, sampler_id, folder)
        return ops.SamplerOpened(sampler_id)

    def _open_saved(self, sampler: Sampler, sampler_id: str, folder: Path) -> None:
        found = save_load.open_weights(folder, self.base, self.ranks)
        if isinstance(found, Adapter):
            sampler.open_adapter(sampler_id, found)
        else:
            sampler.open_whole(sampler_id, found)

    def take_snapshot(self, number: int, folder: Path) -> ops.Failed | None:
        """Copy everything; it is written while training goes on. The time until this returns is all that it costs."""
        started_s = perf_counter()
        copy: Copied | None = None
        try:
            with self.ranks.collective_errors():
                self.snapshots.check_free()
                if self._sleeping is not None:
                    raise _ASLEEP
                failpoint("train.snapshot.before_copy")
                copy = state.copied(self._manifest(), self._slots.each_loaded(), self._kept(), first=self.ranks.first)
        except StrataError as error:
            return failed(error.code, str(error))
        assert copy is not None
        failpoint("train.snapshot.copied")
        self.snapshots.start(number, folder, copy, perf_counter() - started_s)
        return None

    def restore(self, folder: Path, digest: str) -> None:
        """Begin where the snapshot was taken. An error leaves these ranks as they are, which is as they began."""
        ranks = self.ranks
        with ranks.collective_errors():
            manifest = files.read_manifest(folder, digest)
            state.check_base(manifest, self._manifest())
            files.verify(folder, manifest, rank=ranks.rank, ranks=ranks.size)
        failpoint("train.snapshot.before_restore")
        models: dict[str, TrainedModel] = {}
        puts: list[Callable[[], None]] = []
        with ranks.collective_errors():
            opened = state.Opened(folder, manifest, rank=ranks.rank, ranks=ranks.size)
            for place, part in enumerate(manifest.models):
                created = part.created
                full = self.settings.full
                model = FullModel(created, self.base.packed, ranks) if full else self._adapter(created)
                models[created.model_id] = model
                puts.append(state.restorer(opened, place, part.steps, model))
            puts += [self._reopened(opened, place, part) for place, part in enumerate(manifest.samplers)]
        failpoint("train.snapshot.before_put")
        for put in puts:
            put()
        # The same dictionary as before: the passes look into it.
        self.models.update(models)
        for name in models:
            self._slots.use([name])
        self._base_modified = manifest.touched

    def _reopened(self, opened: state.Opened, place: int, part: files.SamplerPart) -> Callable[[], None]:
        self.sampler.check_architecture()
        match part.kind:
            case "base":
                return lambda: self.sampler.open_base(part.sampler_id)
            case "adapter":
                lora = state.lora_of(part)
                adapter = Adapter(lora, targets_of(self.base.lm, lora), self.ranks.device)
                state.sampled_from(opened, place, adapter)
                return lambda: self.sampler.open_adapter(part.sampler_id, adapter)
            case "whole":
                live, dtype = dict(sharded(self.base.packed)), DTYPES[self.settings.dtype]
                found = state.sampled_whole(opened, place, live, dtype)
                return lambda: self.sampler.open_whole(part.sampler_id, found)

    def _manifest(self) -> files.Manifest:
        base = self.base.info()
        return files.Manifest(
            base_model=base.name,
            arch=base.arch,
            parameters=base.parameters,
            full=base.full,
            ranks=self.ranks.size,
            touched=self._base_modified,
            models=state.parts_of(list(self.models.values())),
            samplers=[each.part for each in self._kept()],
        )

    def _kept(self) -> list[state.Kept]:
        return [state.Kept(*each) for each in self.sampler.kept()]

    def sleep(self) -> ops.Asleep:
        """Asleep already is asleep: nothing more is freed."""
        if self._sleeping is not None:
            return ops.Asleep(0)
        file = self.settings.sleep_folder / f"rank-{self.ranks.rank}-{os.getpid()}.safetensors"
        offload: SleepOffload | None = None
        try:
            with self.ranks.collective_errors():
                offload = SleepOffload(self._tensors(), file)
        except StrataError:
            if offload is not None:
                offload.restore()
            raise
        self._sleeping = offload
        return ops.Asleep(sum(self.ranks.numbers(offload.freed)))

    def wake(self) -> ops.Awake:
        """A rank that cannot get its weights back has lost them: it dies, and the group starts anew."""
        if self._sleeping is not None:
            self._sleeping.restore()
            self._sleeping = None
        return ops.Awake()

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (local(parameter) for parameter in self.base.packed.parameters())
        for model in self._slots.resident():
            yield from model.tensors()
        yield from self.sampler.tensors()

    def _model(self, model_id: str) -> TrainedModel:
        """On the device, to be worked with."""
        model = self._known(model_id)
        self._slots.use([model_id])
        return model

    def _known(self, model_id: str) -> TrainedModel:
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
    return isinstance(work, commands.ManageModel) and isinstance(work.operation, ops.WHILE_ASLEEP)
