"""The order in which samples completed, for clients that poll all of theirs with one request: cursors, at most 1,000 in
a reply, and client numbers by epoch.

A client sends the cursor of the last response and gets what completed after it. The order is that of this process
alone: the next orchestrator may learn of the same completions in another order, because a client can see a completion
before it is durable. So a cursor carries the leader epoch that issued it, and means the beginning to any other epoch.
Delivery is at least once, and a client that sees a completion twice loses nothing by it.

Several clients may share one sampler. Each numbers its requests in a block of its own, by a client id from
`SamplerClientIds`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Final

from strata.base.errors import Code, StrataError

CLIENT_BLOCK: Final = 1_000_000_000
"""Sequence numbers of one client of a sampler."""
MAX_BATCH: Final = 1000
"""Completions in one response; the rest is there for the next request at once."""
CLIENTS_PER_EPOCH: Final = 1 << 16
_LAST_CLIENT: Final = 2**62 // CLIENT_BLOCK - 1
"""Sequence numbers go no further."""
_COUNT_BITS: Final = 40

Target = tuple[str, int]
"""A sampler, and the id of one of its clients."""


def target_of(future_id: str) -> Target | None:
    """The target that this sample belongs to; None for a future that is no sample."""
    sampler_id, _, number = future_id.rpartition(":")
    if ":sample:" not in sampler_id or not number.isdecimal():
        return None
    return sampler_id, int(number) // CLIENT_BLOCK


class _Completions:
    """The completions of one target, oldest first."""

    def __init__(self) -> None:
        self.future_ids: list[str] = []
        self.truncated = 0
        """How many were dropped; the first that is left has the number after this."""
        self.acknowledged: int | None = None
        """The client has seen those up to this number; None if no client ever polled."""


class CompletionLog:
    def __init__(self, leader_epoch: int, ended: Iterable[str] = ()) -> None:
        self._first = leader_epoch << _COUNT_BITS
        self._by_target: dict[Target, _Completions] = {}
        for future_id in ended:
            self.add(future_id)

    def add(self, future_id: str) -> Target | None:
        """Append a completion; returns the target whose waiters are to be woken."""
        target = target_of(future_id)
        if target is not None:
            self._by_target.setdefault(target, _Completions()).future_ids.append(future_id)
        return target

    def expect(self, target: Target) -> None:
        """A client waits for the next completion: keep it until the client has seen it."""
        completions = self._by_target.setdefault(target, _Completions())
        completions.acknowledged = completions.acknowledged or 0

    def after(self, target: Target, cursor: int) -> tuple[Sequence[str], int]:
        """The completions after a cursor, and the cursor of the next request."""
        completions = self._by_target.get(target)
        if completions is None:
            return (), self._first
        last = completions.truncated + len(completions.future_ids)
        acknowledged = cursor - self._first
        if not 0 <= acknowledged <= last:
            acknowledged = 0
        completions.acknowledged = max(completions.acknowledged or 0, acknowledged)
        start = max(acknowledged - completions.truncated, 0)
        batch = completions.future_ids[start : start + MAX_BATCH]
        return batch, self._first + completions.truncated + start + len(batch)

    def truncate(self, retained: Callable[[str], bool], alive: Callable[[str], bool]) -> None:
        """Drop completions whose results expired, but not those that a polling client has yet to see.

        `alive` tells whether the sampler still exists; no client waits for one that does not.
        """
        for target, completions in list(self._by_target.items()):
            polled = completions.acknowledged is not None and alive(target[0])
            limit = (completions.acknowledged or 0) - completions.truncated if polled else len(completions.future_ids)
            count = 0
            while count < limit and not retained(completions.future_ids[count]):
                count += 1
            del completions.future_ids[:count]
            completions.truncated += count
            if not completions.future_ids and not alive(target[0]):
                del self._by_target[target]


class SamplerClientIds:
    """Client ids for the samplers of one leader epoch. No other epoch issues the same, so none has to be stored."""

    def __init__(self, leader_epoch: int) -> None:
        self._first = leader_epoch * CLIENTS_PER_EPOCH
        self._issued: dict[str, int] = {}

    def issue(self, sampler_id: str, samplers: Container[str]) -> int:
        """The next id for a client of this sampler. `samplers` are those that exist; counts of others are dropped."""
        issued = self._issued.get(sampler_id, 0)
        client_id = self._first + issued
        if issued >= CLIENTS_PER_EPOCH or not 0 < client_id <= _LAST_CLIENT:
            raise StrataError(Code.EXHAUSTED, f"{sampler_id} has no number left for another copy of its client")
        self._issued = {name: count for name, count in self._issued.items() if name in samplers}
        self._issued[sampler_id] = issued + 1
        return client_id
