"""A group of ranks in the simulation: the protocol of `FakeRanks`, models that are hashes, and processes that die."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from strata.base.digest import sha256_hex
from strata.train.core import commands, ops
from strata.train.settings import ServerSettings
from tests.sim.train import chain
from tests.sim.train.audit import Audit
from tests.sim.train.links import Board, RankListener
from tests.sim.train.wires import TrainWorld
from tests.support.fake_ranks import FakeRanks
from tests.support.simloop import PROCESS

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[dict[str, bytes], dict[str, float], dict[str, int]]).decode
Done = tuple[Sequence[ops.Result], int]


class Trouble(msgspec.Struct, frozen=True):
    """How bad the ranks are: seconds of a dispatch, and the chance of each to go wrong in its own way."""

    work_s: float = 0.05
    slow: float = 0.02
    slow_s: float = 2.0
    hang: float = 0.0
    """Far longer than an operation may take; it may come to an end after all."""
    hang_s: float = 9.0
    death: float = 0.0
    """Half of them after the work was done, before anybody heard of it."""
    kill_after_s: float = 1.0
    """How long whoever is told of stuck ranks takes to kill them."""
    start_s: float = 0.3


class SimRanks(FakeRanks):
    def __init__(self, settings: ServerSettings, group: str, disk: dict[str, bytes], world: TrainWorld) -> None:
        super().__init__(settings, group)
        self.chains: dict[str, bytes] = {}
        self.writing: tuple[int, str, bytes] | None = None
        """A snapshot that was copied and is to be written: its dispatch, its folder and what is in it."""
        self._disk = disk
        """Checkpoints and snapshots: they outlive every group."""
        self._world = world

    def _execute(self, work: Any) -> Done:  # noqa: PLR0911 - one arm per kind
        match work:
            case commands.PassCommand():
                return self._chained(work), 0
            case commands.StepsCommand():
                return [
                    self._changed(each.model_id, partial(chain.stepped, params=each.params)) for each in work.operations
                ], 0
            case commands.SaveState():
                return [self._saved(work)], 0
            case commands.LoadState():
                return [self._loaded(work)], 0
            case commands.ManageModel(ops.AbortGradients() as operation):
                result = self._changed(operation.model_id, chain.aborted)
                return [result if isinstance(result, ops.Failed) else ops.GradientsAborted()], 0
            case commands.ManageModel(ops.CreateModel() as operation):
                self.chains[operation.model_id] = chain.begun(operation.model_id)
                return [ops.ModelCreated(operation.model_id)], 0
            case commands.ManageModel(ops.UnloadModel() as operation):
                self.chains.pop(operation.model_id, None)
                return [ops.ModelUnloaded(operation.model_id)], 0
            case commands.MakeSampler():
                return [self._sampler(work)], 0
            case _:
                return super()._execute(work)

    def _take_snapshot(self, number: int, folder: Path) -> Sequence[ops.Result]:
        self.writing = number, str(folder), _encode((self.chains, self.samplers, self.versions))
        return []

    def wrote(self, number: int, folder: str, data: bytes) -> commands.SnapshotWritten:
        """A snapshot that was copied before is on the disk now."""
        self._disk[folder] = data
        self.written = commands.SnapshotWritten(self.generation, number, sha256_hex(data), len(data), 0.0, 0.0)
        return self.written

    def _restore(self, message: commands.Restore) -> commands.Restored:
        data = self._disk.get(message.path, b"")
        if sha256_hex(data) != message.digest:
            return commands.Restored(self.generation, message.number, f"{message.path} is damaged", damaged=True)
        self.chains, self.samplers, self.versions = _decode(data)
        self.applied = message.number
        return commands.Restored(self.generation, message.number)

    def _chained(self, work: commands.PassCommand) -> list[ops.Result]:
        composition = chain.composed([item.request_id for item in work.items], work.rows)
        return [self._item(item, work, composition) for item in work.items]

    def _item(self, item: commands.PassItem, work: commands.PassCommand, composition: bytes) -> ops.Result:
        before = self.chains.get(item.model_id)
        if before is None:
            return ops.Failed("user", f"there is no model {item.model_id!r}")
        after = chain.passed(before, item.data, forward_only=work.forward_only, composition=composition)
        if not work.forward_only:
            self.chains[item.model_id] = after
        return ops.PassDone(ops.InlinePayload(after))

    def _changed(self, model_id: str, change: Any) -> ops.Result:
        before = self.chains.get(model_id)
        if before is None:
            return ops.Failed("user", f"there is no model {model_id!r}")
        self.chains[model_id] = change(before)
        return ops.StepDone(chain.shown(self.chains[model_id]))

    def _saved(self, work: commands.SaveState) -> ops.Result:
        now = self.chains.get(work.operation.model_id)
        if now is None:
            return ops.Failed("user", f"there is no model {work.operation.model_id!r}")
        if self._disk.setdefault(work.path, now) != now:
            self._world.violated(f"{work.path} was saved before, with other weights")
        return ops.WeightsSaved(f"tinker://{work.operation.model_id}/{work.operation.kind}/{work.operation.name}")

    def _loaded(self, work: commands.LoadState) -> ops.Result:
        operation = work.operation
        saved = self._disk.get(work.path)
        if saved is None or operation.model_id not in self.chains:
            return ops.Failed("user", "there is no such model or checkpoint")
        self.chains[operation.model_id] = chain.loaded(saved, optimizer=operation.optimizer)
        return ops.WeightsLoaded(f"tinker://{operation.run_id}/{operation.kind}/{operation.name}")

    def _sampler(self, work: commands.MakeSampler) -> ops.Result:
        for other in work.close:
            self.samplers.pop(other, None)
            self.versions.pop(other, None)
        operation = work.operation
        if isinstance(operation, ops.SaveSampler):
            found = self.chains.get(operation.model_id)
        else:
            found = self._disk.get(work.path) if operation.weights else b"\0\0"
        if found is None:
            return ops.Failed("user", "there is no such model or checkpoint")
        if isinstance(operation, ops.SaveSampler) and operation.inflight:
            return self._publish(operation, chain.weight(found))
        self.samplers[operation.sampler_id] = chain.weight(found)
        return ops.SamplerOpened(operation.sampler_id)


async def run_ranks(
    world: TrainWorld, board: Board, settings: ServerSettings, disk: dict[str, bytes], audit: Audit, trouble: Trouble
) -> None:
    """From its start to its death, or to the word that it is over."""
    ranks = SimRanks(settings, f"group-{PROCESS.get().incarnation}", disk, world)
    await asyncio.sleep(world.rng.expovariate(1 / trouble.start_s))
    listener = board.open_listener()
    writers: list[asyncio.Task[None]] = []
    while not ranks.stopped:
        message = await listener.receive()
        new = isinstance(message, commands.DispatchCommand | commands.Restore) and message.number > ranks.applied
        if isinstance(message, commands.DispatchCommand) and message.generation == ranks.generation:
            audit.told(message, ranks.group)
        if new:
            ranks.takes_s = _takes_s(world, trouble)
            await asyncio.sleep(ranks.takes_s)
            if _deadly(message) or world.hurts(trouble.death / 2):
                world.kill("ranks")
                await asyncio.sleep(1e9)
        reply = ranks.handle(message)
        if isinstance(reply, commands.Fenced) and reply.reason.endswith("is not kept"):
            world.violated(f"{ranks.group} was asked for what it was told to forget: {reply.reason}")
        world.trace.note(f"{ranks.group} did {type(message).__name__} {ranks.applied}")
        if new:
            await asyncio.sleep(world.rng.expovariate(1 / world.faults.delay_s))
            if world.hurts(trouble.death / 2):
                world.kill("ranks")
                await asyncio.sleep(1e9)
        listener.send(reply)
        if ranks.writing is not None:
            writing, ranks.writing = ranks.writing, None
            writers.append(asyncio.create_task(_write(world, ranks, listener, trouble, writing)))
    await asyncio.sleep(0.01)
    world.kill("ranks")


async def _write(
    world: TrainWorld, ranks: SimRanks, listener: RankListener, trouble: Trouble, writing: tuple[int, str, bytes]
) -> None:
    """While the ranks go on."""
    await asyncio.sleep(_takes_s(world, trouble))
    listener.send(ranks.wrote(*writing))


def _takes_s(world: TrainWorld, trouble: Trouble) -> float:
    if world.hurts(trouble.hang):
        world.trace.note("the ranks hang")
        return world.rng.expovariate(1 / trouble.hang_s)
    return world.rng.expovariate(1 / (trouble.slow_s if world.hurts(trouble.slow) else trouble.work_s))


def _deadly(message: commands.ToRank) -> bool:
    """Some data kill whoever touches them."""
    work = message.work if isinstance(message, commands.DispatchCommand) else None
    return isinstance(work, commands.PassCommand) and any(item.config.get("deadly") for item in work.items)
