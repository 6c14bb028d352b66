"""Decides which artifacts retention keeps (the last 5, the best 3, parents, job results, at least an hour), each with
its reason. `RetentionPolicy` has the defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Literal

import msgspec

from strata.fleet.artifacts.manifest import ArtifactKind, Lineage
from strata.fleet.wire.artifacts import ArtifactRecord

Count = Annotated[int, msgspec.Meta(ge=0)]


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keep_last: Count = 5
    """Results of each model and mode."""
    keep_best: Count = 3
    """Results of each model and mode, by `metric`."""
    metric: str = ""
    """Orders results for `keep_best`."""
    best: Literal["max", "min"] = "max"
    """Whether a high or a low `metric` is good."""
    keep_checkpoints: Annotated[int, msgspec.Meta(ge=1)] = 2
    """The last ones of each job. At least one: an attempt may be about to resume from it."""
    keep_sources: Count = 20
    """The latest sources."""
    keep_job_results: bool = True
    """Whatever a job's row points to; without it, only the numbers above count."""
    keep_parents: bool = True
    """What something that is kept was made from."""
    min_age_s: Annotated[float, msgspec.Meta(ge=0)] = 3600.0
    """Younger ones are kept: their job may not have named them yet."""


@dataclass(frozen=True, slots=True)
class RetentionChoice:
    kept: Mapping[str, str]
    """Artifact to the reason it is kept for."""
    dropped: Mapping[str, int]
    """Artifact to the `seq` of its newest lineage that was looked at."""


def choose_retained(
    rows: Sequence[ArtifactRecord], referenced: Mapping[str, str], policy: RetentionPolicy, now_s: float
) -> RetentionChoice:
    """`rows` is the whole lineage of what is not removed."""
    newest = sorted(rows, key=lambda row: -row.seq)
    kept: dict[str, str] = {}
    reasons = (_by_row(newest, policy, now_s), _by_job(referenced, policy), _by_number(newest, policy))
    for artifact_id, why in chain.from_iterable(reasons):
        kept.setdefault(artifact_id, why)
    if policy.keep_parents:
        _keep_parents(rows, kept)
    dropped: dict[str, int] = {}
    for row in newest:
        if row.artifact_id not in kept:
            dropped.setdefault(row.artifact_id, row.seq)
    return RetentionChoice(kept, dropped)


_Reasons = Iterator[tuple[str, str]]
"""Artifacts, each with a reason to keep it. The first reason counts."""


def _by_row(newest: Sequence[ArtifactRecord], policy: RetentionPolicy, now_s: float) -> _Reasons:
    for row in newest:
        if row.pinned:
            yield row.artifact_id, f"pinned: {row.pinned}"
        elif row.lineage.kind is ArtifactKind.DATA:
            yield row.artifact_id, "data, which people remove"
        elif row.committed_at_s > now_s - policy.min_age_s:
            yield row.artifact_id, "new"


def _by_job(referenced: Mapping[str, str], policy: RetentionPolicy) -> _Reasons:
    for artifact_id, why in referenced.items():
        if why == "checkpoint" or policy.keep_job_results:
            yield artifact_id, f"{why} of a job"


def _by_number(newest: Sequence[ArtifactRecord], policy: RetentionPolicy) -> _Reasons:
    for group in _groups(newest, ArtifactKind.RESULT, lambda lineage: (lineage.model, lineage.mode)):
        yield from _first(group, policy.keep_last, "one of the latest")
        if policy.metric:
            yield from _first(_best_first(group, policy), policy.keep_best, f"one of the best by {policy.metric}")
    for group in _groups(newest, ArtifactKind.CHECKPOINT, lambda lineage: lineage.job_id):
        yield from _first(group, policy.keep_checkpoints, "one of the last checkpoints")
    for group in _groups(newest, ArtifactKind.SOURCE, lambda _: None):
        yield from _first(group, policy.keep_sources, "one of the latest sources")


def _groups(
    rows: Sequence[ArtifactRecord], kind: ArtifactKind, key: Callable[[Lineage], Hashable]
) -> Iterable[list[ArtifactRecord]]:
    groups: dict[Hashable, list[ArtifactRecord]] = {}
    for row in rows:
        if row.lineage.kind is kind:
            groups.setdefault(key(row.lineage), []).append(row)
    return groups.values()


def _best_first(rows: Sequence[ArtifactRecord], policy: RetentionPolicy) -> list[ArtifactRecord]:
    sign = -1.0 if policy.best == "max" else 1.0
    measured = [row for row in rows if policy.metric in row.lineage.metrics]
    return sorted(measured, key=lambda row: (sign * row.lineage.metrics[policy.metric], -row.seq))


def _first(rows: Sequence[ArtifactRecord], number: int, why: str) -> _Reasons:
    for row in _distinct(rows)[:number]:
        yield row.artifact_id, why


def _distinct(rows: Sequence[ArtifactRecord]) -> list[ArtifactRecord]:
    """The first row of each artifact: the same bits from ten runs are one of the last five, not all of them."""
    return list({row.artifact_id: row for row in reversed(rows)}.values())[::-1]


def _keep_parents(rows: Sequence[ArtifactRecord], kept: dict[str, str]) -> None:
    parents: dict[str, set[str]] = {}
    for row in rows:
        parents.setdefault(row.artifact_id, set()).update(row.lineage.parents)
    waiting = list(kept)
    while waiting:
        child = waiting.pop()
        for parent in parents.get(child, set()) - kept.keys():
            kept[parent] = f"parent of {child}"
            waiting.append(parent)
