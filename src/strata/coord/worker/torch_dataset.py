"""The samples of shards for torch: `ShardDataset` (an `IterableDataset`), and `ShardLoader`, a `DataLoader` with the
options that it refuses, its start method, and when a sample counts as consumed.

    dataset = ShardDataset(worker, "corpus", epoch)
    loader = ShardLoader(dataset, batch_size=8, num_workers=2)
    while not dataset.is_over:
        for batch in loader:
            train(batch)
            dataset.consumed()          # after the optimizer's step: these samples are in the model

**A sample counts when `consumed` is called after it was handed out**, not when it was read and not when it was taken:
a batch that was taken and never trained on is handed out again. So a checkpoint between two steps says of each lease
exactly how far the model has learnt from it, and `worker.checkpoint` reports that by itself; `position` is the same for
programs that report in another way.

Leases stay in the process that joined. A loader process borrows a part of one for each batch: it is told which samples
to read, and has neither a connection nor anything to acknowledge. So its death loses nothing but what it had read.

An iteration may end before the epoch does, because a loader gives out its last, smaller batch only when there is
nothing more to read, and what this worker has taken cannot be acked before it was trained on. Iterate again until
`is_over`; what was not consumed comes again.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, Final, NoReturn

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from strata.base.errors import Code, StrataError
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.blocking import Worker
from strata.coord.worker.readers import DatasetReader
from strata.coord.worker.reasons import lease_lost
from strata.coord.worker.shard import FileSlice, Shard

START_METHOD: Final = "forkserver"
"""gRPC does not survive a fork of the process that joined."""
REFUSED: Final = {
    "batch_sampler": "the leases say what is in a batch",
    "drop_last": "the dropped samples would come again for ever",
    "in_order": "samples count in the order in which they are handed out",
    "persistent_workers": "loader processes end with their iteration",
    "sampler": "the leases say what is in a batch",
    "shuffle": "the coordinator shuffles: DatasetOptions(shuffle=True)",
}
OPEN_LEASES: Final = 2
"""Leases on which a loader process reads without seeking."""


@dataclass(frozen=True)
class Position:
    """How much of a lease is in the model: the samples before `consumed_until`."""

    lease_id: int
    consumed_until: int


@dataclass(eq=False)
class _Handed:
    """A shard that is being handed out. Taken are the samples before `taken`, in the model those before `consumed`."""

    shard: Shard
    taken: int
    consumed: int


class ShardDataset(IterableDataset[Any]):
    """The samples of one epoch that fall to this worker, as `Shard.open` gives them; one iteration at a time.

    With `wait` an iteration waits for shards that others hold and may give back. Ranks that step together must not
    wait for each other in two places: with `wait=False` an iteration ends when there is nothing to hand out now.
    """

    def __init__(self, worker: Worker, dataset_id: str, epoch: int = 0, *, wait: bool = True, at_once: int = 1) -> None:
        self._worker = worker
        self._dataset_id = dataset_id
        self._epoch = epoch
        self._wait = wait
        self._at_once = at_once
        self._handed: list[_Handed] = []
        self._iteration = 0
        self._ran_out = False
        self._process = os.getpid()

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def is_over(self) -> bool:
        """All samples of the epoch are consumed, by this worker or others."""
        return self._worker.is_finished(self._dataset_id, self._epoch)

    @property
    def position(self) -> tuple[Position, ...]:
        """Returns the leases that this dataset hands out and that the coordinator does not know as consumed yet."""
        return tuple(Position(each.shard.lease_id, each.consumed) for each in self._live())

    def consumed(self) -> None:
        """All samples that were handed out are in the model."""
        for each in self._live():
            each.shard.progress(each.taken)
            each.consumed = each.taken
        self._handed = self._live()

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None or os.getpid() != self._process:
            raise _only_here()
        return self._samples(self._begin())

    def __reduce__(self) -> NoReturn:
        # What a loader does that starts its workers with `spawn` or `forkserver`.
        raise _only_here()

    def _begin(self) -> int:
        """A new iteration; the one before ends."""
        if self._ran_out and self._has_unconsumed():
            raise StrataError(
                Code.PRECONDITION,
                "the samples of the last iteration were never consumed and would come again for ever",
                hint="call consumed() after each step of the optimizer",
            )
        self._ran_out = False
        self._iteration += 1
        return self._iteration

    def _restart(self) -> None:
        """The leases that are not consumed to their end come again as new shards, from where they are consumed."""
        self._worker.restart(self._dataset_id, self._epoch)
        self._handed = [each for each in self._live() if each.consumed == each.shard.end]

    def _samples(self, iteration: int) -> Iterator[Any]:
        self._restart()
        while (handed := self._next()) is not None:
            for sample in handed.shard.open():
                if handed.shard.lost:
                    # The next call for a shard raises it.
                    break
                handed.taken += 1
                yield sample
                self._check_current(iteration)
        self._ran_out = True

    def _next(self) -> _Handed | None:
        # To wait here would deadlock: the loop has to train first on what was taken, and it waits for this call.
        wait = self._wait and not self._has_unconsumed()
        shard = self._worker.next_shard(self._dataset_id, self._epoch, at_once=self._at_once, wait=wait)
        if shard is None:
            return None
        self._handed.append(_Handed(shard, taken=shard.start, consumed=shard.start))
        return self._handed[-1]

    def _check_current(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise StrataError(Code.PRECONDITION, "another iteration has begun since")

    def _live(self) -> list[_Handed]:
        return [each for each in self._handed if not (each.shard.lost or each.shard.settled)]

    def _has_unconsumed(self) -> bool:
        return any(each.consumed < each.shard.end for each in self._live())


@dataclass(frozen=True)
class _Borrowed:
    """A part of a lease, for one batch."""

    lease_id: int
    slices: tuple[FileSlice, ...]
    """The files from `start` up to the end of the lease: a process that gets the next part too reads on."""
    start: int
    end: int
    lease_end: int


class _Schedule:
    """What is in each batch. Loader processes get batches in turn, so each of them reads a lease of its own, if there
    are enough; a batch takes from several leases only where one of them ends."""

    def __init__(self, dataset: ShardDataset, batch_size: int, streams: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._open: list[tuple[_Handed, int] | None] = [None] * streams
        """The lease that each stream takes from, and the next sample."""
        self._is_dry = True
        self._batches: Iterator[tuple[_Borrowed, ...]] = iter(())
        self.sent: deque[list[tuple[_Handed, _Borrowed]]] = deque()
        """Batches that the loader has begun and the training loop has not got."""

    def begin(self) -> bool:
        """Forget the iteration before; whether there is anything to read now."""
        self.sent.clear()
        self._open = [None] * len(self._open)
        self._is_dry = False
        batches = self._schedule()
        first = next(batches, None)
        self._batches = batches if first is None else chain([first], batches)
        return first is not None

    def __iter__(self) -> Iterator[tuple[_Borrowed, ...]]:
        return self._batches

    def _schedule(self) -> Iterator[tuple[_Borrowed, ...]]:
        for stream in cycle(range(len(self._open))):
            batch: list[tuple[_Handed, _Borrowed]] = []
            lacking = self._batch_size
            while lacking and (current := self._lease_for(stream)) is not None:
                handed, start = current
                end = min(start + lacking, handed.shard.end)
                batch.append((handed, _borrow(handed.shard, start, end)))
                lacking -= end - start
                self._open[stream] = (handed, end) if end < handed.shard.end else None
            if not batch:
                return
            self.sent.append(batch)
            yield tuple(part for _, part in batch)

    def _lease_for(self, stream: int) -> tuple[_Handed, int] | None:
        """The stream's own, a new one, or else the longest rest of another stream."""
        if (mine := self._open[stream]) is not None:
            return mine
        if not self._is_dry:
            if (handed := self._dataset._next()) is not None:
                return handed, handed.shard.start
            self._is_dry = True
        rest = [(lease[0].shard.end - lease[1], at) for at, lease in enumerate(self._open) if lease is not None]
        if not rest:
            return None
        _, longest = max(rest)
        taken, self._open[longest] = self._open[longest], None
        return taken


