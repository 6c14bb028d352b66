"""The expected state of an ended job, whatever was killed meanwhile: the oracle of the campaigns. Pure functions.

Each end of an attempt that is not its completion needs a cause that the campaign injected: a child that was killed, or
a host that was away longer than its lease. An end without such a cause is a job that was taken from its host wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import msgspec

from soak.fleet_agent.fleet import Operator, Plan
from strata.fleet.core.job import Cause, JobStatus
from strata.fleet.records import JobAttempt
from strata.fleet.wire.events import FeedEvent
from strata.fleet.wire.jobs import Job, JobReply

AllowedCauses = Mapping[tuple[str, int], Collection[Cause]]
"""By job and epoch, the causes with which that attempt may have ended."""


class JobEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One job, as the hub has it and as its children recorded it."""

    job: Job
    attempts: tuple[JobAttempt, ...]
    events: tuple[FeedEvent, ...]
    logs: dict[int, bytes]
    """By epoch, the log at the hub."""
    metrics: bytes
    """Of the attempt that completed."""
    files: dict[str, bytes]
    checkpoints: dict[str, int]
    """The step of each checkpoint that was acknowledged, by artifact."""
    said: dict[int, bytes]
    """By epoch, the output that its child has surely written."""
    starts: dict[int, int]


def gather_evidence(operator: Operator, found: JobReply) -> JobEvidence:
    job = found.job
    done = [each.epoch for each in found.attempts if each.outcome == "completed"]
    events = tuple(operator.events(job.id))
    kept = {event.body["artifact"] for event in events if event.kind == "job.checkpointed"}
    # A server's checkpoint is its data, which has no step.
    kept = kept if job.spec.kind == "train" else set()
    marks = {each.epoch: operator.marks / f"{job.id}-{each.epoch}" for each in found.attempts}
    said = {epoch: mark.with_suffix(".said") for epoch, mark in marks.items()}
    starts = {epoch: mark.with_suffix(".starts") for epoch, mark in marks.items()}
    return JobEvidence(
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


def find_problems(evidence: JobEvidence, plan: Plan, allowed_causes: AllowedCauses) -> list[str]:
    """Those of a job of the counting trainer."""
    found = [
        *_check_resume_points(evidence),
        *_check_logs(evidence, plan),
        *_check_metrics(evidence, plan),
        *_check_result(evidence, plan),
    ]
    return [*find_lifecycle_problems(evidence, allowed_causes), *_named(evidence, found)]


def find_lifecycle_problems(evidence: JobEvidence, allowed_causes: AllowedCauses) -> list[str]:
    """Those of a job of any trainer: completed once, each attempt claimed and started once and ended for a cause."""
    found = [*_check_completed_once(evidence), *find_attempt_problems(evidence, allowed_causes)]
    return _named(evidence, found)


def find_attempt_problems(evidence: JobEvidence, allowed_causes: AllowedCauses) -> list[str]:
    return [*_check_attempt_order(evidence), *_check_causes(evidence, allowed_causes)]


def _named(evidence: JobEvidence, problems: list[str]) -> list[str]:
    return [f"{evidence.job.id[:14]} (seed {evidence.job.spec.seed}): {problem}" for problem in problems]


def _check_completed_once(evidence: JobEvidence) -> list[str]:
    found = []
    if evidence.job.status is not JobStatus.COMPLETED:
        found.append(f"lost: it is {evidence.job.status}, {evidence.job.reason}")
    ends = [event for event in evidence.events if event.kind == "job.completed"]
    done = [each.epoch for each in evidence.attempts if each.outcome == "completed"]
    if len(ends) != 1 or done != [evidence.job.epoch]:
        found.append(f"completed {len(ends)} times, by attempts {done} of {evidence.job.epoch}")
    return found


def _check_attempt_order(evidence: JobEvidence) -> list[str]:
    claimed = [event.body["epoch"] for event in evidence.events if event.kind == "job.claimed"]
    wanted = list(range(1, evidence.job.epoch + 1))
    found = [] if claimed == wanted else [f"claimed as {claimed}, not {wanted}"]
    twice = [epoch for epoch, times in evidence.starts.items() if times > 1]
    return found + [f"attempt {epoch} was started {evidence.starts[epoch]} times" for epoch in twice]


def _check_causes(evidence: JobEvidence, allowed_causes: AllowedCauses) -> list[str]:
    found = []
    for each in evidence.attempts:
        allowed = allowed_causes.get((evidence.job.id, each.epoch), ())
        if each.outcome != "completed" and each.cause not in allowed:
            found.append(f"attempt {each.epoch} ended as {each.outcome} {each.cause}, not {set(allowed)}: {each.error}")
    expired = [event.body["epoch"] for event in evidence.events if event.kind == "job.expired"]
    unasked = [epoch for epoch in expired if Cause.HOST_LOST not in allowed_causes.get((evidence.job.id, epoch), ())]
    return found + [f"the lease of attempt {epoch} ran out, and its host was not away" for epoch in unasked]


def _check_resume_points(evidence: JobEvidence) -> list[str]:
    found = []
    step = 0
    for event in evidence.events:
        if event.kind == "job.checkpointed":
            step = evidence.checkpoints[event.body["artifact"]]
        if event.kind == "job.claimed":
            epoch = event.body["epoch"]
            begins = evidence.said.get(epoch, b"").split(b"\n")[0].decode()
            if begins and begins != f"begins at {step}":
                found.append(f"attempt {epoch} {begins}, and the last checkpoint was of step {step}")
    return found


def _check_logs(evidence: JobEvidence, plan: Plan) -> list[str]:
    """The log of a reported attempt is complete; that of a lost attempt is a prefix of the complete one."""
    found = []
    for each in evidence.attempts:
        log, said = evidence.logs[each.epoch], evidence.said.get(each.epoch, b"")
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


def _check_metrics(evidence: JobEvidence, plan: Plan) -> list[str]:
    if not evidence.metrics:
        return [] if evidence.job.status is not JobStatus.COMPLETED else ["there are no metrics"]
    reports = [json.loads(line) for line in evidence.metrics.splitlines()]
    found = [(each["step"], each["values"]["state"]) for each in reports if each["type"] == "metrics"]
    states = plan.states(evidence.job.spec.seed)
    wanted = [(step, float(states[step + 1])) for step in range(plan.steps)]
    if not found or found != wanted[found[0][0] :]:
        return [f"the metrics are of the steps {[step for step, _ in found]}, or have other values than they should"]
    return []


def _check_result(evidence: JobEvidence, plan: Plan) -> list[str]:
    if evidence.job.status is not JobStatus.COMPLETED:
        return []
    wanted = plan.files(evidence.job.spec.seed)
    wrong = sorted(name for name in {*wanted, *evidence.files} if wanted.get(name) != evidence.files.get(name))
    return [f"the result is not what an undisturbed run makes: {', '.join(wrong)}"] if wrong else []
