"""`ModelRunner`: executes the commands on a rank (create and unload models, passes, steps, save, load, samplers,
snapshots, sleep), with the checks and errors of each.

An error that the request causes (its shape, a name, a file) is raised before the first collective, and on all ranks
together (`RankGroup.collective_errors`). A failure during the arithmetic, when other ranks may already wait in a
collective, ends the process instead: the group restarts from the last snapshot.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final, TypeVar, assert_never

import msgspec
import torch

from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.train.checkpoints.checkpoint import CheckpointManifest
from strata.train.core import commands, inflight, ops
from strata.train.core.replay_differences import RankNumerics
from strata.train.core.router_replay import wants_router_replay
from strata.train.runner.checkpoint import formats, save_load
from strata.train.runner.checkpoint.save_load import fetch_folder
from strata.train.runner.collectives import RankGroup
from strata.train.runner.host_files import copy_errors
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.model.base import DTYPES, load_base
from strata.train.runner.model.offload import SleepOffload, Slots
from strata.train.runner.model.row_limit import RowMemory
from strata.train.runner.model.trained import FullModel, LoraModel, TrainedModel, local, sharded
from strata.train.runner.passes.partition import ItemFailure, RankPass, RankReport, failed
from strata.train.runner.passes.pass_runner import PassRunner, PassTimes
from strata.train.runner.sampling.engine import SamplingEngine
from strata.train.runner.sampling.request_validator import SamplerLimits
from strata.train.runner.settings import RunnerSettings
from strata.train.runner.snapshot import files, state
from strata.train.runner.snapshot.files import SnapshotCopy, SnapshotWriter

Single = commands.SaveState | commands.LoadState | commands.ManageModel | commands.MakeSampler
Executed = commands.StepsCommand | Single
BroadcastWork = Executed | commands.TakeSnapshot | commands.Restore
"""Work that is broadcast to every rank."""
UNLIMITED: Final = 1 << 20
"""The orchestrator limits samplers and requests; a sampler that it opened once is opened again in a replay."""
T = TypeVar("T")
Managed = ops.CreateModel | ops.UnloadModel | ops.AbortGradients | ops.Sleep | ops.Wake


class ModelRunner:
    def __init__(self, settings: RunnerSettings, ranks: RankGroup) -> None:
        self.settings = settings
        self.ranks = ranks
        self.base = load_base(settings, ranks)
        # The groups of the mesh are there now. Rows are measured within the limit of the first pass.
        ranks.limit_collectives(settings.first_pass_timeout_s)
        self._passed = False
        """Whether a pass has ended: a later one takes no longer than it has to."""
        self.memory = RowMemory(self.base, ranks, settings.sleep_folder / f"rank-{ranks.rank}.row")
        self.models: dict[str, TrainedModel] = {}
        self._offload: SleepOffload | None = None
        self._base_modified = False
        """Whether the weights of the base differ from those in its folder."""
        # Before anything is trained: its self-check compares it with the unmodified base.
        self.sampler = SamplingEngine(
            self.base,
            ranks,
            SamplerLimits(
                sequences=settings.sequences,
                cached_tokens=settings.cached_tokens,
                prefix_tokens=settings.prefix_tokens,
                samplers=UNLIMITED,
                requests=UNLIMITED,
            ),
        )
        self._passes = PassRunner(self.base, ranks, self.models, self.memory)
        self._slots = Slots(
            self.models,
            settings.sleep_folder / f"rank-{ranks.rank}-idle",
            slots=settings.slots,
            in_memory=settings.models_in_memory,
        )
        self.snapshots = SnapshotWriter(ranks.rank, settings.snapshot_timeout_s, ranks.files)
        self._copies = state.HostCopies(ranks.device)
        """Those of the last snapshot, which may still be under way."""

    @property
    def times(self) -> PassTimes:
        """The times of the last pass."""
        return self._passes.times

    @property
    def numerics(self) -> RankNumerics:
        settings, device = self.settings, self.ranks.device
        sizes = [f"{name}={size}" for name, size in msgspec.structs.asdict(settings.parallel).items()]
        kernels = filter(None, (settings.fused_layers, settings.attention))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        mesh = ", ".join([f"{self.ranks.size} ranks", *sizes, name, *kernels, f"torch {torch.__version__}"])
        return RankNumerics(mesh, settings.dtype, settings.deterministic)

    def execute(self, work: Executed) -> list[ops.Result]:
        """Execute work on all ranks together; returns a result of each operation."""
        self._copies.hold_writes()
        if isinstance(work, commands.StepsCommand):
            return self._steps(work.operations)
        return [_catch(partial(self._execute, work))]

    def _steps(self, operations: Sequence[ops.OptimStep]) -> list[ops.Result]:
        """They overlap: each collective of all steps is started before the first step waits for it."""
        if self._offload is not None:
            return [failed(_ASLEEP.code, str(_ASLEEP)) for _ in operations]
        self._slots.use(operation.model_id for operation in operations if operation.model_id in self.models)
        # Also without a gradient, because of weight decay.
        self._base_modified = True
        return run_interleaved([self._step(operation) for operation in operations])

    def _step(self, operation: ops.OptimStep) -> Generator[None, None, ops.Result]:
        try:
            done = yield from self._find(operation.model_id).step(operation.params)
        except StrataError as error:
            return failed(error.code, str(error))
        return ops.StepDone(done.metrics)

    def _execute(self, work: Single) -> ops.Result:
        if self._offload is not None and not _allowed_asleep(work):
            raise _ASLEEP
        match work:
            case commands.SaveState(operation, path):
                return self.save(operation, Path(path))
            case commands.LoadState(operation, path):
                return self.load(operation, Path(path))
            case commands.MakeSampler(operation, path, close):
                return self.make_sampler(operation, Path(path), close)
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
                self._find(model_id).abort()
                return ops.GradientsAborted()
            case ops.Sleep():
                return self.sleep()
            case ops.Wake():
                return self.wake()
            case _:
                assert_never(operation)

    def forward_backward(self, work: RankPass) -> RankReport:
        """Compute this rank's rows of a pass; rank 0 merges the reports."""
        if self._offload is not None:
            failures = [ItemFailure(item, -1, _ASLEEP.code, str(_ASLEEP)) for item in range(len(work.items))]
            return RankReport((), failures)
        self._base_modified = self._base_modified or self.settings.full
        if self._copies.has_gradients:
            # Nothing else that a snapshot has is changed in place by a pass.
            self._copies.hold_writes()
        self._slots.use(item.model_id for item in work.items if item.model_id in self.models)
        report = self._passes.run(work)
        if not self._passed:
            self._passed = True
            self.ranks.limit_collectives(self.settings.collective_timeout_s)
        return report

    def create_model(self, operation: ops.CreateModel) -> ops.ModelCreated:
        """CONFLICT if the model exists: a create that is sent twice must not reset it."""
        if operation.model_id in self.models:
            raise StrataError(Code.CONFLICT, f"there is a model {operation.model_id!r} already")
        if wants_router_replay(operation.user_metadata):
            self.sampler.check_architecture()
            self._passes.require_router_replay()
        if len(self.models) >= (1 if self.settings.full else self.settings.max_models):
            raise StrataError(Code.EXHAUSTED, f"the limit of {len(self.models)} models is reached; unload one first")
        model = self._create_full(operation) if self.settings.full else self._create_lora(operation)
        self.models[operation.model_id] = model
        self._slots.use([operation.model_id])
        return ops.ModelCreated(operation.model_id)

    def _create_lora(self, operation: ops.CreateModel) -> LoraModel:
        lora = operation.lora
        if lora is None:
            raise StrataError(Code.INVALID, "this server trains LoRA adapters: give a lora_config")
        if not 1 <= lora.rank <= self.settings.max_lora_rank or not (math.isfinite(lora.alpha) and lora.alpha > 0):
            most = self.settings.max_lora_rank
            raise StrataError(
                Code.INVALID, f"rank must be 1 to {most} (model.max_lora_rank of the server), and alpha above 0"
            )
        adapter = self.base.new_adapter(lora, self.ranks.device, optimizer=operation.optimizer)
        # Without a seed, the model id is the seed: the model starts the same when its creation is replayed.
        seed = f"seed/{lora.seed}" if lora.seed is not None else f"model/{operation.model_id}"
        adapter.initialise(hashlib.sha256(seed.encode()).hexdigest())
        return LoraModel(operation, adapter, self.ranks)

    def _create_full(self, operation: ops.CreateModel) -> FullModel:
        if operation.lora is not None:
            raise StrataError(Code.INVALID, "this server trains the full model: it takes no lora_config")
        if operation.optimizer != "adamw":
            raise StrataError(
                Code.INVALID,
                f"optimizer_config.type: {operation.optimizer} steps on whole matrices, and a full fine-tune has shards"
                " of them: use adamw",
            )
        model = FullModel(operation, self.base.packed, self.ranks)
        if self._base_modified:
            with self.ranks.collective_errors():
                weights = formats.read_own_shards(self.settings.model, model.parameters, self.base)
            formats.install_weights(weights, model)
            self._base_modified = False
        return model

    def unload(self, model_id: str) -> ops.ModelUnloaded:
        self._find(model_id).abort()
        self._slots.forget(model_id)
        del self.models[model_id]
        return ops.ModelUnloaded(model_id)

    def save(self, operation: ops.SaveWeights, folder: Path) -> ops.WeightsSaved:
        model = self._resident(operation.model_id)
        manifest = CheckpointManifest(
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
        """Load weights, and the optimizer if requested (else it is reset). Accumulated gradients are discarded."""
        model = self._resident(operation.model_id)
        install = save_load.load(folder, model, self.base, self.ranks, optimizer=operation.optimizer)
        self._base_modified = True
        install()
        return ops.WeightsLoaded(f"tinker://{operation.run_id}/{operation.kind}/{operation.name}")

    def make_sampler(
        self, operation: ops.SaveSampler | ops.OpenSampler, folder: Path, close: Sequence[str]
    ) -> ops.SamplerOpened:
        sampler, sampler_id = self.sampler, operation.sampler_id
        for evicted in close:
            if evicted in sampler:
                sampler.close(evicted)
        if isinstance(operation, ops.SaveSampler):
            model = self._resident(operation.model_id)
            if operation.inflight:
                return self._publish_inflight(operation, model)
            if folder != Path():
                unnamed = ops.SaveWeights(operation.model_id, operation.seq_id, "sampler_weights", folder.name)
                self.save(unnamed, folder)
            if isinstance(model, LoraModel):
                sampler.open_adapter(sampler_id, model.adapter)
            else:
                sampler.open_full(sampler_id)
        elif operation.weights is None:
            sampler.open_base(sampler_id)
        else:
            self._open_checkpoint(sampler_id, folder)
        return ops.SamplerOpened(sampler_id)

    def _publish_inflight(self, operation: ops.SaveSampler, model: TrainedModel) -> ops.SamplerOpened:
        if not isinstance(model, LoraModel):
            raise StrataError(Code.UNSUPPORTED, inflight.ONLY_ADAPTERS)
        recompute = inflight.recomputes(model.created.user_metadata)
        weights = inflight.weights_name(operation.model_id)
        self.sampler.publish(weights, model.adapter, operation.seq_id, recompute=recompute)
        return ops.SamplerOpened(operation.sampler_id)

    def _open_checkpoint(self, sampler_id: str, folder: Path) -> None:
        self.sampler.check_architecture()
        weights = save_load.open_weights(folder, self.base, self.ranks)
        if isinstance(weights, Adapter):
            self.sampler.open_adapter(sampler_id, weights)
        else:
            self.sampler.open_full(sampler_id, weights)

    def take_snapshot(self, number: int, folder: Path) -> ops.Failed | None:
        """Copy everything; the copy is written while training continues. Training waits only until this returns."""
        started_s = perf_counter()
        copy: SnapshotCopy | None = None
        try:
            with self.ranks.collective_errors():
                self.snapshots.check_free()
                if self._offload is not None:
                    raise _ASLEEP
                failpoint("train.snapshot.before_copy")
                models = self._slots.each_loaded()
                copies = state.HostCopies(self.ranks.device)
                copy = state.copy_state(self._manifest(), models, self._samplers(), copies)
        except StrataError as error:
            return failed(error.code, str(error))
        assert copy is not None
        self._copies = copies
        failpoint("train.snapshot.copied")
        self.snapshots.start(number, folder, copy, perf_counter() - started_s)
        return None

    def restore(self, named: Path, digest: str) -> None:
        """Restore a snapshot. On an error these ranks stay as they were: as they started."""
        self._copies.hold_writes()
        ranks = self.ranks
        folder = fetch_folder(named, ranks)
        with ranks.collective_errors(), copy_errors(folder, named):
            manifest = files.read_manifest(folder, digest)
            state.check_base(manifest, self._manifest())
            files.verify(folder, manifest, rank=ranks.local_rank, ranks=ranks.local_size)
        failpoint("train.snapshot.before_restore")
        models: dict[str, TrainedModel] = {}
        installs: list[Callable[[], None]] = []
        with ranks.collective_errors():
            reader = state.SnapshotReader(folder, manifest, rank=ranks.rank)
            for number, entry in enumerate(manifest.models):
                created = entry.created
                full = self.settings.full
                model = FullModel(created, self.base.packed, ranks) if full else self._create_lora(created)
                models[created.model_id] = model
                installs.append(state.read_model(reader, number, entry, model))
            installs += [self._read_sampler(reader, number, entry) for number, entry in enumerate(manifest.samplers)]
        ranks.files.drop(named)
        failpoint("train.snapshot.before_put")
        for install in installs:
            install()
        # Update the same dictionary: the pass runner and the slots hold a reference to it.
        self.models.update(models)
        for name in models:
            self._slots.use([name])
        self._base_modified = manifest.base_modified

    def _read_sampler(
        self, reader: state.SnapshotReader, number: int, entry: files.SnapshotSampler
    ) -> Callable[[], None]:
        self.sampler.check_architecture()
        match entry.kind:
            case "base":
                return lambda: self.sampler.open_base(entry.sampler_id)
            case "adapter":
                lora = state.sampler_lora(entry)
                adapter = self.base.new_sampled_adapter(lora, self.ranks.device)
                state.read_sampler_adapter(reader, number, entry, adapter)
                version = entry.version
                if version is not None:
                    return lambda: self.sampler.publish(entry.sampler_id, adapter, version, recompute=False)
                return lambda: self.sampler.open_adapter(entry.sampler_id, adapter)
            case "whole":
                live, dtype = dict(sharded(self.base.packed)), DTYPES[self.settings.dtype]
                weights = state.read_sampler_full(reader, number, live, dtype)
                return lambda: self.sampler.open_full(entry.sampler_id, weights)

    def _manifest(self) -> files.SnapshotManifest:
        base = self.base.info()
        return files.SnapshotManifest(
            base_model=base.name,
            arch=base.arch,
            parameters=base.parameters,
            full=base.full,
            quantise=self.settings.quantise,
            ranks=self.ranks.size,
            base_modified=self._base_modified,
            models=state.model_entries(list(self.models.values())),
            samplers=[sampler.manifest_entry for sampler in self._samplers()],
        )

    def _samplers(self) -> list[state.SamplerTensors]:
        return [state.SamplerTensors(*entry) for entry in self.sampler.entries()]

    def sleep(self) -> ops.Asleep:
        """Offload everything large. Idempotent: a server that sleeps already frees nothing more."""
        if self._offload is not None:
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
        self._offload = offload
        return ops.Asleep(sum(self.ranks.all_gather_int(offload.freed)))

    def wake(self) -> ops.Awake:
        """A rank that cannot get its weights back has lost them: it dies, and the group restarts."""
        if self._offload is not None:
            self._offload.restore()
            self._offload = None
        return ops.Awake()

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (local(parameter) for parameter in self.base.packed.parameters())
        for model in self._slots.resident():
            yield from model.tensors()
        yield from self.sampler.tensors()

    def _resident(self, model_id: str) -> TrainedModel:
        """The model, made resident on the device."""
        model = self._find(model_id)
        self._slots.use([model_id])
        return model

    def _find(self, model_id: str) -> TrainedModel:
        model = self.models.get(model_id)
        if model is None:
            raise StrataError(Code.NOT_FOUND, f"there is no model {model_id!r}")
        return model


_ASLEEP = StrataError(Code.PRECONDITION, ops.ASLEEP)


def run_interleaved(steps: Sequence[Generator[None, None, T]]) -> list[T]:
    """Run all of them to their next pause, in turns; returns what they return."""
    results: dict[int, T] = {}
    while len(results) < len(steps):
        for number, step in enumerate(steps):
            if number not in results:
                try:
                    next(step)
                except StopIteration as end:
                    results[number] = end.value
    return [results[number] for number in range(len(steps))]


def _catch(compute: Callable[[], T]) -> T | ops.Failed:
    """An error becomes a result, the same one on all ranks."""
    try:
        return compute()
    except StrataError as error:
        return failed(error.code, str(error))


def _allowed_asleep(work: Single) -> bool:
    return isinstance(work, commands.ManageModel) and isinstance(work.operation, ops.WHILE_ASLEEP)