class ShardLoader(DataLoader[Any]):
    """A `DataLoader` over a `ShardDataset`: `num_workers` processes read, parse and collate, each `prefetch_factor`
    batches ahead of the training loop. Its other arguments are torch's."""

    def __init__(
        self,
        dataset: ShardDataset,
        batch_size: int = 1,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str = START_METHOD,
        **given: Any,
    ) -> None:
        for name in REFUSED.keys() & given.keys():
            raise StrataError(Code.INVALID, f"a ShardLoader takes no {name}: {REFUSED[name]}")
        if batch_size < 1:
            raise StrataError(Code.INVALID, f"a batch needs at least one sample, not {batch_size}")
        if multiprocessing_context not in (START_METHOD, "spawn"):
            raise StrataError(
                Code.UNSUPPORTED,
                f"loader processes cannot be started with {multiprocessing_context!r}: gRPC does not survive it",
                hint=f"{START_METHOD} or spawn",
            )
        if num_workers and multiprocessing_context == START_METHOD:
            # Once for all loader processes: to import torch takes seconds.
            multiprocessing.get_context(START_METHOD).set_forkserver_preload(["__main__", __name__])
        self._shards = dataset
        self._schedule = _Schedule(dataset, batch_size, max(1, num_workers))
        super().__init__(
            _BorrowedSamples(dataset._worker.reader(dataset._dataset_id)),
            batch_size=None,
            sampler=self._schedule,
            num_workers=num_workers,
            collate_fn=collate_fn,
            worker_init_fn=_LoaderStart(worker_init_fn) if num_workers else None,
            multiprocessing_context=multiprocessing_context if num_workers else None,
            **given,
        )

    def __iter__(self) -> Any:
        return self._batches(self._shards._begin())

    def _batches(self, iteration: int) -> Iterator[Any]:
        shards = self._shards
        shards._restart()
        # No process is started to find that nothing is left.
        for batch in super().__iter__() if self._schedule.begin() else ():
            shards._check_current(iteration)
            borrowed = self._schedule.sent.popleft()
            if lost := {handed.shard.lease_id for handed, _ in borrowed if handed.shard.lost}:
                shards._worker.flush()
                raise lease_lost(sorted(lost))
            for handed, part in borrowed:
                assert handed.taken == part.start
                handed.taken = part.end
            yield batch
        shards._ran_out = True


