"""What needs a person: said once, with its reason and one thing to do."""

from __future__ import annotations

from strata.fleet.core.attention import (
    SHOWN,
    FailedJob,
    HubBackups,
    HubDisk,
    SilentHost,
    check_backlog,
    check_backups,
    check_disk,
    check_failed,
    check_silent,
    check_unservable,
)

GIB = 1 << 30


def test_a_disk_is_told_of_before_it_is_full_and_when_writes_fail() -> None:
    assert list(check_disk(HubDisk(10 * GIB, GIB, writable=True), 5.0)) == []
    (low,) = check_disk(HubDisk(GIB + 1, GIB, writable=True), 5.0)
    assert (low.kind, low.action, low.since_s) == ("hub_disk", "free_disk", 5.0)
    (failing,) = check_disk(HubDisk(10 * GIB, GIB, writable=False), 5.0)
    assert "cannot write" in failing.what


def test_a_backup_needs_attention_when_it_is_old_or_missing_and_backups_are_scheduled() -> None:
    assert list(check_backups(None, 5.0)) == []
    assert list(check_backups(HubBackups(100.0, 3600.0), 3700.0)) == []
    (old,) = check_backups(HubBackups(100.0, 3600.0), 7300.5)
    assert (old.kind, old.since_s, old.why) == (
        "hub_backup",
        3700.0,
        "the newest complete one is 2 hours old; it may be 1",
    )
    (never,) = check_backups(HubBackups(None, 3600.0, "/b cannot be read"), 5.0)
    assert (never.what, never.why, never.since_s) == ("The hub has no backup", "/b cannot be read", 5.0)


def test_many_hosts_and_jobs_are_summed_up() -> None:
    hosts = [SilentHost(f"host_{n}", f"h{n}", float(n)) for n in range(SHOWN + 3)]
    found = list(check_silent(hosts))
    assert [each.subject for each in found[:2]] == [f"host_{SHOWN + 2}", f"host_{SHOWN + 1}"], "the last one first"
    assert found[-1].what == "3 more hosts do not answer"
    failed = [FailedJob(f"job{n}", f"j{n}", 100.0 - n, "exit code 1\nTraceback") for n in range(SHOWN + 2)]
    items = list(check_failed(failed))
    assert [each.kind for each in items] == ["failed_job"] * SHOWN + ["failed_jobs"]
    assert (items[0].what, items[0].why, items[-1].jobs) == ("j0 failed", "exit code 1", 2)
    assert list(check_failed(failed[:1]))[-1].kind == "failed_job"
    assert (
        check_unservable("job1", "big", 3, 0.0, "no host has 80 GiB", "").what == "big and 2 more jobs can run nowhere"
    )


def test_a_queue_is_a_backlog_when_it_has_grown_and_somebody_has_waited_long() -> None:
    growing = [(float(at_s), 5.0 + at_s / 100) for at_s in range(0, 3600, 60)]
    (found,) = check_backlog(growing, 41, 1200.0, 3600.0)
    assert (found.kind, found.since_s, found.jobs) == ("backlog", 0.0, 41)
    assert "the first has waited for 20 minutes" in found.why
    steady = [(float(at_s), 40.0) for at_s in range(0, 3600, 60)]
    assert list(check_backlog(steady, 41, 1200.0, 3600.0)) == []
    assert list(check_backlog(growing, 41, 60.0, 3600.0)) == [], "they wait for a minute"
    assert list(check_backlog([], 41, 1200.0, 3600.0)) == []
