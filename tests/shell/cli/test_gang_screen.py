"""What `strata gang` makes of the state of a job: screens, sentences and JSON, from the contract's own messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from rich.console import Console

from strata.cli.gang.format import GangChanges, age, alerts, summary
from strata.cli.gang.screen import screen
from strata.cli.layout import Cell, ScreenColumn, Table, fitted, render
from strata.coord.operator import job_view
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.view import JobView

SCHEMA: Final = Path(__file__).with_name("gang_schema.json")
NOW_MS: Final = 1_700_000_000_000


def worker(worker_id: str, rank: int | None = 0, **more: Any) -> pb.WorkerState:
    given = {"status": pb.WORKER_STATUS_TRAINING, "liveness": pb.LIVENESS_ALIVE, "silent_ms": 400, **more}
    return pb.WorkerState(worker_id=worker_id, rank=rank, **given)


def lost(worker_id: str, cause: str = "connection lost") -> pb.WorkerState:
    return pb.WorkerState(worker_id=worker_id, liveness=pb.LIVENESS_LOST, liveness_reason=cause)


def job(*workers: pb.WorkerState, **more: Any) -> JobView:
    given = {"job_id": "j", "generation": 7, "world_size": len(workers), "observed_at_unix_ms": NOW_MS, **more}
    return job_view(pb.JobState(workers=workers, **given))


def text(view: JobView, columns: int = 80, rows: int | None = None, *, wide: bool = False) -> str:
    console = Console(width=columns, color_system=None, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(render(screen(view, wide=wide, rows=rows), columns))
    return captured.get()


def everything(name: str = "trainer-a100-rack07-node12") -> JobView:
    """A job with something in every table, and long names."""
    return job(
        worker(f"{name}-0", 0, step=120_000, step_time_ms=1_234.5, leased_shards=12),
        worker(f"{name}-1", 1, liveness=pb.LIVENESS_SUSPECT, liveness_reason="its stream broke", silent_ms=83_000),
        worker(f"{name}-2", None),
        lost(f"{name}-3"),
        datasets=[
            pb.DatasetState(
                dataset_id="a-dataset-with-a-long-name",
                mode=pb.DATASET_MODE_LEASED,
                num_shards=100_000,
                open_epochs=[pb.EpochProgress(epoch=4, done_shards=99_999, quarantined_shards=1)],
                finished_epochs=[0, 1, 2, 3],
                quarantined=[
                    pb.QuarantinedShard(
                        shard_id="a/4/17", epoch=4, start_index=1, end_index=9, reason="unreadable " * 9
                    )
                ],
            ),
            pb.DatasetState(dataset_id="d", mode=pb.DATASET_MODE_DETERMINISTIC, num_shards=3),
        ],
        barriers=[
            pb.BarrierState(
                barrier_id="epoch_4",
                step=9,
                arrived=1,
                expected=14,
                open_ms=45_000,
                missing=[f"{name}-{n}" for n in range(13)],
            )
        ],
        checkpoints=[
            pb.CheckpointState(
                manifest=pb.CheckpointManifest(checkpoint_id="c" * 37, step=200, parts=[pb.CheckpointPart(rank=0)]),
                missing_ranks=[1],
            ),
            pb.CheckpointState(
                manifest=pb.CheckpointManifest(checkpoint_id="b" * 37, step=100, committed_at_unix_ms=NOW_MS - 60_000),
                committed=True,
            ),
        ],
        commands=[
            pb.CommandState(
                command=pb.Command(command_id=3, kind=pb.COMMAND_KIND_DRAIN),
                waiting_for=[f"{name}-1"],
                issued_at_unix_ms=NOW_MS - 40_000,
            )
        ],
        incidents=[
            pb.Incident(
                kind=pb.INCIDENT_KIND_WORKER_LOST,
                at_unix_ms=NOW_MS - 5_000,
                worker_id=f"{name}-3",
                message="silent for 15 s",
            ),
            pb.Incident(kind=pb.INCIDENT_KIND_RECOVERY, at_unix_ms=NOW_MS - 90_000_000, message="went back"),
        ],
    )


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_everything_fits_and_stays_readable(columns: int) -> None:
    shown = text(everything(), columns)
    assert max(map(len, shown.splitlines())) <= columns
    # No number was cut, and of the names both ends can be told.
    for cell in (
        "120000",
        "1.2s",
        "SUSPECT".lower(),
        "99% 99999/100000",
        "1/2",
        "1/14",
        "DRAIN",
        "WORKER_LOST",
        "0-3",
        "ENDED",
    ):
        assert cell in shown, cell
    assert "by step" in shown
    for number in range(3):
        assert any(line.startswith("trainer") and f"-{number} " in line for line in shown.splitlines())


def test_attention_comes_first_and_names_who_and_why() -> None:
    view = everything("n")
    assert alerts(view) == [
        "n-1 may be gone: its stream broke",
        "n-3 was lost 5.0s ago: silent for 15 s",
        "waiting for a generation: n-2",
        "barrier epoch_4 has waited 45s for n-0, n-1, n-2 and 10 more (1 of 14 are there)",
        "1 shards of a-dataset-with-a-long-name failed too often and are put aside",
        "command 3 DRAIN is not acknowledged by n-1",
    ]
    assert text(view, 200).splitlines()[1] == "! n-1 may be gone: its stream broke"
    assert text(job(worker("w"))).splitlines()[1] == "nothing needs attention"
    assert alerts(job(generation=0)) == ["nobody takes part"]


SLOW: Final = {"finding": pb.INCIDENT_KIND_STRAGGLER, "finding_reason": "w1 is slow: 2 s of computing for a step"}
HUNG: Final = {"finding": pb.INCIDENT_KIND_HANG, "finding_reason": "w2 hangs: it is at step 30 for 61 s"}


def test_a_worker_that_is_slow_or_hangs_needs_attention_until_it_no_longer_does() -> None:
    view = job(worker("w0", 0), worker("w1", 1, **SLOW), worker("w2", 2, **HUNG))
    assert alerts(view) == ["w2 hangs: it is at step 30 for 61 s", "w1 is slow: 2 s of computing for a step"]
    notes = [line.split()[-1] for line in text(view).splitlines() if line.startswith(("w1 ", "w2 "))]
    assert notes == ["slow", "hangs"]
    assert alerts(job(worker("w0", 0), worker("w1", 1))) == []
    # One that is gone is told of as a loss.
    assert alerts(job(worker("w0", 0), worker("w1", None, **{**SLOW, "liveness": pb.LIVENESS_LOST}))) == []
    many = job(*(worker(f"s{n}", n, **SLOW) for n in range(9)))
    assert alerts(many) == ["9 workers are slow: s0, s1, s2 and 6 more"]


def test_computing_times_are_shown_where_workers_report_them() -> None:
    times = {"step": 9, "step_time_ms": 2_000.0}
    together = job(worker("w0", 0, compute_time_ms=300.0, **times), worker("w1", 1, compute_time_ms=1_900.0, **times))
    head, first, second = (line for line in text(together).splitlines() if line.startswith(("WORKER", "w0", "w1")))
    assert head.split()[5:9] == ["STEP", "TIME", "COMPUTE", "SHARDS"]
    assert (first.split()[5:8], second.split()[5:8]) == (["9", "2.0s", "300ms"], ["9", "2.0s", "1.9s"])
    assert "COMPUTE" not in text(job(worker("w0", 0, **times)))


def test_a_loss_is_no_news_once_the_worker_is_back_or_time_has_passed() -> None:
    incident = pb.Incident(kind=pb.INCIDENT_KIND_WORKER_LOST, at_unix_ms=NOW_MS - 1_000, worker_id="w", message="x")
    assert alerts(job(worker("w"), incidents=[incident])) == []
    incident.at_unix_ms = NOW_MS - 3_600_000
    assert alerts(job(worker("v"), lost("w"), incidents=[incident])) == []


def test_a_whole_rack_that_goes_is_one_line() -> None:
    silent = [worker(f"s{n}", n, liveness=pb.LIVENESS_SUSPECT, liveness_reason=f"silent for {n} s") for n in range(40)]
    losses = [
        pb.Incident(kind=pb.INCIDENT_KIND_WORKER_LOST, at_unix_ms=NOW_MS, worker_id=f"g{n}", message="x")
        for n in range(5)
    ]
    assert alerts(job(*silent, *(lost(f"g{n}") for n in range(5)), incidents=losses)) == [
        "40 workers may be gone: s0, s1, s2 and 37 more",
        "5 workers were lost in the last 10m: g0, g1, g2 and 2 more",
    ]


def test_of_a_thousand_workers_those_in_trouble_are_shown() -> None:
    many = [worker(f"w{n}", n) for n in range(1_000)]
    many[777].liveness = pb.LIVENESS_SUSPECT
    many[888].finding = pb.INCIDENT_KIND_STRAGGLER
    gone = [lost(f"g{n}") for n in range(50)]
    shown = text(job(*many, *gone), rows=20)
    assert len(shown.splitlines()) <= 20
    assert any(line.startswith("w777 ") for line in shown.splitlines())
    assert "more workers and 49 that are gone: -o wide shows all" in shown
    once = text(job(*many, *gone))
    assert "w999" in once
    assert "… and 47 that are gone" in once
    assert "g0 " in text(job(*many, *gone), 300, wide=True)


def test_a_long_name_loses_its_middle_and_only_as_much_as_it_takes() -> None:
    table = Table(
        (ScreenColumn("NAME", cuts=True), ScreenColumn("N")), [[Cell("abcdefghijklmnopqrstuvwxyz"), Cell("1")]]
    )
    assert fitted(table, 80).rows == table.rows
    assert fitted(table, 25).rows[0][0].text == "abcdefghij…pqrstuvwxyz"
    assert fitted(table, 5).rows[0][0].text == "abcdef…tuvwxyz"


def test_ages_are_short() -> None:
    ages = [age(ms) for ms in (0, 9_940, 42_000, 99_999, 600_000, 7_200_000, 172_799_000, 864_000_000)]
    assert ages == ["0.0s", "9.9s", "42s", "100s", "10m", "2h", "48h", "10d"]


def test_the_summary_says_how_far_it_is() -> None:
    assert summary(job(worker("a", step=3), worker("b", step=5))) == (
        "j: generation 7, 2 of 2 workers alive, steps 3 to 5, no checkpoint"
    )
    assert summary(everything("n")).endswith("2 of 3 workers alive, step 120000, checkpoint at step 100")
    assert summary(job(generation=0)) == "j: no generation yet, 0 of 0 workers alive, no checkpoint"


def test_a_change_is_told_once_and_in_words() -> None:
    a, b = worker("a", 0), worker("b", 1)
    loss = pb.Incident(kind=pb.INCIDENT_KIND_WORKER_LOST, at_unix_ms=NOW_MS, worker_id="b", message="connection lost")
    manifest = pb.CheckpointManifest(checkpoint_id="c", step=10, generation=7)
    saved = [pb.CheckpointState(manifest=manifest, committed=True)]
    changes = GangChanges()
    assert [*changes.lines(job(a, b))] == ["generation 7, workers: 2"]
    assert [*changes.lines(job(worker("a", 0, step=9), b))] == []
    assert [*changes.lines(job(a, b, checkpoints=saved))] == ["the checkpoint of step 10 is committed"]
    after = job(a, lost("b"), generation=8, world_size=1, checkpoints=saved, incidents=[loss])
    assert [*changes.lines(after)] == ["generation 8, workers: 1", "WORKER_LOST b connection lost"]
    assert [*changes.lines(after)] == []


def _in_one_order(found: dict[str, Any]) -> dict[str, Any]:
    """Versions of msgspec order the types of an optional field differently."""
    return {name: sorted(each, key=str) if name == "anyOf" else each for name, each in found.items()}


def test_the_names_in_the_json_are_kept() -> None:
    """A script reads them. If this fails because a field was added: msgspec.json.schema(JobView) is the new file."""
    schema = json.loads(json.dumps(msgspec.json.schema(JobView)), object_hook=_in_one_order)
    assert schema == json.loads(SCHEMA.read_text(encoding="utf-8"), object_hook=_in_one_order)


def test_the_use_of_gpus_is_the_mean_of_those_that_could_be_read() -> None:
    read = [pb.GpuMetrics(index=index, utilization_percent=percent) for index, percent in enumerate((40, 60))]
    lost = pb.GpuMetrics(index=2, error="GPU is lost")
    shown = [
        text(job(worker("w", resources=pb.ResourceUsage(gpu_metrics=gpus))), 300, wide=True)
        for gpus in ([*read, lost], read, [lost], [])
    ]
    assert "50%, 1 failed" in shown[0]
    assert "50%" in shown[1]
    assert [" failed" in each for each in shown] == [True, False, True, False]


def test_a_state_that_a_later_coordinator_knows_is_shown_by_number() -> None:
    view = job(pb.WorkerState(worker_id="w", status=99))  # type: ignore[arg-type]
    assert (view.workers[0].status, view.workers[0].liveness) == ("UNKNOWN_99", None)
    assert "UNKNOWN_99" in text(view)


def test_what_was_not_said_is_none_and_not_nothing() -> None:
    view = job(pb.WorkerState(worker_id="w"), worker("v", 0, step=0))
    assert (view.workers[0].rank, view.workers[0].step, view.workers[0].resources) == (None, None, None)
    assert (view.workers[1].rank, view.workers[1].step) == (0, 0)
