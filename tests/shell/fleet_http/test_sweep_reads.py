"""`GET /v1/sweeps` and `GET /v1/sweep/{project}/{name}`: trials, the objective, and the best so far."""

from __future__ import annotations

import json
from typing import Any

from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.objective import MetricObjective
from strata.fleet.core.ownership import OPERATOR
from strata.fleet.core.search import PRUNED, SearchPlan, SearchSweep, trial_spec
from strata.fleet.core.sweep_points import Range
from strata.fleet.records import AttemptKey, JobCompletion, StoredSweep
from strata.fleet.wire.sweeps import SweepReply, SweepsReply
from tests.shell.fleet_http.running import HostClient, Running, ok, refused


def trial(value: float, **fields: Any) -> JobSpec:
    return JobSpec(model="m", sweep="lr", name=f"lr/{value}", hyper={"opt": {"lr": value}, "layers": 2}, **fields)


async def complete(site: Running, host: HostClient, values: dict[str, dict[str, float]]) -> None:
    """Run the jobs of these ids to their end, each with its metrics."""
    while values:
        for lease in await host.claim(f"c{len(values)}"):
            key = AttemptKey(host.id, lease.job_id, lease.epoch)
            metrics = values.pop(lease.job_id)
            await site.hub.context.fleet.leases.complete(key, JobCompletion(metrics=metrics))


async def test_a_sweep_shows_its_best_trial_by_the_metric_that_matters(site: Running) -> None:
    low, middle, high = await site.add(trial(0.1), trial(0.2), trial(0.3))
    host = await site.host("gpu-1")
    await complete(
        site,
        host,
        {low: {"loss": 0.9, "epoch": 1.0}, middle: {"loss": 0.4, "epoch": 1.0}, high: {"loss": 0.6, "epoch": 1.0}},
    )
    viewer = await site.with_role("viewer")
    listed = ok(await viewer.get("/v1/sweeps"), SweepsReply)
    assert listed.total == 1
    (sweep,) = listed.sweeps
    assert (sweep.project, sweep.name, sweep.state, sweep.trials, sweep.planned) == ("default", "lr", "ended", 3, None)
    assert sweep.by_status == {"completed": 3}
    assert sweep.objective == MetricObjective(metric="loss", direction="minimize")
    assert sweep.best is not None
    assert (sweep.best.job_id, sweep.best.value, sweep.best.parameters) == (middle, 0.4, {"opt.lr": 0.2})

    shown = ok(await viewer.get("/v1/sweep/default/lr"), SweepReply)
    assert shown.sweep == sweep
    assert (shown.axes, shown.metrics) == (("opt.lr",), ("epoch", "loss"))
    assert [each.job_id for each in shown.trials] == [low, middle, high]
    assert shown.trials[0].parameters == {"opt.lr": 0.1, "layers": 2, "seed": 0}

    highest = {"metric": "loss", "lowest": "false"}
    other = ok(await viewer.get("/v1/sweep/default/lr", params=highest), SweepReply)
    assert other.sweep.best is not None
    assert other.sweep.best.job_id == low
    few = ok(await viewer.get("/v1/sweep/default/lr", params={"limit": 2}), SweepReply)
    assert [each.job_id for each in few.trials] == [middle, high], "the best ones, in the order of the queue"
    assert few.sweep.trials == 3


async def test_a_trial_that_runs_shows_what_it_reported_last(site: Running) -> None:
    (job_id,) = await site.add(trial(0.1))
    host = await site.host("gpu-1")
    (lease,) = await host.claim()
    lines = [{"type": "metrics", "at_s": 1.0, "step": step, "values": {"loss": 1.0 / step}} for step in (1, 2, 4)]
    content = "".join(json.dumps(line) + "\n" for line in lines) + '{"type": "metrics", "at'
    sent = await host.http.put(f"/v1/job/{job_id}/metrics?epoch={lease.epoch}&offset=0", content=content)
    assert sent.status_code == 200
    shown = ok(await (await site.with_role("viewer")).get("/v1/sweep/default/lr"), SweepReply)
    assert shown.sweep.state == "running"
    assert shown.trials[0].metrics == {"loss": 0.25}
    assert shown.sweep.objective is not None
    assert shown.sweep.objective.metric == "loss"
    assert shown.sweep.best is None, "no trial has completed"


async def test_a_search_shows_its_plan_its_objective_and_the_trials_that_were_pruned(site: Running) -> None:
    context = site.hub.context
    search = SearchPlan(
        objective={"reward": "maximize"}, trials=8, space={"x": Range(uniform=(0.0, 1.0)), "y": Range(integer=(1, 4))}
    )
    sweep = SearchSweep(base=JobSpec(model="m", sweep="tune"), search=search)
    stored = StoredSweep(project="default", name="tune", sweep=sweep, actor="operator", submitter=OPERATOR)
    await context.sweeps.declare([stored], take_over=False)
    viewer = await site.with_role("viewer")
    (empty,) = ok(await viewer.get("/v1/sweeps"), SweepsReply).sweeps
    assert (empty.state, empty.trials, empty.planned, empty.method) == ("waiting", 0, 8, "tpe")

    kept, ended = await site.add(
        trial_spec(sweep, 0, {"x": 0.5, "y": 1}).with_sandbox({}), trial_spec(sweep, 1, {"x": 0.25, "y": 2})
    )
    await context.fleet.jobs.cancel(ended, f"{PRUNED}: 0.1 at step 3 is not among the best 1 of 2 trials", "hub")
    await complete(site, await site.host("gpu-1"), {kept: {"reward": 3.0, "val_loss": 9.0}})
    shown = ok(await viewer.get("/v1/sweep/default/tune"), SweepReply)
    assert shown.axes == ("x", "y")
    assert shown.sweep.objective == MetricObjective(metric="reward", direction="maximize", declared=True)
    assert shown.sweep.pruned == 1
    pruned = next(each for each in shown.trials if each.job_id == ended)
    assert (pruned.pruned, pruned.status) == (True, JobStatus.CANCELLED)
    assert shown.sweep.best is not None
    assert shown.sweep.best.parameters == {"x": 0.5, "y": 1}


async def test_sweeps_are_searched_and_paged_and_an_unknown_one_is_not_found(site: Running) -> None:
    await site.add(*(JobSpec(model="m", seed=number, sweep=f"sweep-{number}") for number in range(5)))
    await site.add(JobSpec(model="m", seed=9, sweep="Other"))
    viewer = await site.with_role("viewer")
    found = ok(await viewer.get("/v1/sweeps", params={"search": "SWEEP", "limit": 2, "offset": 4}), SweepsReply)
    assert (found.total, [each.name for each in found.sweeps]) == (5, ["sweep-4"])
    assert ok(await viewer.get("/v1/sweeps", params={"project": "none"}), SweepsReply).total == 0
    assert refused(await viewer.get("/v1/sweep/default/nothing")) == (404, "not_found")
    assert refused(await (await site.client()).get("/v1/sweeps")) == (401, "unauthenticated")
