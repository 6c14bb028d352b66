"""Which artifacts the policy keeps."""

from __future__ import annotations

import pytest

from strata.fleet.artifacts.manifest import ArtifactKind, Lineage
from strata.fleet.artifacts.retention import RetentionPolicy, choose_retained
from strata.fleet.wire.artifacts import ArtifactRecord

DAY_S = 86_400.0


def row(seq: int, kind: ArtifactKind, *parents: str) -> ArtifactRecord:
    lineage = Lineage(kind=kind, job_id=f"job{seq}", model="m", parents=parents)
    return ArtifactRecord(
        lineage_id=f"lineage{seq}", seq=seq, artifact_id=artifact(seq), size=1, committed_at_s=0.0, lineage=lineage
    )


def artifact(number: int) -> str:
    return f"artifact1_{number:064x}"


ROWS = [
    row(1, ArtifactKind.RESULT),
    row(2, ArtifactKind.RESULT),
    row(3, ArtifactKind.RESULT, artifact(1)),
]
REFERENCED = {artifact(2): "result"}


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (RetentionPolicy(keep_last=1), {1, 2, 3}),
        (RetentionPolicy(keep_last=1, keep_job_results=False), {1, 3}),
        (RetentionPolicy(keep_last=1, keep_parents=False), {2, 3}),
        (RetentionPolicy(keep_last=1, keep_job_results=False, keep_parents=False), {3}),
    ],
)
def test_results_of_jobs_and_parents_are_kept_as_the_policy_says(policy: RetentionPolicy, kept: set[int]) -> None:
    chosen = choose_retained(ROWS, REFERENCED, policy, DAY_S)
    assert chosen.kept.keys() == {artifact(number) for number in kept}
    assert chosen.dropped.keys() == {artifact(number) for number in {1, 2, 3} - kept}
