"""The order between jobs: who comes after whom, and whether that can ever come true."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def cycle(after: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """A ring of jobs each of which comes after the next, the first one repeated at the end; empty if there is none.

    Depth first with a list instead of the call stack: a chain may be as long as the manifest.
    """
    done: set[str] = set()
    for start in after:
        path: list[str] = []
        on_path: set[str] = set()
        waiting = [(start, False)]
        while waiting:
            job, leaving = waiting.pop()
            if leaving:
                on_path.discard(path.pop())
                done.add(job)
            elif job in on_path:
                return (*path[path.index(job) :], job)
            elif job not in done:
                path.append(job)
                on_path.add(job)
                waiting.append((job, True))
                waiting += [(each, False) for each in after.get(job, ())]
    return ()
