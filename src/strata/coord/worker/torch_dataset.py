"""The samples of a worker's shards as a torch `IterableDataset`; the one module of the SDK that imports torch.

    dataset = ShardDataset(worker, "corpus", epoch)
    loader = DataLoader(dataset, batch_size=8)
    while not dataset.is_over:
        for batch in loader:
            train(batch)
            dataset.consumed()          # after the optimizer's step: these samples are in the model

**A sample counts when `consumed` is called after it was handed out**, not when it was read and not when it was taken:
a batch that was taken and never trained on is handed out again. So a checkpoint between two steps says of each lease
exactly how far the model has learnt from it, and `worker.checkpoint` reports that by itself; `position` is the same for
programs that report in another way.

An iteration may end before the epoch does, because a loader gives out its last, smaller batch only when there is
nothing more to read, and what this worker has taken cannot be acked before it was trained on. Iterate again until
`is_over`; what was not consumed comes again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.utils.data import IterableDataset, get_worker_info

from strata.base.errors import Code, StrataError
from strata.coord.worker.blocking import Worker
from strata.coord.worker.shard import Shard


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
        """Of the leases that this dataset hands out and that the coordinator does not know as consumed yet."""
        return tuple(Position(each.shard.lease_id, each.consumed) for each in self._job_generation())

    def consumed(self) -> None:
        """All samples that were handed out are in the model."""
        for each in self._job_generation():
            each.shard.progress(each.taken)
            each.consumed = each.taken
        self._handed = self._job_generation()

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None or os.getpid() != self._process:
            raise _only_here()
        if self._ran_out and self._has_unconsumed():
            raise StrataError(
                Code.PRECONDITION,
                "the samples of the last iteration were never consumed and would come again for ever",
                hint="call consumed() after each step of the optimizer",
            )
        self._ran_out = False
        self._iteration += 1
        return self._samples(self._iteration)

    def __reduce__(self) -> NoReturn:
        # What a loader does that starts its workers with `spawn` or `forkserver`.
        raise _only_here()

    def _samples(self, iteration: int) -> Iterator[Any]:
        self._worker.restart(self._dataset_id, self._epoch)
        # The leases that are not consumed to their end come again as new shards, from where they are consumed.
        self._handed = [each for each in self._job_generation() if each.consumed == each.shard.end]
        while (shard := self._next()) is not None:
            handed = _Handed(shard, taken=shard.start, consumed=shard.start)
            self._handed.append(handed)
            for sample in shard.open():
                if shard.lost:
                    # The next call for a shard raises it.
                    break
                handed.taken += 1
                yield sample
                if iteration != self._iteration:
                    raise StrataError(Code.PRECONDITION, "another iteration has begun since")
        self._ran_out = True

    def _next(self) -> Shard | None:
        # To wait here would deadlock: the loop has to train first on what was taken, and it waits for this call.
        wait = self._wait and not self._has_unconsumed()
        return self._worker.next_shard(self._dataset_id, self._epoch, at_once=self._at_once, wait=wait)

    def _job_generation(self) -> list[_Handed]:
        return [each for each in self._handed if not (each.shard.lost or each.shard.settled)]

    def _has_unconsumed(self) -> bool:
        return any(each.taken > each.consumed for each in self._job_generation())


def _only_here() -> StrataError:
    return StrataError(
        Code.PRECONDITION,
        "the shards of a worker can be read only in the process that joined: a copy of it would consume them twice",
        hint="DataLoader(dataset, num_workers=0)",
    )
