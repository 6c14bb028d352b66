"""Checkpoints of the training server beside the formats under them: `python -m bench weights`.

One rank in this process saves and loads; so does the bare side, of the same tensors. Files lie under the system's
temporary directory; point TMPDIR at the disk that is to be measured.

- `adapter.save`: an adapter with the moments of its optimizer. Bare is `safetensors.save_file` of the same tensors into
  a new folder, with files, folder and its name synced: the same durability, without digests and without a manifest.
- `whole.save`: a whole model with its moments. Bare is `torch.distributed.checkpoint.save` with the storage it takes by
  itself, which syncs its files; folder and name are synced too.
- `….load`: back into the model. Bare believes what it reads; ours has computed every digest before. The files are in
  the memory of the system, as right after a save; `….load.cold` reads them from the disk, as after a restart.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Final, Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from bench.interleave import Measure, interleave
from bench.report import Report
from strata.train.checkpoints.checkpoint import CheckpointManifest
from strata.train.core import model_options, ops
from strata.train.runner.checkpoint import formats, save_load
from strata.train.runner.collectives import RankGroup
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.model.trained import FullModel, LoraModel, TrainedModel, local
from strata.train.runner.model_runner import ModelRunner, run_interleaved
from strata.train.runner.settings import RunnerSettings

GOAL: Final = 0.9
RANK: Final = 64
KINDS: Final[Sequence[tuple[Literal["lora", "full"], str]]] = (("lora", "adapter"), ("full", "whole"))


@dataclass(frozen=True)
class Turns:
    rounds: int
    model: TinyModel


QUICK: Final = Turns(rounds=6, model=TinyModel(family="llama", layers=6, hidden=512, vocabulary=4096))
LONG: Final = Turns(rounds=12, model=TinyModel(family="llama", layers=12, hidden=768, vocabulary=8192))


async def run(report: Report, *, quick: bool) -> None:
    turns = QUICK if quick else LONG
    with tempfile.TemporaryDirectory(prefix="bench-weights-") as name, alone(Path(name)) as ranks:
        model = Path(name) / "model"
        make(model, turns.model)
        for training, what in KINDS:
            report.progress(f"{what}: loading the base")
            settings = RunnerSettings(
                model=str(model), name="model", training=training, sleep_folder=Path(name), max_lora_rank=RANK
            )
            runner = ModelRunner(settings, ranks)
            lora = model_options.LoraConfig(rank=RANK, alpha=RANK) if training == "lora" else None
            runner.create_model(ops.CreateModel("m", "model", lora))
            trained = runner.models["m"]
            # Moments are there after a step, also after one that changes nothing.
            run_interleaved([trained.step(model_options.AdamParams(learning_rate=0.0))])
            side: Adapter | Whole
            side = Adapter(trained) if isinstance(trained, LoraModel) else Whole(trained)  # type: ignore[arg-type]
            await measure(report, what, Path(name) / what, side, Ours(runner, trained, ranks), turns.rounds)


@contextmanager
def alone(folder: Path) -> Iterator[RankGroup]:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1)
    try:
        yield RankGroup(torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@dataclass
class Ours:
    runner: ModelRunner
    model: TrainedModel
    ranks: RankGroup
    _number: Iterator[int] = field(default_factory=count)

    def save(self, folder: Path) -> None:
        base = self.runner.base
        manifest = CheckpointManifest(
            model_id="m",
            seq_id=next(self._number),
            kind="weights",
            base_model=base.info().name,
            arch=base.arch,
            lora=self.model.created.lora,
            steps=self.model.optimizer.steps,
        )
        save_load.save(folder, manifest, self.model, base, self.ranks, overwrite=True)

    def load(self, folder: Path) -> None:
        save_load.load(folder, self.model, self.runner.base, self.ranks, optimizer=True)()


@dataclass
class Adapter:
    """Bare safetensors."""

    model: LoraModel

    def save(self, folder: Path) -> None:
        folder.mkdir()
        adapter, moments = self.model.adapter, self.model.optimizer.moments()[0]
        save_file(formats.to_peft(adapter.views(adapter.flat)), folder / "adapter.safetensors")
        kept = {f"{part}.{name}": own for part, flat in moments.items() for name, own in adapter.views(flat).items()}
        save_file({name: own.clone() for name, own in kept.items()}, folder / "optimizer.safetensors")
        for path in (*folder.iterdir(), folder, folder.parent):
            sync(path)

    def load(self, folder: Path) -> None:
        adapter = self.model.adapter
        found = load_file(folder / "adapter.safetensors")
        kept = load_file(folder / "optimizer.safetensors")
        for (_, view), tensor in zip(sorted(adapter.views(adapter.flat).items()), _sorted(found), strict=True):
            view.copy_(tensor)
        moments = self.model.optimizer.moments()[0]
        for part, flat in moments.items():
            for name, view in adapter.views(flat).items():
                view.copy_(kept[f"{part}.{name}"])


@dataclass
class Whole:
    """Bare torch.distributed.checkpoint."""

    model: FullModel

    def save(self, folder: Path) -> None:
        dcp_save(formats.full_state(self.model, optimizer=True), storage_writer=FileSystemWriter(folder))
        for path in (folder, folder.parent):
            sync(path)

    def load(self, folder: Path) -> None:
        dcp_load(formats.full_state(self.model, optimizer=True), storage_reader=FileSystemReader(folder))


def _sorted(found: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [found[name] for name in sorted(found)]


async def measure(report: Report, what: str, folder: Path, bare: Adapter | Whole, ours: Ours, rounds: int) -> None:
    places = make_places(folder)
    expected = [own.clone() for own in state(ours.model)]
    ours.save(places["ours"] / "kept")
    bare.save(places["bare"] / "kept")
    size_mb = sum(file.stat().st_size for file in (places["ours"] / "kept").iterdir()) / 1e6
    note = f"{size_mb:.0f} MB"
    numbers = count()

    def saves(side: str, save: Callable[[Path], None]) -> Measure:
        async def turn() -> float:
            target = places[side] / f"save-{next(numbers)}"
            took_s = timed(lambda: save(target))
            shutil.rmtree(target)
            return size_mb / took_s

        return turn

    def loads(side: str, load: Callable[[Path], None], *, cold: bool) -> Measure:
        async def turn() -> float:
            if cold:
                forget(places[side] / "kept")
            took_s = timed(lambda: load(places[side] / "kept"))
            assert all(torch.equal(one, other) for one, other in zip(expected, state(ours.model), strict=True))
            return size_mb / took_s

        return turn

    report.progress(f"{what}: saving, {note}")
    found = await interleave(saves("ours", ours.save), saves("bare", bare.save), rounds)
    report.add(f"{what}.save", "MB/s", found, goal=GOAL, note=note)
    for cold in (False, True):
        found = await interleave(loads("ours", ours.load, cold=cold), loads("bare", bare.load, cold=cold), rounds)
        report.add(f"{what}.load{'.cold' if cold else ''}", "MB/s", found, goal=GOAL, note=f"{note}, verified")


def make_places(folder: Path) -> dict[str, Path]:
    """As deep as in a server, whose folders are synced too."""
    places = {"ours": folder / "ours" / "weights", "bare": folder / "bare"}
    for place in places.values():
        place.mkdir(parents=True)
    return places


def state(model: TrainedModel) -> list[torch.Tensor]:
    return [*(parameter.data for parameter in model.optimizer.parameters), *map(local, model.optimizer.tensors())]


def timed(work: Callable[[], None]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def forget(folder: Path) -> None:
    """Let the system drop what it remembers of the files."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
