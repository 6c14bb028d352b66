"""A manifest over HTTP: planned, applied, reloaded; and what is wrong with it is told before anything is queued."""

from __future__ import annotations

import json
from pathlib import Path

from strata.fleet.wire.jobs import JobsReply, SubmitReply
from strata.fleet.wire.manifests import ManifestReply, TrainersReply
from tests.shell.fleet_http.running import Running, manifest_body, ok, refused, running

TEXT = """
[trainers.gbt]
command = ["python", "train.py"]
directory = "/srv/gbt"
params = "gbt.json"

[[jobs]]
model = "gbt"
mode = "oracle"
trainer = "gbt"
hyper = { learning_rate = 0.1 }
"""
SCHEMA = {"type": "object", "properties": {"learning_rate": {"type": "number"}}, "additionalProperties": False}


async def test_a_dry_run_shows_the_plan_and_changes_nothing(site: Running) -> None:
    operator = await site.operator()
    body = manifest_body(TEXT, dry_run=True)
    planned = ok(await operator.post("/v1/manifest", json=body), ManifestReply)
    assert (planned.applied, [job.label for job in planned.new]) == (False, ["gbt-oracle"])
    assert ok(await operator.get("/v1/jobs"), JobsReply).jobs == ()
    applied = ok(await operator.post("/v1/manifest", json=body | {"dry_run": False}), ManifestReply)
    assert applied.applied
    assert applied.new == planned.new
    again = ok(await operator.post("/v1/manifest", json=body | {"dry_run": False}), ManifestReply)
    assert (again.new, again.unchanged) == ((), 1)


async def test_a_hyper_parameter_the_trainer_does_not_take_is_found_when_the_manifest_is_applied(site: Running) -> None:
    operator = await site.operator()
    wrong = TEXT.replace("learning_rate", "learning_rat")
    reply = await operator.post("/v1/manifest", json=manifest_body(wrong, schemas={"gbt": SCHEMA}))
    assert refused(reply) == (400, "invalid")
    assert 'did you mean "learning_rate"' in reply.json()["error"]["message"]
    assert "m.toml: jobs.gbt-oracle.hyper.learning_rat:" in reply.json()["error"]["message"]


async def test_the_schemas_of_trainers_are_kept_and_used_for_single_jobs(site: Running) -> None:
    operator, researcher = await site.operator(), await site.with_role("researcher")
    body = manifest_body(TEXT, schemas={"gbt": SCHEMA})
    ok(await operator.post("/v1/manifest", json=body), ManifestReply)
    trainers = ok(await researcher.get("/v1/trainers"), TrainersReply).trainers
    assert trainers["gbt"].params == SCHEMA
    wrong = {"spec": {"model": "gbt", "trainer": "gbt", "hyper": {"lr": 1}}}
    assert refused(await researcher.post("/v1/jobs", json=wrong)) == (400, "invalid")
    right = {"spec": {"model": "gbt", "trainer": "gbt", "hyper": {"learning_rate": 1}}}
    assert ok(await researcher.post("/v1/jobs", json=right), SubmitReply).new


async def test_a_reload_applies_the_file_of_the_hub_as_it_is_now(tmp_path: Path) -> None:
    file = tmp_path / "manifest.toml"
    file.write_text(TEXT)
    (tmp_path / "gbt.json").write_text(json.dumps(SCHEMA))
    async with running(tmp_path / "hub", manifest=file) as site:
        operator = await site.operator()
        assert ok(await operator.post("/v1/manifest/reload"), ManifestReply).applied
        file.write_text(TEXT.replace("0.1", "0.2"))
        reloaded = ok(await operator.post("/v1/manifest/reload"), ManifestReply)
        assert (len(reloaded.new), len(reloaded.orphaned)) == (1, 1)
        file.write_text(TEXT.replace("learning_rate", "lr"))
        assert refused(await operator.post("/v1/manifest/reload")) == (400, "invalid")
        file.write_text(TEXT.replace("gbt.json", "../../secret.json"))
        assert refused(await operator.post("/v1/manifest/reload")) == (400, "invalid")


async def test_a_hub_without_a_file_says_so(site: Running) -> None:
    assert refused(await (await site.operator()).post("/v1/manifest/reload")) == (409, "precondition")
