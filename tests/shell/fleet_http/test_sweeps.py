"""Sweeps that search, with a real Optuna: the same points as a plain study, also after a restart of the hub."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
from msgspec.structs import replace

from strata.base.errors import Code, StrataError
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.objective import MetricObjective
from strata.fleet.core.ownership import OPERATOR
from strata.fleet.core.search import SearchPlan, SearchSweep, Trial, sampler_seed
from strata.fleet.core.sweep_points import Range
from strata.fleet.records import AttemptKey, JobCompletion, JobFilter, JobRow, StoredSweep
from strata.fleet.wire.jobs import Job
from strata.fleet.wire.leases import HeartbeatsReply
from strata.fleet.wire.manifests import ManifestReply
from strata.fleet.wire.streams import PieceReply
from strata.fleet.wire.sweeps import SweepReply
from strata.hub.search_study import propose
from strata.hub.sweep_store import SweepChanges
from strata.hub.tables import open_tables
from tests.shell.fleet_http.running import HostClient, Running, manifest_body, ok, refused, running

MANIFEST = """
[trainers.default]
command = ["python", "train.py"]
directory = "/code"

[[sweeps]]
name = "tune"
model = "gbt"

[sweeps.search]
objective = { loss = "minimize" }
"""
SPACE = "space = { x = { uniform = [-5.0, 5.0] }, y = { uniform = [-5.0, 5.0] } }\n"
AXES = {"x": Range(uniform=(-5.0, 5.0)), "y": Range(uniform=(-5.0, 5.0))}


def loss(point: dict[str, float]) -> float:
    return (point["x"] - 1) ** 2 + (point["y"] + 2) ** 2


def plain_study(method: str, seed: int, count: int) -> list[dict[str, float]]:
    """The points of a study of Optuna alone, whose sampler gets a seed for each trial."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    samplers = {
        "tpe": optuna.samplers.TPESampler,
        "cmaes": optuna.samplers.CmaEsSampler,
        "nsga2": optuna.samplers.NSGAIISampler,
    }
    axes: Any = {name: optuna.distributions.FloatDistribution(-5, 5) for name in ("x", "y")}
    study, points = optuna.create_study(), []
    for number in range(count):
        study.sampler = samplers[method](seed=sampler_seed(seed, number, 0))
        trial = study.ask(axes)
        study.tell(trial, loss(trial.params))
        points.append(dict(trial.params))
    return points


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "count"), [("tpe", 16), ("cmaes", 16), ("nsga2", 54)])
def test_proposals_from_rows_alone_are_those_of_a_plain_study(method: Any, count: int) -> None:
    search = SearchPlan(method=method, objective={"loss": "minimize"}, trials=count, seed=5, space=AXES)
    trials: list[Trial] = []
    for number in range(count):
        point = propose(search, trials, number)
        trials.append(Trial(number=number, point=point, state="completed", values=(loss(point),)))
    assert [trial.point for trial in trials] == plain_study(method, 5, count)
    assert propose(search, trials[:3], 3, tries=1) != trials[3].point


async def jobs_of(site: Running, sweep: str) -> list[JobRow]:
    return list(await site.hub.context.fleet.store.jobs.select(JobFilter(sweep=sweep)))


async def jobs(site: Running, *, running_only: bool = False) -> list[JobRow]:
    rows = await jobs_of(site, "tune")
    status = (JobStatus.PENDING, JobStatus.CLAIMED, JobStatus.RUNNING)
    chosen = [row for row in rows if not running_only or row.status in status]
    return sorted(chosen, key=lambda row: int(row.spec.name.rpartition("/")[2]))


async def wait_for_jobs(site: Running, count: int) -> list[JobRow]:
    async with asyncio.timeout(30):
        while len(rows := await jobs(site)) < count:
            await asyncio.sleep(0.02)
    return rows


async def failures(site: Running, sweep: str) -> list[str]:
    events = await site.hub.context.fleet.store.events.read("", 1000, subject=sweep)
    return [each.event.body["reason"] for each in events if each.event.kind == "sweep.failed"]


async def complete(host: HostClient, claim: str) -> None:
    (lease,) = await host.claim(claim)
    body = {"epoch": lease.epoch, "metrics": {"loss": loss(lease.spec.hyper)}}
    ok(await host.http.post(f"/v1/job/{lease.job_id}/complete", json=body), Job)


