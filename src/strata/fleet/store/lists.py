"""SQL of job lists: filters, order, cursors of pages, and searches that look at the newest 1,000 matches first."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from strata.base.errors import Code, StrataError
from strata.database.transaction import Rows, Transaction
from strata.fleet.core.job import HELD, JobStatus
from strata.fleet.records import JobFilter
from strata.fleet.store.rows import HELD_JOBS, HIDDEN, JOB

FEW_HOSTS: Final = 100
"""The jobs of so many hosts are found by their index."""
NEWEST_MATCHES: Final = 1000
"""So many jobs of each kind of match a search looks at first."""
ENDED: Final = "status IN ('completed', 'failed', 'cancelled')"
_NEWER: Final = (
    "(SELECT count(*) FROM (SELECT 1 FROM job n WHERE n.label = job.label AND n.project = job.project"
    " AND n.seq > job.seq LIMIT 99) AS newer)"
)
"""How many later jobs of its project have the name of the job: at most so many are counted."""
_BY_MATCH: Final = (
    "(SELECT DISTINCT seq AS match FROM ({matches}) AS m ORDER BY match DESC OFFSET 0) AS matching"
    " CROSS JOIN LATERAL (SELECT * FROM job WHERE job.seq = matching.match AND {where} OFFSET 0) AS job"
)
"""The form for PostgreSQL, whose planner would read all jobs a second time, to have them in order."""
_ID_PREFIX: Final = re.compile(r"[0-9a-z_]{1,80}")


@dataclass(frozen=True)
class SearchIndexes:
    """What the indexes of each database have, as its tables write it."""

    searched_text: str
    """All texts of a job that people search by, in lower case."""
    may_serve: str
    newest_matches: int = NEWEST_MATCHES


class _Matching(NamedTuple):
    """How jobs that a search matches are found, the newest first."""

    hosts: Sequence[str] | None
    """Those whose names match; None: many."""
    most: int | None
    """So many jobs of each kind of match; None: all of them."""

    def union(self, matches: Sequence[str]) -> str:
        """One statement for the numbers of the jobs. With `most` it leaves out those below the last one of a kind that
        was cut off: of that kind there may be others between them."""
        if self.most is None:
            return " UNION ALL ".join(matches)
        lowest = f"CASE WHEN count(*) OVER () = {self.most} THEN min(seq) OVER () ELSE 0 END AS lowest"
        newest = " UNION ALL ".join(
            f"SELECT seq, {lowest} FROM ({each} ORDER BY seq DESC LIMIT {self.most}) AS newest" for each in matches
        )
        bounded = f"SELECT seq, max(lowest) OVER () AS lowest FROM ({newest}) AS matching"
        return f"SELECT seq FROM ({bounded}) AS bounded WHERE seq >= lowest"


async def list_jobs(tx: Transaction, wanted: JobFilter, indexes: SearchIndexes) -> Rows:
    if tx.engine == "sqlite" or not wanted.search or wanted.order != "newest":
        return await tx.rows(*_select_jobs(wanted, indexes))
    # What many jobs match is found among the newest ones, without looking at all.
    select = f"SELECT id FROM host WHERE {_contains('lower(name)')} LIMIT {FEW_HOSTS + 1}"
    hosts = [id_ for (id_,) in await tx.rows(select, {"needle": wanted.search})]
    named = hosts if len(hosts) <= FEW_HOSTS else None
    rows: Rows = []
    for most in (indexes.newest_matches, None):
        rows = await tx.rows(*_select_jobs(wanted, indexes, _Matching(named, most)))
        if len(rows) >= wanted.limit:
            break
    return rows


def _contains(text: str) -> str:
    """Says whether a text in lower case contains the needle, without regard to case."""
    return f"strpos({text}, lower(:needle)) > 0"


def _select_jobs(
    wanted: JobFilter, indexes: SearchIndexes, matching: _Matching | None = None
) -> tuple[str, dict[str, Any]]:
    """The statement and its values. `matching`: how to find the jobs that a search matches, the newest first."""
    values: dict[str, Any] = {}

    def mark(name: str, value: Any) -> str:
        values[name] = value
        return f":{name}"

    where = []
    if wanted.status:
        where.append(f"status = ANY({mark('status', list(wanted.status))})")
    if not wanted.hidden:
        where.append(f"NOT {HIDDEN}")
    columns = ("model", "host_id", "sweep", "project", "owner", "label")
    where += [f"{column} = {mark(column, value)}" for column in columns if (value := getattr(wanted, column))]
    if wanted.sweep:
        # For the index of sweeps, which no other job is in.
        where.append("sweep <> ''")
    if wanted.ids:
        where.append(f"id = ANY({mark('ids', list(wanted.ids))})")
    if wanted.servers:
        where.append(indexes.may_serve)
    if wanted.search and matching is None:
        where.append(f"seq IN ({' UNION ALL '.join(_matches(wanted.search, mark, indexes))})")
    table, contents = _indexed_jobs(wanted)
    where += contents
    order = {"id": "id", "newest": "seq DESC", "ended": "changed_at DESC, seq DESC"}[wanted.order]
    after = _after(wanted, mark)
    where += after
    condition = f"WHERE {' AND '.join(where)}" if where else ""
    limit = mark("limit", wanted.limit)
    if matching is not None:
        # The newest matches of this page, not those of the first one.
        statements = [" AND ".join([each, *after]) for each in _matches(wanted.search, mark, indexes, matching)]
        matches = matching.union(statements)
        table, condition = _BY_MATCH.format(matches=matches, where=" AND ".join(["true", *where])), ""
    return f"SELECT {JOB}, {_NEWER} FROM {table} {condition} ORDER BY {order} LIMIT {limit}", values


def _indexed_jobs(wanted: JobFilter) -> tuple[str, list[str]]:
    """The table of jobs with the index that suits the filter, and what this index has: a planner that does not know the
    values of parameters would not take it otherwise."""
    if wanted.order == "ended":
        if tuple(wanted.status) == (JobStatus.FAILED,):
            return "job /* sqlite: INDEXED BY job_failed */", ["status = 'failed'"]
        return "job /* sqlite: INDEXED BY job_ended */", [ENDED]
    if wanted.servers:
        return "job /* sqlite: INDEXED BY job_server */", []
    # By these columns jobs are found sooner.
    if wanted.order != "newest" or wanted.host_id or wanted.sweep or wanted.label or wanted.ids:
        return "job", []
    if wanted.status and HELD.issuperset(wanted.status):
        return HELD_JOBS, ["status IN ('claimed', 'running')"]
    # Most jobs are completed: all of them by their status would have to be sorted.
    sorts = JobStatus.COMPLETED in wanted.status and not wanted.search
    return "job /* sqlite: NOT INDEXED */" if sorts else "job", []


def _after(wanted: JobFilter, mark: Callable[[str, Any], str]) -> list[str]:
    if not wanted.after:
        return []
    if wanted.order == "id":
        return [f"id > {mark('after', wanted.after)}"]
    try:
        at_s, _, seq = wanted.after.rpartition(":")
        if wanted.order == "newest":
            return [f"seq < {mark('after', int(seq))}"]
        return [f"(changed_at, seq) < ({mark('at', float(at_s))}, {mark('after', int(seq))})"]
    except ValueError:
        raise StrataError(Code.INVALID, f"{wanted.after[:64]!r} is not a cursor of this list") from None


def _matches(
    text: str, mark: Callable[[str, Any], str], indexes: SearchIndexes, matching: _Matching | None = None
) -> list[str]:
    """Statements for the numbers of the jobs."""
    mark("needle", text)
    on_host = f"host_id IN (SELECT id FROM host WHERE {_contains('lower(name)')})"
    if matching is not None and matching.hosts is not None:
        on_host = f"host_id = ANY({mark('hosts', list(matching.hosts))})"
    elif matching is not None:
        # As a test of each job from the newest on, which the planner cannot turn round.
        on_host = f"({on_host}) IS TRUE"
    searched = "job /* sqlite: INDEXED BY job_search */"
    found = [
        f"SELECT seq FROM {searched} WHERE {_contains(indexes.searched_text)}",
        f"SELECT seq FROM job WHERE host_id <> '' AND {on_host}",
    ]
    if _ID_PREFIX.fullmatch(text.lower()):
        low, high = id_range(text.lower())
        found.append(f"SELECT seq FROM job WHERE id >= {mark('low', low)} AND id < {mark('high', high)}")
    return found


def id_range(prefix: str) -> tuple[str, str]:
    """The first id that begins so, with or without `job1_`, and the end of those that do."""
    low = prefix if prefix.startswith("job") else f"job1_{prefix}"
    # '~' sorts after every character of an id.
    return low, f"{low}~"
