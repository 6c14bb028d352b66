"""Checkpoints that an operator requests: of a future step that all ranks share.

Ranks are not in step: one that writes while another computes would wait for ever. So the coordinator names a step that
no rank has finished, as an argument of the command. A rank that has not finished it promises, in its heartbeats, not to
go past it before it knows the result; a rank that has refuses by acknowledging the command without the promise, and the
coordinator names a later step. When every rank has promised, the step is agreed. Promises are soft state: each
heartbeat repeats them, so a new leader collects them again. What is agreed is a fact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from strata.base.errors import Code, StrataError
from strata.coord.core.facts import (
    CheckpointAgreed,
    CheckpointRequested,
    CheckpointStepNamed,
    CommandIssued,
    CommandKind,
    DrainBegun,
    Fact,
    parts_of,
)
from strata.coord.core.inputs import IssueCommand, IssuedCommand
from strata.coord.core.state import CheckpointRequest, JobState, PendingCheckpoint, SoftState, StepProgress

STEPS_AHEAD: Final = 2
"""How far behind the rank that is furthest the first step lies that is named; twice as far after each refusal."""
MOST_DOUBLINGS: Final = 12
STEP: Final = "step"
"""The argument of CHECKPOINT_NOW that names the step."""
AFTER: Final = "after"
AFTER_CHECKPOINT: Final = "checkpoint"
"""The argument of DRAIN to a worker that leaves when the next checkpoint is committed."""


def issue_checkpoint(job: JobState, soft: SoftState, request: IssueCommand) -> tuple[list[Fact], IssuedCommand]:
    """A request that comes while ranks agree on the step of another one shares that one's checkpoint."""
    members = tuple(job.members)
    is_complete = not request.workers or set(request.workers) == set(members)
    pending = job.checkpoint_request
    if pending is not None and (pending.generation or pending.command_id in job.commands):
        facts: list[Fact] = _remember(job, request, pending.command_id) if request.request_id else []
        return facts, IssuedCommand(pending.command_id, members)
    command_id = job.last_command + 1
    requested = CheckpointRequested(job.job, command_id, request.reason)
    steps = _agreeing_steps(job, soft)
    if steps is None:
        # Programs that do not agree on steps write one where they are.
        workers = tuple(dict.fromkeys(request.workers or members))
        facts = _commands(job, command_id, request, workers)
        return [*facts, requested] if is_complete else facts, IssuedCommand(command_id, workers)
    if not is_complete:
        raise StrataError(Code.INVALID, f"a checkpoint of job {job.job!r} is one of all its workers", hint="name none")
    return [requested, *_name_step(job, command_id, request, max(steps), 0)], IssuedCommand(command_id, members)


def issue_drain(
    job: JobState, soft: SoftState, request: IssueCommand, workers: tuple[str, ...]
) -> tuple[list[Fact], IssuedCommand] | None:
    """Workers of a job whose ranks agree on steps leave with a checkpoint, so that no step is lost. None: of others."""
    steps = _agreeing_steps(job, soft)
    if steps is None or all(job.members[each].worker.elastic for each in workers):
        return None
    drain_id = job.last_command + 1
    arguments = {**request.arguments, AFTER: AFTER_CHECKPOINT}
    facts = _commands(job, drain_id, replace(request, arguments=arguments), workers)
    pending = job.checkpoint_request
    is_shared = pending is not None and pending.generation > 0
    checkpoint_id = pending.command_id if pending is not None and is_shared else drain_id + 1
    facts += [CheckpointRequested(job.job, checkpoint_id, request.reason, names) for names in parts_of(workers)]
    if not is_shared:
        plain = IssueCommand(job.job, CommandKind.CHECKPOINT_NOW, reason=request.reason)
        facts += _name_step(job, checkpoint_id, plain, max(steps), 0)
    return facts, IssuedCommand(drain_id, workers)


def _remember(job: JobState, request: IssueCommand, command_id: int) -> list[Fact]:
    """A fact without workers: only the id of the request and the command that answers it."""
    return [CommandIssued(job.job, command_id, request.kind, (), request.reason, {}, request.request_id)]


