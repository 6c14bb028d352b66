"""Queries of the lineage: the latest or the best artifact of a model, and the ancestry of an artifact."""

from __future__ import annotations

from collections.abc import Sequence

from strata.base.errors import Code, StrataError
from strata.fleet.artifacts.manifest import ArtifactKind, check_artifact_id
from strata.fleet.artifacts.ports import ArtifactIndex, LineageFilter, LineageRow


async def latest(
    index: ArtifactIndex, model: str, mode: str = "", *, kind: ArtifactKind = ArtifactKind.RESULT
) -> LineageRow:
    """An empty mode is any mode. Of results only those that completed their jobs, of checkpoints those of attempts."""
    wanted = LineageFilter(
        model=model,
        mode=mode,
        kind=kind,
        completed=kind is ArtifactKind.RESULT,
        attempted=kind is ArtifactKind.CHECKPOINT,
        limit=1,
    )
    return await _first(index, wanted)


async def best(index: ArtifactIndex, model: str, metric: str, mode: str = "", *, lowest: bool = False) -> LineageRow:
    """The result of a completed job with the highest, or lowest, figure; of equals the latest."""
    order = LineageFilter(
        model=model,
        mode=mode,
        kind=ArtifactKind.RESULT,
        metric=metric,
        best="min" if lowest else "max",
        completed=True,
        limit=1,
    )
    return await _first(index, order)


async def ancestry(index: ArtifactIndex, artifact_id: str, *, limit: int = 1000) -> Sequence[LineageRow]:
    """Where it came from, and what that came from, and so on: each record once, nearest first."""
    found: dict[str, LineageRow] = {}
    seen: set[str] = set()
    asked = [check_artifact_id(artifact_id)]
    while asked and len(found) < limit:
        seen.update(asked)
        layer = await index.lineages(LineageFilter(artifact_ids=asked, removed=True, limit=limit))
        found.update({row.id: row for row in layer})
        asked = sorted({parent for row in layer for parent in row.lineage.parents} - seen)
    if not found:
        raise StrataError(Code.NOT_FOUND, f"there is no artifact {artifact_id}")
    return list(found.values())[:limit]


async def descendants(index: ArtifactIndex, artifact_id: str, *, limit: int = 1000) -> Sequence[LineageRow]:
    """What was made from it directly."""
    wanted = LineageFilter(parent=check_artifact_id(artifact_id), removed=True, limit=limit)
    return await index.lineages(wanted)


async def _first(index: ArtifactIndex, wanted: LineageFilter) -> LineageRow:
    found = await index.lineages(wanted)
    if not found:
        by = f" with the metric {wanted.metric}" if wanted.metric else ""
        raise StrataError(Code.NOT_FOUND, f"there is no {wanted.kind} of {wanted.model} {wanted.mode}".rstrip() + by)
    return found[0]
