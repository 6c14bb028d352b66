"""Logs one structured line for each event of a job's history: which fields it has, and at which level."""

from __future__ import annotations

from strata.base import log
from strata.coord.core.history import INCIDENTS, MERGED, MERGED_S, HistoryEvent, JobHistory
from strata.coord.core.state import CoordState

_log = log.get(__name__)


def log_events(state: CoordState, logged: dict[str, int], wall_s: float) -> None:
    """Log what is new since `logged`, which has the number of the last logged event of each job, and is updated."""
    for name, job in state.jobs.items():
        for event in _new(job.history, logged.get(name, 0), wall_s):
            logged[name] = event.number
            _log_event(name, event)
    for gone in logged.keys() - state.jobs.keys():
        del logged[gone]


def _new(history: JobHistory, last: int, wall_s: float) -> list[HistoryEvent]:
    if not history.events or last + 1 >= history.next_number:
        return []
    first = history.position(max(last + 1, history.events[0].number))
    found = history.events[first:]
    newest = found[-1]
    if newest.kind in MERGED and newest.at_ms > (wall_s - MERGED_S) * 1000:
        # More workers may be added to it.
        found.pop()
    return found


def _log_event(job: str, event: HistoryEvent) -> None:
    write = _log.warning if event.kind in INCIDENTS else _log.info
    write(
        "gang_event",
        job=job,
        kind=event.kind.value,
        number=event.number,
        at_unix_ms=event.at_ms,
        run=event.run,
        generation=event.generation,
        workers=event.workers,
        worker_count=event.worker_count,
        message=event.message,
    )
