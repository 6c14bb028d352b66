"""Checkpoints and drains that an operator requests: how the shared future step is chosen, how far ahead it lies, how
many agreed steps ranks may miss (3), how long they may share no step (20 s), and when the request is refused.

Ranks are not in step: one that writes while another computes would wait for ever. So the coordinator names a step that
no rank has finished, as an argument of the command. A rank that has not finished it promises, in its heartbeats, not to
go past it before it knows the result; a rank that has refuses by acknowledging the command without the promise, and the
coordinator names a later step. When every rank has promised, the step is agreed. Promises are soft state: each
heartbeat repeats them, so a new leader collects them again. What is agreed is a fact.

A program may ask after every n-th step only. Its heartbeats say after which (`StepProgress.asked_step` and
`asked_stride`), and a step is named that all ranks ask after. Where there is none for a while, or ranks keep going past
what they agreed on, the request is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, islice
from math import gcd, lcm
from typing import Final

from strata.base.errors import Code, StrataError
from strata.coord.core.facts import (
    CheckpointAgreed,
    CheckpointRefused,
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
MOST_MISSED: Final = 3
"""So many agreed steps may be gone past: with one irregular step a program misses one or two."""
UNMATCHED_S: Final = 20.0
"""So long ranks may share no step: their heartbeats are not of one moment."""
FARTHEST: Final = 1 << 14
"""A shared step that lies farther ahead, also in strides of the ranks, is none."""
FARTHEST_STRIDES: Final = 4
FARTHEST_COMMON: Final = 1 << 62
MOST_PAIRS: Final = 10_000
"""So many pairs of ranks are looked at for two that share no step."""
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
    reports = _agreeing_reports(job, soft)
    is_open = pending is not None and (
        pending.generation > 0 or pending.command_id in job.commands or bool(pending.drain)
    )
    if pending is not None and (is_open or reports is not None):
        facts: list[Fact] = _remember(job, request, pending.command_id) if request.request_id else []
        return facts, IssuedCommand(pending.command_id, members)
    command_id = job.last_command + 1
    requested = CheckpointRequested(job.job, command_id, request.reason)
    if reports is None:
        # Programs that do not agree on steps write one where they are.
        workers = tuple(dict.fromkeys(request.workers or members))
        facts = _commands(job, command_id, request, workers)
        return [*facts, requested] if is_complete else facts, IssuedCommand(command_id, workers)
    if not is_complete:
        raise StrataError(Code.INVALID, f"a checkpoint of job {job.job!r} is one of all its workers", hint="name none")
    return [requested, *_begin(job, command_id, request, reports)], IssuedCommand(command_id, members)


def issue_drain(
    job: JobState, soft: SoftState, request: IssueCommand, workers: tuple[str, ...]
) -> tuple[list[Fact], IssuedCommand] | None:
    """Workers of a job whose ranks agree on steps leave with a checkpoint, so that no step is lost. None: of others."""
    reports = _agreeing_reports(job, soft)
    if reports is None or all(job.members[each].worker.elastic for each in workers):
        return None
    drain_id = job.last_command + 1
    arguments = {**request.arguments, AFTER: AFTER_CHECKPOINT}
    facts = _commands(job, drain_id, replace(request, arguments=arguments), workers)
    pending = job.checkpoint_request
    checkpoint_id = pending.command_id if pending is not None else drain_id + 1
    facts += [
        CheckpointRequested(job.job, checkpoint_id, request.reason, names, drain_id) for names in parts_of(workers)
    ]
    if pending is None:
        plain = IssueCommand(job.job, CommandKind.CHECKPOINT_NOW, reason=request.reason)
        facts += _begin(job, checkpoint_id, plain, reports)
    return facts, IssuedCommand(drain_id, workers)


def _begin(job: JobState, command_id: int, request: IssueCommand, reports: Sequence[StepProgress]) -> list[Fact]:
    """Name the first step; while the ranks share none, only the command is known."""
    step = _shared_step(reports, 0, 0)
    return _remember(job, request, command_id) if step is None else _name_step(job, command_id, request, step)


def _remember(job: JobState, request: IssueCommand, command_id: int) -> list[Fact]:
    """A fact without workers: only the id of the request and the command that answers it."""
    return [CommandIssued(job.job, command_id, request.kind, (), request.reason, {}, request.request_id)]


def _name_step(job: JobState, command_id: int, request: IssueCommand, step: int) -> list[Fact]:
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


def _agreeing_reports(job: JobState, soft: SoftState) -> list[StepProgress] | None:
    """None: the programs of some ranks do not agree on steps, or have not yet."""
    reports = _reports(job, soft) if job.settled and job.ranks else None
    if reports is None or any(each.checkpoint_step is None for each in reports.values()):
        return None
    return list(reports.values())


def next_common_step(grids: Iterable[tuple[int, int]], least: int) -> int | None:
    """The first step from `least` on that is on all grids; a grid is one of its steps and their distance.

    None also if the steps that all share are too far apart to be computed with.
    """
    offset, stride = 0, 1
    for step, distance in grids:
        shared = gcd(stride, distance)
        apart, rest = divmod(step - offset, shared)
        if rest:
            return None
        # The Chinese remainder theorem, one grid after the other.
        offset += stride * (apart * pow(stride // shared, -1, distance // shared) % (distance // shared))
        stride = lcm(stride, distance)
        if stride > FARTHEST_COMMON:
            return None
    return least + (offset - least) % stride


def _shared_step(reports: Sequence[StepProgress], attempts: int, highest: int) -> int | None:
    """A step that no rank has finished and all ask after; the farther ahead, the more attempts there were."""
    finished = max(highest, *(each.step for each in reports))
    least = finished + (STEPS_AHEAD << min(attempts, MOST_DOUBLINGS))
    grids = {(each.asked_step % each.asked_stride, each.asked_stride) for each in reports}
    step = next_common_step(grids, least)
    farthest = max(FARTHEST, FARTHEST_STRIDES * max(stride for _, stride in grids))
    return step if step is not None and step - least <= farthest else None


def observe_grids(job: JobState, soft: SoftState, now_s: float) -> None:
    """Notes since when the ranks share no step, while a checkpoint is requested."""
    reports = _agreeing_reports(job, soft) if job.checkpoint_request is not None else None
    if reports is None or _shared_step(reports, 0, 0) is not None:
        soft.unmatched_s = None
    elif soft.unmatched_s is None:
        soft.unmatched_s = now_s


def advance(job: JobState, soft: SoftState, now_s: float) -> list[Fact]:
    """Agree on the step that was named, name another one, or refuse; nothing while ranks have yet to reply."""
    request = job.checkpoint_request
    reports = _agreeing_reports(job, soft) if request is not None else None
    if request is None or reports is None:
        return []
    is_current = request.generation == job.generation
    if is_current and not request.agreed:
        if request.step and all(each.checkpoint_step == request.step for each in reports):
            return [CheckpointAgreed(job.job, job.generation, request.step)]
        is_open = request.proposal in job.commands
    else:
        is_open = is_current and not _is_missed(job, soft, request)
    if is_open:
        return []
    refusal = _refusal(job, soft, request, reports, now_s)
    if refusal:
        return _refuse(job, request, refusal)
    again = IssueCommand(job.job, CommandKind.CHECKPOINT_NOW, reason=request.reason)
    step = _shared_step(reports, request.attempts if is_current else 0, request.step if is_current else 0)
    if step is None:
        # No rank waits for one that will not come.
        return _name_step(job, job.last_command + 1, again, 0) if is_current and request.step else []
    return _name_step(job, job.last_command + 1, again, step)


def _refusal(
    job: JobState, soft: SoftState, request: CheckpointRequest, reports: Sequence[StepProgress], now_s: float
) -> str:
    """Says why no step is named any more; empty: one may be."""
    if request.generation == job.generation and request.agreed and request.missed >= MOST_MISSED:
        past = f"ranks went past {request.missed + 1} steps that they had agreed on, the last one {request.step}"
        return f"{past}: their programs ask for checkpoints after other steps than before"
    if soft.unmatched_s is not None and now_s - soft.unmatched_s > UNMATCHED_S:
        return _mismatch(job, reports)
    return ""


def _refuse(job: JobState, request: CheckpointRequest, reason: str) -> list[Fact]:
    facts: list[Fact] = [CheckpointRefused(job.job, (request.command_id, *request.drain_commands), reason)]
    if request.step:
        plain = IssueCommand(job.job, CommandKind.CHECKPOINT_NOW, reason=reason, arguments={STEP: "0"})
        facts += _commands(job, job.last_command + 1, plain, tuple(job.members))
    return facts


def _mismatch(job: JobState, reports: Sequence[StepProgress]) -> str:
    """Two ranks that share no step, or only one that is too far ahead."""
    by_grid = {
        (each.asked_step % each.asked_stride, each.asked_stride): (worker_id, each)
        for worker_id, each in zip(job.ranks, reports, strict=True)
    }
    pairs = islice(combinations(by_grid.values(), 2), MOST_PAIRS)
    apart = (pair for pair in pairs if _shared_step((pair[0][1], pair[1][1]), 0, 0) is None)
    (first, one), (second, other) = next(apart, None) or next(combinations(by_grid.values(), 2))
    return (
        f"{first} asks for checkpoints after every {one.asked_stride} steps (last {one.asked_step}), "
        f"{second} after every {other.asked_stride} (last {other.asked_step}): the ranks share no step"
    )


def _is_missed(job: JobState, soft: SoftState, request: CheckpointRequest) -> bool:
    """Says whether the agreed step cannot be committed any more: a rank went past it, or a later one is committed."""
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
    """Returns what follows from the commit of a checkpoint that was requested for a drain."""
    workers = tuple(worker_id for worker_id in (request.drain if request else ()) if worker_id in job.members)
    if request is None or not workers:
        return []
    # A worker that does not wait for the commit learns it from the command.
    command_id = job.last_command + 1
    return [
        *(DrainBegun(job.job, names) for names in parts_of(workers)),
        *(CommandIssued(job.job, command_id, CommandKind.DRAIN, names, request.reason) for names in parts_of(workers)),
    ]
