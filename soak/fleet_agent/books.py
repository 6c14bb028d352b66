"""What must be true of a job that is over, whoever was killed meanwhile. Pure: evidence in, sentences out.

Each end of an attempt that is not its completion needs somebody to blame: a child that was killed, a host that was away
longer than its lease. An end that nobody is to blame for is a job that was taken from a host for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import msgspec

from soak.fleet_agent.fleet import Operator, Plan
from strata.fleet import wire
from strata.fleet.core.job import Cause, JobStatus

Blame = Mapping[tuple[str, int], Collection[Cause]]
"""By job and epoch, how that attempt may have ended."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One job, from the hub and from what its children wrote down."""

    job: wire.Job
    attempts: tuple[wire.JobAttempt, ...]
    events: tuple[wire.FeedEvent, ...]
    logs: dict[int, bytes]
    """By epoch, what the hub has."""
    metrics: bytes
    """Of the attempt that completed."""
    files: dict[str, bytes]
    checkpoints: dict[str, int]
    """The step of each checkpoint that was acknowledged, by artifact."""
    said: dict[int, bytes]
    """By epoch, what its child surely said."""
    starts: dict[int, int]


def gather(operator: Operator, found: wire.JobReply) -> Evidence:
    job = found.job
    done = [each.epoch for each in found.attempts if each.outcome == "completed"]
    events = tuple(operator.events(job.id))
    kept = {event.body["artifact"] for event in events if event.kind == "job.checkpointed"}
    marks = {each.epoch: operator.marks / f"{job.id}-{each.epoch}" for each in found.attempts}
    said = {epoch: mark.with_suffix(".said") for epoch, mark in marks.items()}
    starts = {epoch: mark.with_suffix(".starts") for epoch, mark in marks.items()}
    return Evidence(
        job=job,
        attempts=found.attempts,
        events=events,
        logs={each.epoch: operator.stream(job.id, each.epoch, "log") for each in found.attempts},
        metrics=operator.stream(job.id, done[-1], "metrics") if done else b"",
        files=operator.files(job.artifact) if job.artifact else {},
        checkpoints={artifact: json.loads(operator.file(artifact, "state.json"))[0] for artifact in kept},
        said={epoch: path.read_bytes() for epoch, path in said.items() if path.exists()},
        starts={epoch: len(path.read_text().splitlines()) for epoch, path in starts.items() if path.exists()},
    )


def problems(seen: Evidence, plan: Plan, blame: Blame) -> list[str]:
    found = [
        *_completed_once(seen),
        *_attempts_in_order(seen),
        *_ends_are_explained(seen, blame),
        *_resumed_from_the_last_checkpoint(seen),
        *_logs_are_whole(seen, plan),
        *_metrics_are_whole(seen, plan),
        *_result_is_right(seen, plan),
    ]
    return [f"{seen.job.id[:14]} (seed {seen.job.spec.seed}): {problem}" for problem in found]


def _completed_once(seen: Evidence) -> list[str]:
    found = []
    if seen.job.status is not JobStatus.COMPLETED:
        found.append(f"lost: it is {seen.job.status}, {seen.job.reason}")
    ends = [event for event in seen.events if event.kind == "job.completed"]
    done = [each.epoch for each in seen.attempts if each.outcome == "completed"]
    if len(ends) != 1 or done != [seen.job.epoch]:
        found.append(f"completed {len(ends)} times, by attempts {done} of {seen.job.epoch}")
    return found


def _attempts_in_order(seen: Evidence) -> list[str]:
    claimed = [event.body["epoch"] for event in seen.events if event.kind == "job.claimed"]
    wanted = list(range(1, seen.job.epoch + 1))
    found = [] if claimed == wanted else [f"claimed as {claimed}, not {wanted}"]
    twice = [epoch for epoch, times in seen.starts.items() if times > 1]
    return found + [f"attempt {epoch} was started {seen.starts[epoch]} times" for epoch in twice]


def _ends_are_explained(seen: Evidence, blame: Blame) -> list[str]:
    found = []
    for each in seen.attempts:
        allowed = blame.get((seen.job.id, each.epoch), ())
        if each.outcome != "completed" and each.cause not in allowed:
            found.append(f"attempt {each.epoch} ended as {each.outcome} {each.cause}, not {set(allowed)}: {each.error}")
    expired = [event.body["epoch"] for event in seen.events if event.kind == "job.expired"]
    unasked = [epoch for epoch in expired if Cause.HOST_LOST not in blame.get((seen.job.id, epoch), ())]
    return found + [f"the lease of attempt {epoch} ran out, and its host was not away" for epoch in unasked]


def _resumed_from_the_last_checkpoint(seen: Evidence) -> list[str]:
    found = []
    step = 0
    for event in seen.events:
        if event.kind == "job.checkpointed":
            step = seen.checkpoints[event.body["artifact"]]
        if event.kind == "job.claimed":
            epoch = event.body["epoch"]
            begins = seen.said.get(epoch, b"").split(b"\n")[0].decode()
            if begins and begins != f"begins at {step}":
                found.append(f"attempt {epoch} {begins}, and the last checkpoint was of step {step}")
    return found


def _logs_are_whole(seen: Evidence, plan: Plan) -> list[str]:
    """Of an attempt that its host reported all of it; of one that was lost as much as had come, and nothing else."""
    found = []
    for each in seen.attempts:
        log, said = seen.logs[each.epoch], seen.said.get(each.epoch, b"")
        begin = int(said.split(b"\n")[0].rpartition(b" ")[2]) if b"\n" in said else None
        whole = b"" if begin is None else plan.log(begin).encode()
        if each.outcome == "completed" and log != whole:
            found.append(f"the log of attempt {each.epoch} {_difference(log, whole)}")
        elif begin is not None and not whole.startswith(log):
            found.append(f"the log of attempt {each.epoch}, {each.outcome}, {_difference(log, whole)}")
        elif each.cause is Cause.OOM and len(log) < len(said):
            found.append(f"the log of attempt {each.epoch}, whose child died, lost {len(said) - len(log)} bytes")
    return found


def _difference(log: bytes, whole: bytes) -> str:
    same = next((n for n, (a, b) in enumerate(zip(log, whole, strict=False)) if a != b), min(len(log), len(whole)))
    return f"has {len(log)} bytes and not {len(whole)}; they differ at byte {same}"


def _metrics_are_whole(seen: Evidence, plan: Plan) -> list[str]:
    if not seen.metrics:
        return [] if seen.job.status is not JobStatus.COMPLETED else ["there are no metrics"]
    reports = [json.loads(line) for line in seen.metrics.splitlines()]
    found = [(each["step"], each["values"]["state"]) for each in reports if each["type"] == "metrics"]
    states = plan.states(seen.job.spec.seed)
    wanted = [(step, float(states[step + 1])) for step in range(plan.steps)]
    if not found or found != wanted[found[0][0] :]:
        return [f"the metrics are of the steps {[step for step, _ in found]}, or have other values than they should"]
    return []


def _result_is_right(seen: Evidence, plan: Plan) -> list[str]:
    if seen.job.status is not JobStatus.COMPLETED:
        return []
    wanted = plan.files(seen.job.spec.seed)
    wrong = sorted(name for name in {*wanted, *seen.files} if wanted.get(name) != seen.files.get(name))
    return [f"the result is not what an undisturbed run makes: {', '.join(wrong)}"] if wrong else []
