"""`GET /v1/hosts`, the policy of a host in words, and what an action on it would do."""

from __future__ import annotations

from strata.fleet.core.jobspec import JobSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.wire.hosts import Host, HostPageReply, HostPlanReply, HostPolicyReply
from strata.fleet.wire.manifests import ManifestReply
from tests.shell.fleet_http.running import Running, manifest_body, ok, refused

GPUS = [{"name": "A100", "vram_bytes": 80 << 30, "uuid": "GPU-0"}, {"name": "A100", "vram_bytes": 80 << 30}]
POLICY = """
[trainers.default]
command = ["python", "train.py"]
directory = "/code"

[hosts.gpu-1]
allow_jobs = ["llama*"]
quiet_hours = ["mon-fri 09:00-17:30"]
"""


async def test_a_page_of_hosts_has_load_cards_and_jobs(site: Running) -> None:
    await site.add(JobSpec(model="m", name="train", needs=Needs(min_gpus=1)))
    host = await site.host("gpu-1", gpus=GPUS, cores=8, cuda="12.4")
    await site.host("cpu-1", cores=4)
    (lease,) = await host.claim()
    sample = {"cpu_use": 0.5, "cards": [{"card": "GPU-0", "use": 0.9, "vram_used_gib": 40.0}]}
    beat = {"leases": [{"job_id": lease.job_id, "epoch": lease.epoch, "running": True}], "sample": sample}
    assert (await host.http.post("/v1/heartbeats", json=beat)).status_code == 200

    viewer = await site.with_role("viewer")
    page = ok(await viewer.get("/v1/hosts"), HostPageReply)
    assert (page.total, page.by_status) == (2, {"online": 2})
    assert [each.name for each in page.hosts] == ["cpu-1", "gpu-1"]
    gpu = page.hosts[1]
    assert (gpu.status, gpu.cores, gpu.cpu_use) == ("online", 8, 0.5)
    assert [(card.id, card.use, card.vram_gib) for card in gpu.cards] == [("GPU-0", 0.9, 80.0), ("1", None, 80.0)]
    assert sum(card.taken for card in gpu.cards) == 1.0
    assert [(job.label, job.status) for job in gpu.jobs] == [("train", "running")]
    busiest = ok(await viewer.get("/v1/hosts", params={"sort": "load"}), HostPageReply)
    assert [each.name for each in busiest.hosts] == ["gpu-1", "cpu-1"]


async def test_hosts_are_searched_by_name_label_and_card_and_chosen_by_status(site: Running) -> None:
    await site.host("alpha", gpus=GPUS, labels={"rack": "r7"})
    paused = await site.host("beta")
    operator = await site.operator()
    assert (await operator.post(f"/v1/host/{paused.id}/pause", json={})).status_code == 200
    viewer = await site.with_role("viewer")

    async def names(**query: str | int) -> list[str]:
        return [each.name for each in ok(await viewer.get("/v1/hosts", params=query), HostPageReply).hosts]

    assert await names(search="ALPH") == ["alpha"]
    assert await names(search="rack=r7") == ["alpha"]
    assert await names(search="a100") == ["alpha"]
    assert await names(search="nothing") == []
    assert await names(status="paused") == ["beta"]
    assert await names(limit=1, offset=1) == ["beta"]


async def test_a_policy_is_told_in_words_with_the_hours_of_the_host(site: Running) -> None:
    await site.host("gpu-1", utc_offset_min=60)
    await site.host("gpu-2")
    operator = await site.operator()
    ok(await operator.post("/v1/manifest", json=manifest_body(POLICY)), ManifestReply)
    viewer = await site.with_role("viewer")
    policy = ok(await viewer.get("/v1/host/gpu-1/policy"), HostPolicyReply)
    assert policy.rules == ("Only these jobs may run here: llama*.",)
    assert (policy.project, policy.quiet_hours) == ("default", ("Monday to Friday 09:00-17:30",))
    assert policy.utc_offset_min == 60
    free = ok(await viewer.get("/v1/host/gpu-2/policy"), HostPolicyReply)
    assert (free.project, free.quiet_hours) == ("", ())


async def test_the_plan_of_an_action_names_the_jobs_and_changes_nothing(site: Running) -> None:
    await site.add(*(JobSpec(model="m", name=f"job-{seed}", seed=seed) for seed in range(3)))
    host = await site.host("gpu-1")
    (lease,) = await host.claim()
    operator = await site.operator()
    drain = ok(await operator.get("/v1/host/gpu-1/plan", params={"action": "drain"}), HostPlanReply)
    assert (drain.possible, drain.stranded, drain.ends) == (True, 2, ())
    assert [job.job_id for job in drain.stays] == [lease.job_id]
    revoke = ok(await operator.get("/v1/host/gpu-1/plan", params={"action": "revoke"}), HostPlanReply)
    assert [job.job_id for job in revoke.ends] == [lease.job_id]
    assert ok(await operator.get("/v1/host/gpu-1"), Host).state == "active"
    await site.host("gpu-2")
    again = ok(await operator.get("/v1/host/gpu-1/plan", params={"action": "drain"}), HostPlanReply)
    assert again.stranded == 0, "another host takes them"
    viewer = await site.with_role("viewer")
    assert refused(await viewer.get("/v1/host/gpu-1/plan", params={"action": "drain"})) == (403, "forbidden")