class _BorrowedSamples(Dataset[list[Any]]):
    """What a loader process has: it reads the samples that it is told."""

    def __init__(self, reader: DatasetReader) -> None:
        self._reader = reader
        self._open: OrderedDict[tuple[int, int], Iterator[Any]] = OrderedDict()
        """Open readers by lease and the next sample."""

    def __getstate__(self) -> DatasetReader:
        return self._reader

    def __setstate__(self, reader: DatasetReader) -> None:
        self.__init__(reader)  # type: ignore[misc]

    def __getitem__(self, batch: tuple[_Borrowed, ...]) -> list[Any]:
        return [sample for part in batch for sample in self._read(part)]

    def _read(self, part: _Borrowed) -> list[Any]:
        samples = self._open.pop((part.lease_id, part.start), None)
        if samples is None:
            slices = [pb.FileSlice(path=each.path, start_index=each.start, end_index=each.end) for each in part.slices]
            samples = chain.from_iterable(self._reader.batches(slices, part.start, part.lease_end))
        found = list(islice(samples, part.end - part.start))
        if part.end < part.lease_end:
            self._open[part.lease_id, part.end] = samples
            if len(self._open) > OPEN_LEASES:
                self._open.popitem(last=False)
        return found


class _LoaderStart:
    """A loader process ends with the process that joined: it is not its child, if a fork server has started it."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, number: int) -> None:
        threading.Thread(target=_end_with_creator, name="strata-loader-creator", daemon=True).start()
        if self._then is not None:
            self._then(number)


def _end_with_creator() -> None:
    creator = multiprocessing.parent_process()
    assert creator is not None
    creator.join()
    os._exit(1)


def _borrow(shard: Shard, start: int, end: int) -> _Borrowed:
    skip, slices = start - shard.start, []
    for each in shard.slices:
        first = min(each.start + skip, each.end)
        skip -= first - each.start
        if first < each.end:
            slices.append(FileSlice(each.path, first, each.end))
    return _Borrowed(shard.lease_id, tuple(slices), start, end, shard.end)


def _only_here() -> StrataError:
    return StrataError(
        Code.PRECONDITION,
        "the shards of a worker can be read only in the process that joined: a copy of it would consume them twice",
        hint="ShardLoader(dataset, batch_size=8, num_workers=2), or DataLoader(dataset, num_workers=0)",
    )
