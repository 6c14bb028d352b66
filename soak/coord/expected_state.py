"""The expected state of a campaign: the replies to its workers, recorded outside of the coordinator and checked.

A worker records every granted lease and every confirmed ack. No worker of these campaigns dies, so a sample belongs to
one of them from the grant to the ack, and after the ack to none for the rest of the epoch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

MOST_NAMED: Final = 20


@dataclass
class Epoch:
    acked: bytearray
    """By sample, how often its ack was confirmed."""
    holder: dict[int, str] = field(default_factory=dict)
    """By sample, the worker that holds it."""
    confirmed: int = 0
    """Shards."""


class ExpectedState:
    """One dataset of `samples` samples, read epoch after epoch. `problems` has a sentence for each broken promise."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.problems: list[str] = []
        self.epochs: dict[int, Epoch] = {}
        self.released: Counter[int] = Counter()
        """By epoch, how many workers its barrier let through."""
        self._closed: set[int] = set()
        self._confirmed_before = 0

    @property
    def confirmed(self) -> int:
        """Acks of shards that the coordinator has confirmed."""
        return self._confirmed_before + sum(epoch.confirmed for epoch in self.epochs.values())

    def problem(self, what: str) -> None:
        self.problems.append(what)

    def summary(self) -> list[str]:
        """The first problems, and the number of the others."""
        more = len(self.problems) - MOST_NAMED
        return [*self.problems[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]

    def confirmed_in(self, epoch: int) -> int:
        return self._of(epoch).confirmed

    def granted(self, epoch: int, worker_id: str, start: int, end: int) -> None:
        if epoch in self._closed:
            self.problem(f"epoch {epoch} is over, and {worker_id} was given samples {start} to {end - 1} of it")
            return
        found = self._of(epoch)
        for sample in range(start, end):
            if found.acked[sample]:
                self.problem(f"sample {sample} of epoch {epoch} was acked, and handed out again to {worker_id}")
            holder = found.holder.setdefault(sample, worker_id)
            if holder != worker_id:
                self.problem(f"sample {sample} of epoch {epoch} is {holder}'s, and was handed out to {worker_id}")

    def ack_confirmed(self, epoch: int, worker_id: str, start: int, end: int) -> None:
        found = self._of(epoch)
        found.confirmed += 1
        for sample in range(start, end):
            if found.acked[sample]:
                self.problem(f"sample {sample} of epoch {epoch} was acked twice, the second time by {worker_id}")
            found.acked[sample] = 1
            found.holder.pop(sample, None)

    def ack_refused(self, epoch: int, worker_id: str, lease_id: int) -> None:
        self.problem(f"the ack of lease {lease_id} by {worker_id} in epoch {epoch} was refused: it held the lease")

    def close(self, epoch: int, workers: int) -> None:
        """The epoch is over: check that each sample was acked and each worker released."""
        found = self._of(epoch)
        missing = found.acked.count(0)
        if missing:
            first = found.acked.index(0)
            self.problem(f"{missing} samples of epoch {epoch} were never acked, such as {first}")
        if self.released[epoch] != workers:
            self.problem(f"the barrier of epoch {epoch} released {self.released[epoch]} of {workers} workers")
        self._confirmed_before += found.confirmed
        self._closed.add(epoch)
        del self.epochs[epoch]

    def _of(self, epoch: int) -> Epoch:
        found = self.epochs.get(epoch)
        if found is None:
            found = self.epochs[epoch] = Epoch(bytearray(self.samples))
        return found