async def test_a_sweep_goes_on_after_a_restart_of_the_hub_with_the_same_points(tmp_path: Path) -> None:
    body = manifest_body(MANIFEST + "trials = 6\nseed = 5\n" + SPACE)
    async with running(tmp_path / "hub") as site:
        ok(await (await site.operator()).post("/v1/manifest", json=body), ManifestReply)
        host = await site.host("desk")
        for number in range(3):
            await wait_for_jobs(site, number + 1)
            await complete(host, f"c{number}")
    async with running(tmp_path / "hub") as site:
        host = await site.host("another")
        for number in range(3, 6):
            await wait_for_jobs(site, number + 1)
            await complete(host, f"c{number}")
        rows = await jobs(site)
    assert [row.spec.name for row in rows] == [f"tune/{number}" for number in range(6)]
    assert [row.spec.hyper for row in rows] == plain_study("tpe", 5, 6)
    assert {row.owner for row in rows} == {"operator"}


async def test_only_so_many_trials_run_at_once(site: Running) -> None:
    operator = await site.operator()
    body = manifest_body(MANIFEST + "trials = 50\nparallel = 3\n" + SPACE)
    ok(await operator.post("/v1/manifest", json=body), ManifestReply)
    rows = await wait_for_jobs(site, 3)
    await operator.post(f"/v1/job/{rows[0].id}/cancel", json={})
    rows = await wait_for_jobs(site, 4)
    assert len(await jobs(site, running_only=True)) == 3


OTHER = """
[trainers.default]
command = ["python", "another.py"]
directory = "/code"

[[jobs]]
model = "other"
"""


async def test_another_manifest_of_the_project_leaves_a_search_and_its_trainer_alone(site: Running) -> None:
    operator = await site.operator()
    body = manifest_body(MANIFEST + "trials = 3\n" + SPACE)
    ok(await operator.post("/v1/manifest", json=body), ManifestReply)
    await wait_for_jobs(site, 1)
    ok(await operator.post("/v1/manifest", json=manifest_body(OTHER, source="other.toml")), ManifestReply)
    host = await site.host("desk", slots=2)
    for number in range(3):
        await wait_for_jobs(site, number + 1)
        lease = next(each for each in await host.claim(f"c{number}", count=2) if each.spec.sweep == "tune")
        assert lease.trainer is not None
        assert lease.trainer.command == ("python", "train.py"), "as its own manifest has it"
        done = {"epoch": lease.epoch, "metrics": {"loss": loss(lease.spec.hyper)}}
        ok(await host.http.post(f"/v1/job/{lease.job_id}/complete", json=done), Job)
    shown = ok(await operator.get("/v1/sweep/default/tune"), SweepReply).sweep
    assert (shown.method, shown.trials, shown.planned, shown.source) == ("tpe", 3, 3, "m.toml")
    assert shown.objective == MetricObjective(metric="loss", direction="minimize", declared=True)
    assert shown.state == "ended"


@pytest.mark.parametrize(
    "sweep",
    ['[[sweeps]]\nname = "tune"\nmodel = "gbt"\ngrid = { x = [1, 2] }\n', MANIFEST[MANIFEST.index("[[sweeps]]") :]],
)
async def test_a_sweep_of_another_file_is_refused_unless_it_is_taken_over(site: Running, sweep: str) -> None:
    operator = await site.operator()
    ok(await operator.post("/v1/manifest", json=manifest_body(MANIFEST + "trials = 3\n" + SPACE)), ManifestReply)
    text = OTHER + sweep + ("trials = 9\n" + SPACE if "search" in sweep else "")
    body = manifest_body(text, source="other.toml")
    assert refused(await operator.post("/v1/manifest", json=body | {"dry_run": True}))[1] == "conflict"
    reply = await operator.post("/v1/manifest", json=body)
    assert refused(reply)[1] == "conflict"
    assert "other.toml: the sweep tune belongs to m.toml" in reply.text
    assert ("default", "other") not in {(row.spec.project, row.spec.model) for row in await jobs_of(site, "")}
    ok(await operator.post("/v1/manifest", json=body | {"take_over": True}), ManifestReply)
    assert ok(await operator.get("/v1/sweep/default/tune"), SweepReply).sweep.source == "other.toml"


