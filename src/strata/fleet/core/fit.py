"""Which of the best waiting jobs fit into the free slots of a host: the same choice in both databases."""

from __future__ import annotations

from collections.abc import Iterable


def fitting(offers: Iterable[tuple[int, int]], *, slots: int, count: int) -> list[int]:
    """Of `(job, slots it takes)`, best first: those taken. One that does not fit lets a smaller one pass."""
    taken: list[int] = []
    for job, takes in offers:
        if len(taken) < count and takes <= slots:
            taken.append(job)
            slots -= takes
    return taken
