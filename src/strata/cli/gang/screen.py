"""The screen of `strata gang`: tables of workers, barriers, checkpoints, data, commands and incidents; how many rows
each shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from strata.cli.fleet.client import format_bytes
from strata.cli.gang.format import FOUND, NAMED, age, alerts, clock, missing_parts, names, summary, took
from strata.cli.layout import Cell, Screen, ScreenColumn, Table, bar

if TYPE_CHECKING:
    from strata.coord.view import CheckpointView, DatasetView, GpuView, JobView, WorkerView

GONE_SHOWN: Final = 3
HISTORY_SHOWN: Final = 5
BAR: Final = 10
"""Characters of a progress bar."""


def screen(job: JobView, *, wide: bool = False, rows: int | None = None) -> Screen:
    """`rows`: how high it may be; of many workers those that need attention are then shown."""
    lines = [Cell(summary(job), "bold")]
    lines += [Cell(f"! {each}", "bold red") for each in alerts(job)] or [Cell("nothing needs attention", "green")]
    others = [
        table
        for table in (
            _barriers(job, wide=wide),
            _checkpoints(job, wide=wide),
            _data(job),
            _quarantined(job, wide=wide),
            _commands(job, wide=wide),
            _incidents(job, wide=wide),
        )
        if table.rows
    ]
    room = None
    if rows is not None:
        # Its heading, what it leaves out, and the empty line before every table.
        room = max(3, rows - len(lines) - sum(table.height + 1 for table in others) - 3)
    workers = _workers(job, wide=wide, room=room)
    return Screen(lines, [table for table in (workers, *others) if table.rows])


_LIVENESS_STYLE: Final = {"SUSPECT": "bold yellow", "LOST": "red", "LEFT": "dim"}
_STATUS_STYLE: Final = {"ERROR": "bold red"}
_WORKER: Final = (
    ScreenColumn("WORKER", cuts=True),
    ScreenColumn("RANK", number=True),
    ScreenColumn("GEN", number=True),
    ScreenColumn("STATE"),
    ScreenColumn("SEEN", number=True),
    ScreenColumn("STEP", number=True),
    ScreenColumn("TIME", number=True),
)
_COMPUTE: Final = ScreenColumn("COMPUTE", number=True)
"""Left out where no worker reports computing times: 80 columns are few."""
_SHARDS: Final = ScreenColumn("SHARDS", number=True)
_WORKER_WIDE: Final = (
    ScreenColumn("HOST", cuts=True),
    ScreenColumn("ADDRESS"),
    ScreenColumn("GPUS", number=True),
    ScreenColumn("WEIGHT", number=True),
    ScreenColumn("CPU", number=True),
    ScreenColumn("MEMORY", number=True),
    ScreenColumn("GPU USE", number=True),
    ScreenColumn("SDK", cuts=True),
)


def _workers(job: JobView, *, wide: bool, room: int | None) -> Table:
    members = list(job.members)
    gone = [each for each in job.workers if each.is_gone]
    # The coordinator lists those that are gone oldest first and keeps thousands.
    shown_gone = gone if wide else gone[-GONE_SHOWN:]
    shown = members
    if room is not None and len(members) + len(shown_gone) > room:
        shown_gone = shown_gone[-1:]
        shown = _most_troubled(members, max(1, room - len(shown_gone)))
    computes = any(each.compute_time_ms is not None for each in members)
    times = (_COMPUTE, _SHARDS) if computes else (_SHARDS,)
    return Table(
        (*_WORKER, *times, *(_WORKER_WIDE if wide else ()), ScreenColumn("NOTE")),
        [_worker(job, each, wide=wide, computes=computes) for each in [*shown, *shown_gone]],
        _left_out(len(members) - len(shown), len(gone) - len(shown_gone)),
    )


def _most_troubled(members: Sequence[WorkerView], count: int) -> list[WorkerView]:
    """Workers that are not alive, have no rank, are slow or hang before all others; in the order of `members`."""
    ordered = sorted(
        members, key=lambda each: each.liveness == "ALIVE" and each.rank is not None and each.finding is None
    )
    chosen = {each.worker_id for each in ordered[:count]}
    return [each for each in members if each.worker_id in chosen]


def _left_out(members: int, gone: int) -> str:
    parts = [f"{members} more workers"] if members else []
    parts += [f"{gone} that are gone"] if gone else []
    return f"… and {' and '.join(parts)}: -o wide shows all" if parts else ""


def _worker(job: JobView, worker: WorkerView, *, wide: bool, computes: bool) -> list[Cell]:
    style = _LIVENESS_STYLE.get(worker.liveness or "", "")
    if worker.finding is not None and not worker.is_gone:
        style = style or "bold yellow"
    present = not worker.is_gone
    cells = [
        Cell(worker.worker_id, style),
        Cell(_number(worker.rank)),
        Cell(_number(job.generation if worker.rank is not None else None)),
        _worker_state(worker),
        Cell(age(worker.silent_ms) if present else "-", style),
        Cell(_number(worker.step)),
        _time(worker.step_time_ms),
        *((_time(worker.compute_time_ms),) if computes else ()),
        Cell(_number(worker.leased_shards if present else None)),
    ]
    return [*cells, *(_worker_wide(worker) if wide else ()), Cell(_worker_note(worker, wide=wide), style)]


def _time(time_ms: float | None) -> Cell:
    return Cell("-" if time_ms is None else took(time_ms / 1000))


def _worker_state(worker: WorkerView) -> Cell:
    if worker.is_gone:
        return Cell(worker.status or "-", _STATUS_STYLE.get(worker.status or "", ""))
    return Cell(worker.status or "?", _STATUS_STYLE.get(worker.status or "", "cyan"))


def _worker_note(worker: WorkerView, *, wide: bool) -> str:
    if worker.liveness == "ALIVE":
        found = "" if worker.finding is None else FOUND[worker.finding][0]
        return "waiting" if worker.rank is None else found
    liveness = (worker.liveness or "?").lower()
    # Why stands among what needs attention and in the incidents; here it would take the room of the name.
    return f"{liveness}: {worker.liveness_reason}" if wide else liveness


def _worker_wide(worker: WorkerView) -> list[Cell]:
    uses = worker.resources
    texts = [
        worker.hostname or "-",
        f"{worker.ip}:{worker.port}" if worker.ip else "-",
        str(worker.gpu_count),
        f"{worker.weight:g}",
        f"{uses.cpu_percent:.0f}%" if uses else "-",
        format_bytes(uses.memory_used_bytes) if uses else "-",
        _gpu_use(uses.gpu_metrics) if uses else "-",
        worker.sdk_version or "-",
    ]
    return [Cell(text) for text in texts]


def _gpu_use(gpus: Sequence[GpuView]) -> str:
    """The mean of those that could be read, and how many could not."""
    read = [gpu.utilization_percent for gpu in gpus if not gpu.error]
    parts = [f"{sum(read) / len(read):.0f}%"] if read else []
    if len(read) < len(gpus):
        parts.append(f"{len(gpus) - len(read)} failed")
    return ", ".join(parts) or "-"


def _barriers(job: JobView, *, wide: bool) -> Table:
    return Table(
        (
            ScreenColumn("BARRIER", cuts=True),
            ScreenColumn("STEP", number=True),
            ScreenColumn("THERE"),
            ScreenColumn("OPEN", number=True),
            ScreenColumn("MISSING", folds=True),
        ),
        [
            [
                Cell(each.barrier_id),
                Cell(str(each.step)),
                Cell(f"{each.arrived}/{each.expected}"),
                Cell(age(each.open_ms)),
                Cell(names(each.missing, None if wide else NAMED), "yellow"),
            ]
            for each in job.barriers
        ],
    )


def _checkpoints(job: JobView, *, wide: bool) -> Table:
    open_ones = [each for each in job.checkpoints if not each.committed]
    committed = [each for each in job.checkpoints if each.committed]
    shown = [*open_ones, *(committed if wide else committed[:HISTORY_SHOWN])]
    columns = (
        ScreenColumn("CHECKPOINT"),
        ScreenColumn("GEN", number=True),
        ScreenColumn("PARTS"),
        ScreenColumn("SIZE", number=True),
        ScreenColumn("COMMITTED", folds=True),
        ScreenColumn("ID", cuts=True),
    )
    return Table(columns, [_checkpoint(job, each, wide=wide) for each in shown])


def _checkpoint(job: JobView, checkpoint: CheckpointView, *, wide: bool) -> list[Cell]:
    manifest = checkpoint.manifest
    done = len(manifest.parts)
    if checkpoint.committed:
        how = Cell(_when(job, manifest.committed_at_unix_ms) or "yes", "green")
    else:
        how = Cell(f"not yet, missing {missing_parts(job, checkpoint, None if wide else NAMED)}", "yellow")
    return [
        Cell(f"step {manifest.step}"),
        Cell(str(manifest.generation)),
        Cell(f"{done}/{done + len(checkpoint.missing_ranks)}"),
        Cell(format_bytes(sum(part.size_bytes for part in manifest.parts))),
        how,
        Cell(manifest.checkpoint_id, "dim"),
    ]


def _data(job: JobView) -> Table:
    columns = (
        ScreenColumn("DATASET", cuts=True),
        ScreenColumn("EPOCH", number=True),
        ScreenColumn("SHARDS DONE"),
        ScreenColumn("LEASED", number=True),
        ScreenColumn("LEFT", number=True),
        ScreenColumn("ASIDE", number=True),
        ScreenColumn("ENDED", folds=True),
    )
    return Table(columns, [row for each in job.datasets for row in _dataset(each)])


def _dataset(dataset: DatasetView) -> Iterable[list[Cell]]:
    finished = Cell(_ranges(dataset.finished_epochs) or "-")
    for each in dataset.open_epochs:
        counts = (each.leased_shards, each.waiting_shards)
        yield [
            Cell(dataset.dataset_id),
            Cell(str(each.epoch)),
            Cell(f"{bar(each.done_shards, dataset.num_shards, BAR)} {each.done_shards}/{dataset.num_shards}"),
            *(Cell(str(count)) for count in counts),
            Cell(str(each.quarantined_shards), "bold red" if each.quarantined_shards else ""),
            finished,
        ]
    if not dataset.open_epochs:
        # Nothing is handed out by a ledger now, and of a deterministic dataset never.
        how = "by step" if dataset.mode == "DETERMINISTIC" else "-"
        yield [Cell(dataset.dataset_id), Cell("-"), Cell(how), Cell("-"), Cell("-"), Cell("-"), finished]


def _quarantined(job: JobView, *, wide: bool) -> Table:
    found = [each for dataset in job.datasets for each in dataset.quarantined]
    shown = found if wide else found[:HISTORY_SHOWN]
    more = len(found) - len(shown)
    return Table(
        (
            ScreenColumn("PUT ASIDE", cuts=True),
            ScreenColumn("EPOCH", number=True),
            ScreenColumn("SAMPLES"),
            ScreenColumn("WHY", folds=True),
        ),
        [
            [
                Cell(each.shard_id, "red"),
                Cell(str(each.epoch)),
                Cell(f"{each.start_index} to {each.end_index - 1}"),
                Cell(each.reason),
            ]
            for each in shown
        ],
        f"… and {more} more: -o wide shows all" if more else "",
    )


def _commands(job: JobView, *, wide: bool) -> Table:
    return Table(
        (
            ScreenColumn("COMMAND", number=True),
            ScreenColumn("KIND"),
            ScreenColumn("ISSUED"),
            ScreenColumn("NOT ACKNOWLEDGED BY", folds=True),
        ),
        [
            [
                Cell(str(each.command.command_id)),
                Cell(each.command.kind or "?"),
                Cell(_when(job, each.issued_at_unix_ms) or "-"),
                Cell(names(each.waiting_for, None if wide else NAMED), "yellow"),
            ]
            for each in job.commands
        ],
    )


def _incidents(job: JobView, *, wide: bool) -> Table:
    shown = job.incidents if wide else job.incidents[:HISTORY_SHOWN]
    return Table(
        (
            ScreenColumn("INCIDENT"),
            ScreenColumn("GEN", number=True),
            ScreenColumn("WHAT"),
            ScreenColumn("WHO", cuts=True),
            ScreenColumn("WHY", folds=True),
        ),
        [
            [
                Cell(_when(job, each.at_unix_ms) or "-"),
                Cell(str(each.generation)),
                Cell(each.kind or "?", "red"),
                Cell(each.worker_id or "-"),
                Cell(each.message),
            ]
            for each in shown
        ],
    )


def _when(job: JobView, unix_ms: int) -> str:
    if not unix_ms:
        return ""
    now_ms = job.observed_at_unix_ms
    return f"{clock(unix_ms, now_ms)} ({age(max(0, now_ms - unix_ms))} ago)"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 5` for 0, 1, 2, 3, 5."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] + 1 == number:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)