async def test_a_trial_of_another_files_sweep_is_not_taken_away_unless_it_is_taken_over(site: Running) -> None:
    operator = await site.operator()
    grid = '[[sweeps]]\nname = "{}"\nmodel = "gbt"\ngrid = {{ x = [{}] }}\n'
    ok(await operator.post("/v1/manifest", json=manifest_body(OTHER + grid.format("tune", "1, 2"))), ManifestReply)
    host = await site.host("desk", slots=9)
    for lease in await host.claim("c", count=9):
        done = {"epoch": lease.epoch, "metrics": {"loss": 0.5}}
        ok(await host.http.post(f"/v1/job/{lease.job_id}/complete", json=done), Job)
    before = {row.id: row for row in await jobs(site)}
    assert len(before) == 2
    for text in (grid.format("wider", "1, 2, 3"), '[[jobs]]\nmodel = "gbt"\nhyper = { x = 1 }\n'):
        body = manifest_body(OTHER + text, source="other.toml")
        reply = await operator.post("/v1/manifest", json=body)
        assert refused(reply)[1] == "conflict"
        assert "is a trial of the sweep tune, which belongs to m.toml" in reply.text
        assert {row.id: row for row in await jobs(site)} == before
    renamed = manifest_body(OTHER + grid.format("mine", "1"))
    ok(await operator.post("/v1/manifest", json=renamed), ManifestReply)
    assert len(await jobs_of(site, "mine")) == 1, "a file may rename its own"
    body = manifest_body(OTHER + grid.format("wider", "2, 3"), source="other.toml")
    ok(await operator.post("/v1/manifest", json=body | {"take_over": True}), ManifestReply)
    assert len(await jobs_of(site, "wider")) == 2


async def test_nobody_changes_what_a_sweep_queues_for_another_owner(site: Running) -> None:
    operator, anna = await site.operator(), await site.with_role("researcher")
    text = 'project = "hers"\n' + MANIFEST + "trials = 3\n" + SPACE
    mine = 'project = "hers"\n' + OTHER
    ok(await anna.post("/v1/manifest", json=manifest_body(mine)), ManifestReply)
    ok(await operator.post("/v1/manifest", json=manifest_body(text)), ManifestReply)
    for body in (manifest_body(text), manifest_body(text, source="other.toml")):
        reply = await anna.post("/v1/manifest", json=body | {"take_over": True})
        assert refused(reply)[1] == "forbidden"
    body = manifest_body(text.replace('"tune"', '"hers"'))
    body["manifest"]["searches"]["hers"]["base"]["kind"] = "server"
    assert "its jobs train" in (await anna.post("/v1/manifest", json=body)).text


async def test_a_stopped_search_says_where_it_stopped_and_goes_on_when_it_is_resumed(site: Running) -> None:
    operator, researcher = await site.operator(), await site.with_role("researcher")
    body = manifest_body(MANIFEST + "trials = 5\nparallel = 2\n" + SPACE)
    ok(await operator.post("/v1/manifest", json=body), ManifestReply)
    await wait_for_jobs(site, 2)
    host = await site.host("desk")
    await complete(host, "c0")
    rows = await wait_for_jobs(site, 3)
    (lease,) = await host.claim("c1")
    assert refused(await researcher.post("/v1/sweep/default/tune/stop"))[1] == "forbidden"
    assert refused(await operator.post("/v1/sweep/default/tone/stop"))[1] == "not_found"
    stopped = ok(await operator.post("/v1/sweep/default/tune/stop"), SweepReply).sweep
    assert (stopped.state, stopped.trials - stopped.skipped, stopped.planned) == ("stopped", 2, 5)
    by_id = {row.id: row.status for row in await jobs(site)}
    assert by_id[lease.job_id] in (JobStatus.CLAIMED, JobStatus.RUNNING), "what runs goes on"
    reply = ok(await operator.post("/v1/manifest", json=body), ManifestReply)
    assert reply.stopped == ("tune",), "its own manifest does not start it"
    ok(await operator.post("/v1/sweep/default/tune/stop"), SweepReply)
    await site.hub.context.fleet.leases.tick()
    assert len(await jobs(site)) == len(rows)
    resumed = ok(await operator.post("/v1/sweep/default/tune/resume"), SweepReply).sweep
    assert (resumed.state, resumed.skipped) == ("running", 0)
    done = {"epoch": lease.epoch, "metrics": {"loss": 1.0}}
    ok(await host.http.post(f"/v1/job/{lease.job_id}/complete", json=done), Job)
    for number in range(3):
        await wait_for_jobs(site, min(5, 4 + number))
        await complete(host, f"d{number}")
    assert refused(await operator.post("/v1/sweep/default/tune/stop"))[1] == "precondition"
    events = await site.hub.context.fleet.store.events.read("", 1000, subject="tune")
    kinds = [each.event.kind for each in events]
    assert kinds == ["sweep.declared", "sweep.stopped", "sweep.resumed"]


