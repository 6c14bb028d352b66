"""ModelRunner: what every rank does with a command. All ranks get the same commands in the same order.

Whatever can fail for a reason of the request (its shape, a name, a file) fails before the ranks begin to communicate,
and on all of them together (`Ranks.in_step`). A failure in the midst of the arithmetic, where the others may already
wait in a collective, ends the process instead: the group starts anew and is told everything again.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, assert_never

import torch

from strata.base.errors import Code, StrataError
from strata.train.core import commands, ops
from strata.train.runner import checkpoint, weights
from strata.train.runner.asleep import Asleep
from strata.train.runner.checkpoint import Manifest
from strata.train.runner.lora import Adapter, targets_of
from strata.train.runner.model import Base, try_out
from strata.train.runner.passes import PassRunner, Times
from strata.train.runner.ranks import Ranks
from strata.train.runner.rows import RankPass, RankReport, Refused, failed
from strata.train.runner.sampling.sampler import Sampler
from strata.train.runner.sampling.terms import SamplerLimits
from strata.train.runner.settings import RunnerSettings
from strata.train.runner.trained import AdapterModel, Trained, WholeModel, local

Single = commands.Step | commands.SaveState | commands.LoadState | commands.Manage | commands.MakeSampler
"""Work that every rank gets whole."""
MOST_SAMPLERS: Final = 1 << 20
"""The orchestrator decides who makes room for whom; what it was once told to open is opened again after a restart."""
Managed = ops.CreateModel | ops.UnloadModel | ops.AbortGradients | ops.Sleep | ops.Wake


class ModelRunner:
    def __init__(self, settings: RunnerSettings, ranks: Ranks) -> None:
        self.settings = settings
        self.ranks = ranks
        self.base = Base(settings, ranks)
        try_out(self.base, ranks.device)
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
        self._passes = PassRunner(self.base, ranks, self.models)

    @property
    def times(self) -> Times:
        """Of the last pass."""
        return self._passes.times

    def execute(self, work: Single) -> ops.Result:
        """Do it, on all ranks together; what fails is a result too, and the same one everywhere."""
        try:
            return self._execute(work)
        except StrataError as error:
            return failed(error.code, str(error))

    def _execute(self, work: Single) -> ops.Result:
        if self._asleep is not None and not _may_sleep(work):
            raise _ASLEEP
        match work:
            case commands.Step(operation):
                # Also without a gradient: weights decay.
                self._touched = True
                return ops.StepDone(self._model(operation.model_id).step(operation.adam).metrics)
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
                self._model(model_id).abort()
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
        return self._passes.run(work)

    def create_model(self, operation: ops.CreateModel) -> ops.ModelCreated:
        """The same again is the same model: a create that is told twice resets nothing."""
        if operation.model_id in self.models:
            raise StrataError(Code.CONFLICT, f"there is a model {operation.model_id!r} already")
        if len(self.models) >= (1 if self.settings.full else self.settings.slots):
            raise StrataError(Code.EXHAUSTED, f"all {len(self.models)} places for models are taken; unload one first")
        model = self._whole(operation) if self.settings.full else self._adapter(operation)
        self.models[operation.model_id] = model
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
        self._model(model_id).abort()
        del self.models[model_id]
        return ops.ModelUnloaded(model_id)

    def save(self, operation: ops.SaveWeights, folder: Path) -> ops.WeightsSaved:
        model = self._model(operation.model_id)
        optimizer = operation.kind == "weights"
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
        fill: weights.Fill
        if isinstance(model, WholeModel):
            parts = weights.gather_whole(model, optimizer=optimizer, first=self.ranks.first)
            fill = weights.whole_writer(self.base, *parts)
        else:
            assert isinstance(model, AdapterModel)
            fill = weights.adapter_writer(model, self.base, optimizer=optimizer)
        with self.ranks.in_step():
            if self.ranks.first:
                checkpoint.write(folder, manifest, fill, overwrite=operation.overwrite)
        return ops.WeightsSaved(f"tinker://{operation.model_id}/{operation.kind}/{operation.name}")

    def load(self, operation: ops.LoadWeights, folder: Path) -> ops.WeightsLoaded:
        """Weights, and the optimizer if asked for (else it begins anew). Gradients that wait for a step are dropped."""
        model = self._model(operation.model_id)
        optimizer = operation.optimizer
        with self.ranks.in_step():
            manifest = checkpoint.read(folder)
            if optimizer and manifest.kind != "weights":
                raise StrataError(Code.INVALID, f"{operation.name!r} holds weights alone, no state of an optimizer")
            if (manifest.lora is None) != (model.created.lora is None):
                raise StrataError(Code.INVALID, f"{operation.name!r} was made by the other kind of training")
            if isinstance(model, WholeModel):
                put = weights.read_whole(folder, model, optimizer=optimizer, steps=manifest.steps)
            else:
                assert isinstance(model, AdapterModel)
                _check_scale(manifest.lora, model.adapter.config)
                put = weights.read_adapter(folder, model, optimizer=optimizer, steps=manifest.steps)
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
        found: Adapter | dict[str, torch.Tensor]
        with self.ranks.in_step():
            lora = checkpoint.read(folder).lora
            if (lora is None) != self.settings.full:
                raise StrataError(Code.INVALID, f"{folder.name!r} was made by the other kind of training")
            if lora is None:
                found = weights.whole_parameters(folder, self.base.packed)
            else:
                found = Adapter(lora, targets_of(self.base.lm, lora), self.ranks.device)
                weights.fill_adapter(folder, found)
        if isinstance(found, Adapter):
            sampler.open_adapter(sampler_id, found)
        else:
            sampler.open_whole(sampler_id, found)

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
        for model in self.models.values():
            yield from model.tensors()
        yield from self.sampler.tensors()

    def _model(self, model_id: str) -> Trained:
        model = self.models.get(model_id)
        if model is None:
            raise StrataError(Code.NOT_FOUND, f"there is no model {model_id!r}")
        return model


def _check_scale(there: ops.LoraConfig | None, own: ops.LoraConfig) -> None:
    """The matrices fit whatever the scale they were trained with; what they do to the base would be another thing."""
    if there is not None and not math.isclose(there.alpha / there.rank, own.alpha / own.rank):
        raise StrataError(
            Code.INVALID,
            f"alpha is {there.alpha:g} with rank {there.rank} in the checkpoint, "
            f"{own.alpha:g} with rank {own.rank} in the model",
        )


_ASLEEP = StrataError(Code.PRECONDITION, "the server sleeps; wake it first")


def _may_sleep(work: Single) -> bool:
    return isinstance(work, commands.Manage) and isinstance(work.operation, ops.Sleep | ops.Wake)