def _name_step(job: JobState, command_id: int, request: IssueCommand, highest: int, attempts: int) -> list[Fact]:
    step = highest + (STEPS_AHEAD << min(attempts, MOST_DOUBLINGS))
    request = replace(request, arguments={**request.arguments, STEP: str(step)})
    return [
        *_commands(job, command_id, request, tuple(job.members)),
        CheckpointStepNamed(job.job, command_id, job.generation, step),
    ]


def _commands(job: JobState, command_id: int, request: IssueCommand, workers: tuple[str, ...]) -> list[Fact]:
    return [
        CommandIssued(job.job, command_id, request.kind, names, request.reason, request.arguments, request.request_id)
        for names in parts_of(workers)
    ]


def _reports(job: JobState, soft: SoftState) -> dict[str, StepProgress] | None:
    """The steps of all ranks of the generation; None while one of them has reported none."""
    found: dict[str, StepProgress] = {}
    for worker_id in job.ranks:
        report = soft.progress.get(worker_id)
        if report is None or report.generation not in (0, job.generation):
            return None
        found[worker_id] = report
    return found


def _agreeing_steps(job: JobState, soft: SoftState) -> list[int] | None:
    """None: the programs of some ranks do not agree on steps, or have not yet."""
    reports = _reports(job, soft) if job.settled and job.ranks else None
    if reports is None or any(each.checkpoint_step is None for each in reports.values()):
        return None
    return [each.step for each in reports.values()]


def advance(job: JobState, soft: SoftState) -> list[Fact]:
    """Agree on the step that was named, or name another one; nothing while ranks have yet to reply."""
    request = job.checkpoint_request
    steps = _agreeing_steps(job, soft) if request is not None else None
    if request is None or steps is None:
        return []
    again = IssueCommand(job.job, CommandKind.CHECKPOINT_NOW, reason=request.reason)
    if request.generation != job.generation:
        return _name_step(job, job.last_command + 1, again, max(steps), 0)
    if request.agreed:
        is_over = _is_missed(job, soft, request)
    elif all(soft.progress[worker_id].checkpoint_step == request.step for worker_id in job.ranks):
        return [CheckpointAgreed(job.job, job.generation, request.step)]
    else:
        is_over = request.proposal not in job.commands
    if not is_over:
        return []
    return _name_step(job, job.last_command + 1, again, max(*steps, request.step), request.attempts)


def _is_missed(job: JobState, soft: SoftState, request: CheckpointRequest) -> bool:
    """Whether the agreed step cannot be committed any more: a rank went past it, or a later one is committed."""
    if job.checkpoints and job.checkpoints[-1].generation == job.generation and job.checkpoints[-1].step > request.step:
        return True
    pending = _pending(job, request.step)
    for worker_id, report in (_reports(job, soft) or {}).items():
        has_written = pending is not None and worker_id in pending.parts
        is_writing = report.checkpoint_step == request.step
        if report.step > request.step and not (is_writing or has_written):
            return True
    return False


def _pending(job: JobState, step: int) -> PendingCheckpoint | None:
    return next((each for each in job.collecting.values() if each.step == step), None)


def answered_by(job: JobState, step: int) -> CheckpointRequest | None:
    """The request that a checkpoint of this step answers, when it is committed now."""
    request = job.checkpoint_request
    if request is None or (request.generation and (request.generation, request.step) != (job.generation, step)):
        return None
    return request


def begin_drain(job: JobState, request: CheckpointRequest | None) -> list[Fact]:
    """What follows from the commit of a checkpoint that was requested for a drain."""
    workers = tuple(worker_id for worker_id in (request.drain if request else ()) if worker_id in job.members)
    if request is None or not workers:
        return []
    # A worker that does not wait for the commit learns it from the command.
    command_id = job.last_command + 1
    return [
        *(DrainBegun(job.job, names) for names in parts_of(workers)),
        *(CommandIssued(job.job, command_id, CommandKind.DRAIN, names, request.reason) for names in parts_of(workers)),
    ]
