"""Retention: decides by the lineage which artifacts are kept, with a reason for each, for dry runs and real ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from strata.fleet.artifacts.manifest import ArtifactKind
from strata.fleet.artifacts.ports import LineageRow

Count = Annotated[int, msgspec.Meta(ge=0)]


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keep_last: Count = 5
    """Results of each model and mode."""
    keep_best: Count = 3
    """Results of each model and mode, by `metric`."""
    metric: str = ""
    best: Literal["max", "min"] = "max"
    keep_checkpoints: Annotated[int, msgspec.Meta(ge=1)] = 2
    """The last ones of each job. At least one: an attempt may be about to resume from it."""
    keep_sources: Count = 20
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
    rows: Sequence[LineageRow], referenced: Mapping[str, str], policy: RetentionPolicy, now_s: float
) -> RetentionChoice:
    """`rows` is the whole lineage of what is not removed."""
    newest = sorted(rows, key=lambda row: -row.seq)
    kept: dict[str, str] = {}
    for row in newest:
        if row.pinned:
            kept.setdefault(row.artifact_id, f"pinned: {row.pinned}")
        elif row.committed_at_s > now_s - policy.min_age_s:
            kept.setdefault(row.artifact_id, "new")
    for artifact_id, why in referenced.items():
        if why == "checkpoint" or policy.keep_job_results:
            kept.setdefault(artifact_id, f"{why} of a job")
    for artifact_id, why in _by_number(newest, policy):
        kept.setdefault(artifact_id, why)
    if policy.keep_parents:
        _keep_parents(rows, kept)
    dropped: dict[str, int] = {}
    for row in newest:
        if row.artifact_id not in kept:
            dropped.setdefault(row.artifact_id, row.seq)
    return RetentionChoice(kept, dropped)


def _by_number(newest: Sequence[LineageRow], policy: RetentionPolicy) -> Iterable[tuple[str, str]]:
    results = _grouped(row for row in newest if row.lineage.kind is ArtifactKind.RESULT)
    for group in results.values():
        for row in _distinct(group)[: policy.keep_last]:
            yield row.artifact_id, "one of the latest"
        if policy.metric:
            sign = -1.0 if policy.best == "max" else 1.0
            measured = [row for row in group if policy.metric in row.lineage.metrics]
            measured.sort(key=lambda row: (sign * row.lineage.metrics[policy.metric], -row.seq))
            for row in _distinct(measured)[: policy.keep_best]:
                yield row.artifact_id, f"one of the best by {policy.metric}"
    by_job: dict[str, list[LineageRow]] = {}
    for row in newest:
        if row.lineage.kind is ArtifactKind.CHECKPOINT:
            by_job.setdefault(row.lineage.job_id, []).append(row)
    for group in by_job.values():
        for row in _distinct(group)[: policy.keep_checkpoints]:
            yield row.artifact_id, "one of the last checkpoints"
    sources = [row for row in newest if row.lineage.kind is ArtifactKind.SOURCE]
    for row in _distinct(sources)[: policy.keep_sources]:
        yield row.artifact_id, "one of the latest sources"


def _grouped(rows: Iterable[LineageRow]) -> dict[tuple[str, str], list[LineageRow]]:
    groups: dict[tuple[str, str], list[LineageRow]] = {}
    for row in rows:
        groups.setdefault((row.lineage.model, row.lineage.mode), []).append(row)
    return groups


def _distinct(rows: Sequence[LineageRow]) -> list[LineageRow]:
    """The first row of each artifact: the same bits from ten runs are one of the last five, not all of them."""
    return list({row.artifact_id: row for row in reversed(rows)}.values())[::-1]


def _keep_parents(rows: Sequence[LineageRow], kept: dict[str, str]) -> None:
    parents: dict[str, set[str]] = {}
    for row in rows:
        parents.setdefault(row.artifact_id, set()).update(row.lineage.parents)
    waiting = list(kept)
    while waiting:
        child = waiting.pop()
        for parent in parents.get(child, set()) - kept.keys():
            kept[parent] = f"parent of {child}"
            waiting.append(parent)