async def test_a_stopped_grid_cancels_what_waits_and_a_resumed_one_queues_it_again(site: Running) -> None:
    operator = await site.operator()
    grid = '[[sweeps]]\nname = "rates"\nmodel = "gbt"\ngrid = { x = [1, 2, 3] }\n'
    ok(await operator.post("/v1/manifest", json=manifest_body(OTHER + grid)), ManifestReply)
    stopped = ok(await operator.post("/v1/sweep/default/rates/stop"), SweepReply).sweep
    assert (stopped.state, stopped.skipped, stopped.by_status) == ("stopped", 3, {"cancelled": 3})
    more = manifest_body(OTHER + grid.replace("3]", "3, 4]"))
    reply = ok(await operator.post("/v1/manifest", json=more), ManifestReply)
    assert (reply.stopped, reply.new) == (("rates",), ()), "no point of it is queued"
    resumed = ok(await operator.post("/v1/sweep/default/rates/resume"), SweepReply).sweep
    assert (resumed.state, resumed.by_status) == ("waiting", {"pending": 3})


async def test_a_small_space_is_not_tried_twice(site: Running) -> None:
    space = "space = { x = { choice = [1, 2] }, y = { choice = [1] } }\n"
    body = manifest_body(MANIFEST + "trials = 9\nparallel = 9\n" + space)
    ok(await (await site.operator()).post("/v1/manifest", json=body), ManifestReply)
    rows = await wait_for_jobs(site, 2)
    assert sorted(row.spec.hyper["x"] for row in rows) == [1, 2]
    async with asyncio.timeout(30):
        while not (failed := await failures(site, "tune")):
            await asyncio.sleep(0.05)
    assert failed == ["2 of 9 trials: every further point was tried before"]


async def test_a_trial_that_falls_behind_is_stopped_by_the_reply_to_a_heartbeat(site: Running) -> None:
    halving = "halving = { first_step = 10, reduction = 2 }\n"
    body = manifest_body(MANIFEST + "trials = 3\nparallel = 3\n" + halving + SPACE)
    ok(await (await site.operator()).post("/v1/manifest", json=body), ManifestReply)
    await wait_for_jobs(site, 3)
    host = await site.host("desk", slots=3)
    leases = await host.claim(count=3)
    assert len(leases) == 3
    held = [{"job_id": each.job_id, "epoch": each.epoch, "running": True} for each in leases]

    async def verdicts() -> list[tuple[str, str]]:
        reply = ok(await host.http.post("/v1/heartbeats", json={"leases": held}), HeartbeatsReply)
        return [(each.verdict, each.cause) for each in reply.verdicts]

    assert await verdicts() == [("continue", "")] * 3
    for value, lease in zip((0.1, 0.9, '"nan"'), leases, strict=True):
        line = f'{{"type": "metrics", "at_s": 1, "step": 10, "values": {{"loss": {value}}}}}\n'
        path = f"/v1/job/{lease.job_id}/metrics?epoch={lease.epoch}&offset=0"
        ok(await host.http.put(path, content=line.encode()), PieceReply)
    async with asyncio.timeout(30):
        while (said := await verdicts()) != [("continue", ""), ("stop", "ended"), ("stop", "ended")]:
            assert said[0] == ("continue", "")
            await asyncio.sleep(0.05)
    row = await site.hub.context.fleet.store.jobs.get(leases[1].job_id)
    assert row.status is JobStatus.CANCELLED
    assert row.reason.startswith("pruned: 0.9 at step 10 is not among the best 1 of ")
    diverged = await site.hub.context.fleet.store.jobs.get(leases[2].job_id)
    assert diverged.reason.startswith("pruned: inf at step 10 is not among the best 1 of ")


