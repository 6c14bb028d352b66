"""Looking at jobs and hosts, changing them, and the exit status that tells a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.cli.exit_codes import ExitCode
from strata.fleet.core.capability import Capability, Gpu
from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.requirement import Needs
from strata.fleet.core.samples import CardSample, HostSample
from strata.fleet.wire.identities import HubKeyReply, HubKeyRequest
from strata.fleet.wire.leases import CompleteRequest, LeaseHeld
from tests.shell.cli_fleet.driving import HostByHand, Person
from tests.shell.fleet_agent.running import HubProcess

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: it broke\nand this is why\n'


@pytest.fixture
def applied(person: Person, manifest: Path) -> Person:
    assert person.says("apply", str(manifest)).status == 0
    return person


def test_the_status_shows_what_failed_with_its_error(applied: Person, host: HostByHand) -> None:
    host.fails(TRACEBACK)
    lines = applied.says("status").out.splitlines()
    assert lines[0] == "2 jobs: 1 pending, 1 failed"
    assert lines[1] == "1 host: here (online)"
    assert lines[3].split() == ["ID", "FAILED", "ATTEMPT", "ERROR"]
    assert lines[4].endswith("tree-small        1  ValueError: it broke")
    assert max(map(len, lines)) <= 80


def test_jobs_are_found_by_id_prefix_and_label(applied: Person) -> None:
    rows = {row["job"]: row["id"] for row in applied.says("list", "-o", "json").value}
    whole = rows["tree-small"]
    for text in (whole, whole[:20], whole.removeprefix("job1_")[:10], "tree-small"):
        assert applied.says("show", text, "-o", "json").value["id"] == whole
    assert applied.says("show", "tree-medium").status == ExitCode.NOT_FOUND
    assert applied.says("jobs", "--status", "completed", "-o", "json").value == []


def test_why_names_the_constraint_and_the_fix_and_exits_with_unschedulable(applied: Person, host: HostByHand) -> None:
    done = applied.says("why", "tree-large")
    assert done.status == ExitCode.UNSCHEDULABLE
    assert "the only host is not eligible" in done.out
    assert "allowed_hosts:" in done.out
    assert "fix: " in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    assert applied.says("why", "tree-small").status == ExitCode.OK


def test_why_of_a_job_that_ended_says_how(applied: Person, host: HostByHand) -> None:
    host.fails(TRACEBACK)
    done = applied.says("why", "tree-small")
    assert (done.status, done.out.splitlines()) == (
        ExitCode.OK,
        [
            "tree-small has failed: user_error: attempt 1 of 1 failed",
            "  ValueError: it broke",
            "  full log: strata logs tree-small",
        ],
    )
    applied.says("requeue", "tree-small")
    lease = host.claim()
    assert applied.says("why", "tree-small").out == "tree-small is claimed: a host has it\n"
    host.hub.complete(lease, CompleteRequest(epoch=lease.epoch))
    assert applied.says("why", "tree-small").out == "tree-small is completed\n"


def test_cancel_and_requeue_change_all_jobs_or_none(applied: Person) -> None:
    assert applied.says("cancel", "tree-small", "tree-medium").status == ExitCode.NOT_FOUND
    assert {row["status"] for row in applied.says("list", "-o", "json").value} == {"pending"}
    done = applied.says("cancel", "tree-small", "tree-large", "--reason", "enough", "-o", "json")
    assert [(row["status"], row["reason"]) for row in done.value] == [("cancelled", "enough")] * 2
    assert applied.says("wait", "tree-small").status == ExitCode.CANCELLED
    assert applied.says("requeue", "tree-small", "-o", "json").value[0]["status"] == "pending"


def test_wait_says_how_it_ended(applied: Person, host: HostByHand) -> None:
    assert applied.says("wait", "tree-small", "--timeout", "0.2").status == ExitCode.UNFINISHED
    host.fails(TRACEBACK)
    done = applied.says("wait", "tree-small")
    assert (done.status, done.out) == (ExitCode.FAILED, "")
    assert done.err.startswith("failed     tree-small on here in ")
    assert done.err.endswith("ValueError: it broke\n")
    applied.says("requeue", "tree-small")
    host.completes()
    assert applied.says("wait", "tree-small").status == ExitCode.OK


def test_a_host_is_paused_drained_and_resumed_by_name(person: Person, host: HostByHand) -> None:
    for verb, state in (("pause", "paused"), ("drain", "draining"), ("resume", "active")):
        assert person.says(verb, host.name, "-o", "json").value[0]["state"] == state
        assert person.says("hosts", "-o", "json").value[0]["state"] == state
    assert person.says("drain", "there").status == ExitCode.NOT_FOUND


def test_a_host_is_shown_with_what_runs_there_and_what_is_free(
    person: Person, hub: HubProcess, host: HostByHand
) -> None:
    cards = tuple(Gpu(name="RTX 4090", vram_bytes=24 << 30, uuid=f"GPU-{letter}") for letter in "ab")
    lacks = ("no namespaces: bubblewrap is not installed",)
    host.hub.register(
        Capability(hostname="here", cores=8, ram_bytes=32 << 30, gpus=cards, sandbox="user", sandbox_lacks=lacks)
    )
    free = person.says("hosts", "show", "here", "-o", "json").value
    assert (free["free"], free["held"]) == (free["capacity"], [])
    trainer = TrainerSpec(name="t", command=("true",), directory="/usr/share")
    needs = Needs(min_cores=2, min_ram_gib=4.0, min_gpus=1)
    job = hub.submit_with(trainer, JobSpec(model="tree", trainer="t", needs=needs))
    held = host.claim().taken.cards
    usage = CardSample(card=held[0], use=0.5, vram_used_gib=3.0, temperature_c=61, power_w=212)
    sample = HostSample(cpu_use=0.25, disk_free_gib=100.0, environments_gib=1.5, cards=(usage,))
    host.hub.renew((), sample)
    shown = person.says("hosts", "show", "here").out
    assert "capacity  8 cores, 32 GiB of memory, 2 cards (48 GiB)" in shown
    assert "free      6 cores, 28 GiB of memory, 1 card (24 GiB)" in shown
    assert f"sandbox   user\n          {lacks[0]}" in shown
    assert "use       processors 25%, 100.0 GiB of disk free" in shown
    assert "caches    environments 1.5 GiB" in shown
    assert "RTX 4090, 0 GiB free, 50% busy, 3.0 GiB used, 61 °C, 212 W" in shown
    assert "2 cores, 4 GiB, 1 of 1 card" in shown
    (row,) = person.says("hosts", "show", "here", "-o", "json").value["held"]
    assert (row["job_id"], row["owner"], row["taken"]["cores"]) == (job, "operator", 2)
    assert person.says("hosts", "show", "there").status == ExitCode.NOT_FOUND


def test_a_key_works_until_it_is_revoked(person: Person, hub: HubProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    made = person.says("keys", "create", "bob", "--role", "viewer", "-o", "json").value
    assert made["secret"] not in person.says("keys", "list").out
    monkeypatch.setenv("STRATA_URL", hub.url)
    monkeypatch.setenv("STRATA_OPERATOR_TOKEN", made["secret"])
    assert person.says("status").status == ExitCode.OK
    assert person.says("drain", "here").status in (ExitCode.AUTH, ExitCode.NOT_FOUND)
    assert person.says("keys", "list").status == ExitCode.AUTH
    monkeypatch.delenv("STRATA_OPERATOR_TOKEN")
    monkeypatch.delenv("STRATA_URL")
    assert person.says("keys", "revoke", made["id"]).status == ExitCode.OK
    monkeypatch.setenv("STRATA_URL", hub.url)
    monkeypatch.setenv("STRATA_OPERATOR_TOKEN", made["secret"])
    assert person.says("status").status == ExitCode.AUTH


def test_an_archived_job_is_shown_only_when_all_are_asked_for(applied: Person, host: HostByHand) -> None:
    host.fails(TRACEBACK)
    assert applied.says("archive", "tree-large").status == ExitCode.FAILED
    assert applied.says("archive", "tree-small", "-o", "json").value[0]["archived"] is True
    assert applied.says("status").out.splitlines()[0] == "1 job: 1 pending"
    assert [row["job"] for row in applied.says("list", "-o", "json").value] == ["tree-large"]
    assert len(applied.says("list", "--all", "-o", "json").value) == 2
    assert "hidden    archived" in applied.says("show", "tree-small").out
    assert applied.says("requeue", "tree-small", "-o", "json").value[0]["archived"] is False


def test_of_jobs_with_one_name_the_newest_wins_and_older_ones_have_a_number(person: Person, manifest: Path) -> None:
    text = manifest.read_text()
    ids = []
    for seed in (1, 2, 3):
        manifest.write_text(text.replace('mode = "small"', f'mode = "small"\nseed = {seed}'))
        assert person.says("apply", str(manifest)).status == 0
        ids.append(person.says("show", "tree-small", "-o", "json").value["id"])
        assert person.says("show", "tree-small@1", "-o", "json").value["id"] == ids[-1]
    assert len(set(ids)) == 3
    assert person.says("show", "tree-small@2", "-o", "json").value["id"] == ids[1]
    assert person.says("show", "tree-small@4").status == ExitCode.NOT_FOUND
    assert "tree-small@3" in person.says("list").out
    assert person.says("cancel", "tree-small@2", "tree-small@3").status == ExitCode.OK
    assert "tree-small@" not in person.says("list").out
    assert "tree-small@3" in person.says("list", "--all").out
    assert person.says("cancel", "tree-small", "-o", "json").value[0]["id"] == ids[2]


def test_jobs_are_listed_by_owner_and_project(applied: Person) -> None:
    assert len(applied.says("list", "--mine", "-o", "json").value) == 2
    assert {row["owner"] for row in applied.says("list", "--owner", "operator", "-o", "json").value} == {"operator"}
    assert applied.says("list", "--owner", "anna", "-o", "json").value == []
    assert applied.says("list", "--project", "elsewhere", "-o", "json").value == []


def test_quotas_are_shown_and_set(applied: Person) -> None:
    assert applied.says("quota", "set", "anna", "--jobs", "5", "--priority=-1:10").status == ExitCode.OK
    assert applied.says("quota", "set", "anna", "--gpu-hours", "500/7d", "--bytes", "2GiB").status == ExitCode.OK
    rows = {row["owner"]: row for row in applied.says("quota", "-o", "json").value}
    assert rows["anna"] == {
        "owner": "anna",
        "jobs": 0,
        "max_jobs": 5,
        "min_priority": -1,
        "max_priority": 10,
        "gpu_hours": 0.0,
        "max_gpu_hours": 500.0,
        "window_s": 7 * 86_400.0,
        "bytes": 0,
        "max_bytes": 2 << 30,
        "set": True,
    }
    assert (rows["operator"]["jobs"], rows["operator"]["set"]) == (2, False)
    assert "-1:10" in applied.says("quota").out
    assert "2.0 GiB" in applied.says("quota").out
    assert applied.says("quota", "set", "anna", "--bytes", "two").status == ExitCode.USAGE
    assert applied.says("quota", "set", "anna", "--bytes", "any").status == ExitCode.OK
    assert applied.says("quota", "set", "anna", "--jobs", "any").status == ExitCode.OK
    assert applied.says("quota", "set", "anna").status == ExitCode.USAGE
    assert applied.says("quota", "remove", "anna").status == ExitCode.OK
    assert "anna" not in applied.says("quota").out


def test_events_are_chosen_by_kind_and_text_and_number(applied: Person, host: HostByHand) -> None:
    host.claim()
    rows = applied.says("events", "--kind", "job.cl*", "-o", "json").value
    assert [row["event"] for row in rows] == ["job.claimed"]
    created = applied.says("events", "--kind", "job.created", "-o", "json").value
    assert len(created) > 1
    assert applied.says("events", "--kind", "job.created", "-n", "1", "-o", "json").value == created[-1:]
    found = applied.says("events", "--search", rows[0]["subject"], "-o", "json").value
    assert {row["subject"] for row in found} == {rows[0]["subject"]}


def test_goodput_adds_up_to_the_time_of_a_job(applied: Person, host: HostByHand) -> None:
    lease = host.claim()
    host.hub.renew((LeaseHeld(job_id=lease.job_id, epoch=lease.epoch, running=True),))
    host.hub.complete(lease, CompleteRequest(epoch=lease.epoch))
    told = applied.says("goodput", lease.spec.label, "-o", "json").value
    assert sum(told["seconds"].values()) == pytest.approx(told["wall_s"])
    assert told["interruptions"] == []
    shown = applied.says("goodput").out
    assert "the last 24 h" in shown
    assert "waited to run at first" in shown


def test_events_say_who_changed_what(applied: Person, host: HostByHand) -> None:
    host.completes()
    applied.says("cancel", "tree-large", "--reason", "enough")
    rows = applied.says("events", "--job", "tree-large", "-o", "json").value
    assert [(row["event"], row["by"]) for row in rows] == [("job.created", "operator"), ("job.cancelled", "operator")]
    assert rows[-1]["body"]["reason"] == "enough"
    table = applied.says("events").out.splitlines()
    assert table[0].split() == ["TIME", "EVENT", "SUBJECT", "BY", "ADDRESS"]
    kinds = [row["event"] for row in applied.says("events", "-o", "json").value]
    assert {"host.registered", "job.claimed", "job.completed", "manifest.applied"} <= set(kinds)


def test_a_name_that_no_job_has_is_answered_with_those_that_begin_so(applied: Person) -> None:
    assert "there is no job 'tree', did you mean tree-large or tree-small?" in applied.says("show", "tree").err
    assert "tree-small" in applied.says("show", "tree-smal").err
    assert "did you mean" not in applied.says("show", "zebra").err


def test_events_name_the_person_and_the_job(applied: Person, hub: HubProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    body = HubKeyRequest(name="lab", role="operator")
    key = hub.operator.call("POST", "/v1/keys", HubKeyReply, body=body)
    monkeypatch.setenv("STRATA_OPERATOR_TOKEN", key.secret)
    monkeypatch.setenv("STRATA_URL", hub.address)
    assert applied.says("cancel", "tree-large").status == ExitCode.OK
    (row,) = applied.says("events", "--kind", "job.cancelled", "-o", "json").value
    assert (row["by"], row["by_name"], row["name"]) == (f"key:{key.key.id}", "lab", "tree-large")
    line = applied.says("events", "--kind", "job.cancelled").out.splitlines()[1]
    assert "tree-large" in line
    assert " lab" in line


def test_a_drain_says_which_jobs_the_host_still_has(applied: Person, host: HostByHand) -> None:
    host.claim()
    assert "here ends with tree-small; follow it with 'strata wait'" in applied.says("drain", "here").err
    assert "here is empty" not in applied.says("drain", "here").err
