"""A hub with something to show: hosts with cards and load, a sweep with results, and artifacts made from each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.fleet.artifacts.manifest import ArtifactKind, Lineage
from strata.fleet.artifacts.service import once
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.search import PRUNED
from strata.fleet.records import AttemptKey, JobCompletion
from tests.conformance.artifacts.making import chunk_of, manifest_of
from tests.shell.fleet_http.running import HostClient, Running


async def add_sweep(site: Running, host: HostClient, name: str = "lr", **spec: Any) -> Sequence[str]:
    """Six trials: four completed, one pruned, one that waits. The best is the third."""
    fields = {"model": "m", "project": "default", **spec}
    ids = await site.add(
        *(
            JobSpec(sweep=name, name=f"{name}/{n}", hyper={"rate": 0.1 * 2**n, "kind": "ab"[n % 2]}, **fields)
            for n in range(6)
        )
    )
    fleet = site.hub.context.fleet
    for id_ in ids[4:5]:
        await fleet.jobs.cancel(id_, f"{PRUNED}: 2 at step 1 is not among the best 1 of 3 trials", "hub")
    losses = dict(zip(ids, (0.9, 0.5, 0.25, 0.4), strict=False))
    left = set(losses)
    while left:
        for lease in await host.claim(f"c-{name}-{len(left)}"):
            if lease.job_id in losses:
                metrics = {"loss": losses[lease.job_id], "accuracy": 1 - losses[lease.job_id]}
                await fleet.leases.complete(
                    AttemptKey(host.id, lease.job_id, lease.epoch), JobCompletion(metrics=metrics)
                )
                left.discard(lease.job_id)
    assert (await fleet.store.jobs.get(ids[0])).status is JobStatus.COMPLETED
    return ids


async def add_artifact(site: Running, content: bytes, **lineage: Any) -> str:
    artifacts = site.hub.context.artifacts
    manifest = manifest_of({"model.bin": content})
    await artifacts.plan(manifest.chunks(), "operator")
    await artifacts.put_chunk(chunk_of(content), once(content), "operator")
    fields = {"kind": ArtifactKind.RESULT, **lineage}
    return (await artifacts.commit(manifest, Lineage(**fields), "operator", owner="operator")).artifact_id


async def add_lineage(site: Running) -> Sequence[str]:
    """Data, a base model made from it, and two models tuned from that."""
    data = await add_artifact(site, b"data", kind=ArtifactKind.DATA)
    base = await add_artifact(site, b"base", model="base", mode="full", metrics={"val_loss": 0.9}, parents=(data,))
    tuned = [
        await add_artifact(
            site,
            f"tuned {n}".encode(),
            model="tuned",
            mode=f"r{n}",
            metrics={"val_loss": 0.5 - n / 10},
            parents=(base,),
        )
        for n in range(2)
    ]
    return [data, base, *tuned]


async def heartbeat(host: HostClient, sample: dict[str, Any], leases: Sequence[dict[str, Any]] = ()) -> None:
    reply = await host.http.post("/v1/heartbeats", json={"leases": list(leases), "sample": sample})
    assert reply.status_code == 200, reply.text