async def test_a_hub_without_optuna_refuses_the_manifest(site: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    body = manifest_body(MANIFEST + "trials = 2\n" + SPACE)
    reply = await (await site.operator()).post("/v1/manifest", json=body)
    assert "pip install 'strata-train[sweep]'" in reply.text
    assert refused(reply)[1] == "unsupported"
    assert await site.hub.context.fleet.store.plans.trainers() == {}, "nothing of it was applied"


async def test_a_sweep_that_optuna_cannot_continue_does_not_hold_up_the_next_one(
    site: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_study = optuna.create_study

    def refuse_first(*, directions: Any) -> Any:
        if len(directions) == 2:
            raise ValueError("Optuna refuses this one")
        return create_study(directions=directions)

    monkeypatch.setattr(optuna, "create_study", refuse_first)
    fails = MANIFEST.replace('"tune"', '"bad"').replace('"minimize" }', '"minimize", size = "minimize" }')
    sweep = MANIFEST[MANIFEST.index("[[sweeps]]") :]
    body = manifest_body(f"{fails}trials = 2\n{SPACE}\n{sweep}trials = 2\nparallel = 2\n{SPACE}")
    ok(await (await site.operator()).post("/v1/manifest", json=body), ManifestReply)
    await wait_for_jobs(site, 2)


async def test_a_sweep_with_a_broken_trial_says_why_and_does_not_hold_up_the_next_one(site: Running) -> None:
    bad = MANIFEST.replace('"tune"', '"bad"').replace("model = ", 'mode = "bad"\nmodel = ')
    sweep = MANIFEST[MANIFEST.index("[[sweeps]]") :]
    body = manifest_body(f"{bad}trials = 2\n{SPACE}\n{sweep}trials = 2\n{SPACE}")
    ok(await (await site.operator()).post("/v1/manifest", json=body), ManifestReply)
    await wait_for_jobs(site, 1)
    host = await site.host("desk", slots=2)
    for lease in await host.claim("c", count=2):
        broken: Any = {"loss": "no number" if lease.spec.sweep == "bad" else 1.0}
        held = AttemptKey(host.id, lease.job_id, lease.epoch)
        await site.hub.context.fleet.leases.complete(held, JobCompletion(metrics=broken))
    await wait_for_jobs(site, 2)
    assert await failures(site, "bad") == ["ValueError: could not convert string to float: 'no number'"]


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    sqlite = request.param == "sqlite"
    return f"sqlite:{tmp_path / 'hub.db'}" if sqlite else str(request.getfixturevalue("postgres_url"))


async def test_both_databases_keep_the_sweeps_of_each_project(database: str) -> None:
    search = SearchPlan(objective={"loss": "minimize"}, trials=2, space=AXES)

    def stored(project: str, name: str) -> StoredSweep:
        base = JobSpec(model="m", project=project, sweep=name)
        sweep = SearchSweep(base=base, search=search)
        return StoredSweep(project=project, name=name, sweep=sweep, actor="operator", submitter=OPERATOR)

    async with open_tables(database) as tables:
        one, two, three = stored("p", "a"), stored("p", "b"), stored("q", "a")

        async def put(*sweeps: StoredSweep) -> None:
            await tables.sweeps.change(sweeps[0].project, lambda _there: SweepChanges(sweeps))

        await put(one, two)
        await put(three)
        assert await tables.sweeps.sweeps() == [one, two, three]
        point = await tables.sweeps.claim_trial(searched(one), 0, {"x": 1.0, "y": 1.0})
        assert await tables.sweeps.claim_trial(searched(one), 0, {"x": 2.0, "y": 2.0}) == point
        stopped = replace(two, stopped=True)
        await put(stopped)
        assert await tables.sweeps.sweeps() == [one, stopped, three]
        wider = replace(one, sweep=replace(searched(one), search=replace(search, trials=3)))
        await put(wider)
        await put(one)
        assert await tables.sweeps.claim_trial(searched(one), 0, {"x": 2.0, "y": 2.0}) == {"x": 2.0, "y": 2.0}
        with pytest.raises(StrataError):
            await tables.sweeps.change("p", refuse)
        assert await tables.sweeps.sweeps() == [one, stopped, three]


def searched(stored: StoredSweep) -> SearchSweep:
    assert stored.sweep is not None
    return stored.sweep


def refuse(there: Mapping[str, StoredSweep]) -> SweepChanges:
    raise StrataError(Code.CONFLICT, f"there are {sorted(there)}")
