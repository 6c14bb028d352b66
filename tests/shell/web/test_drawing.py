"""The geometry of drawings: lineage from left to right, and the metric over trials with the best so far."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from strata.fleet.artifacts.manifest import ArtifactKind, Lineage
from strata.fleet.core.job import JobStatus
from strata.fleet.wire.artifacts import ArtifactRecord
from strata.fleet.wire.sweeps import SweepTrial
from strata.web.lineage import MAX_NODES, NODE_HEIGHT, NODE_WIDTH, assign_columns, draw_lineage
from strata.web.trial_plot import nice_ticks, plot_trials


def artifact_id(number: int) -> str:
    return f"artifact1_{number:064x}"


def made(number: int, *parents: int, **metrics: float) -> ArtifactRecord:
    lineage = Lineage(
        kind=ArtifactKind.RESULT, model=f"m{number}", metrics=metrics, parents=tuple(map(artifact_id, parents))
    )
    id_ = artifact_id(number)
    return ArtifactRecord(artifact_id=id_, lineage_id=id_, seq=number, size=1, committed_at_s=1.0, lineage=lineage)


def test_each_artifact_is_right_of_what_it_was_made_from_and_none_overlap() -> None:
    rows = [made(1, 0), made(0), made(2, 0, 1), made(3, 2), made(4, 0), made(5, 4, 3)]
    graph = draw_lineage(rows, artifact_id(1), None)
    places = {node.id: (node.x, node.y) for node in graph.nodes}
    for row in rows:
        assert all(places[parent][0] + NODE_WIDTH <= places[row.artifact_id][0] for parent in row.lineage.parents)
    for one, other in itertools.combinations(places.values(), 2):
        assert abs(one[0] - other[0]) >= NODE_WIDTH or abs(one[1] - other[1]) >= NODE_HEIGHT
    assert all(x + NODE_WIDTH <= graph.width and y + NODE_HEIGHT <= graph.height for x, y in places.values())
    assert len(graph.edges) == 7
    assert [node.id for node in graph.nodes if node.current] == [artifact_id(1)]


def test_the_furthest_artifacts_of_a_large_lineage_are_left_out() -> None:
    graph = draw_lineage([made(0), *(made(number, 0) for number in range(1, MAX_NODES + 5))], artifact_id(0), None)
    assert (len(graph.nodes), graph.left_out) == (MAX_NODES, 5)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20))
def test_every_artifact_gets_one_column_also_in_a_circle(pairs: list[tuple[int, int]]) -> None:
    ids = [str(number) for number in range(8)]
    edges = sorted({(str(a), str(b)) for a, b in pairs})
    columns = assign_columns(ids, edges)
    assert sorted(itertools.chain.from_iterable(columns)) == ids
    if all(a < b for a, b in edges):
        place = {id_: number for number, column in enumerate(columns) for id_ in column}
        assert all(place[a] < place[b] for a, b in edges)


def trial(number: int, loss: float | None, **fields: Any) -> SweepTrial:
    known: dict[str, Any] = {"status": JobStatus.COMPLETED, **fields}
    metrics = {} if loss is None else {"loss": loss}
    return SweepTrial(
        job_id=f"job{number}", label="t", parameters={}, metrics=metrics, created_at_s=0.0, changed_at_s=0.0, **known
    )


def test_the_line_of_the_best_so_far_counts_completed_trials_alone() -> None:
    pruned = trial(1, 0.1, status=JobStatus.CANCELLED, pruned=True)
    plot = plot_trials([trial(0, 3.0), pruned, trial(2, 4.0), trial(3, 1.0), trial(4, None)], "loss", "minimize")
    assert plot is not None
    assert [mark.kind for mark in plot.marks] == ["completed", "pruned", "completed", "completed"]
    first, _, _, best = plot.marks
    points = plot.best.split()
    assert points[0] == f"{first.x:g},{first.y:g}"
    assert points[2] == f"{best.x:g},{best.y:g}"
    assert len(points) == 4, "down in a step, and on to the right"
    assert all(plot.top <= mark.y <= plot.bottom for mark in plot.marks)
    assert plot_trials([trial(0, None)], "loss", "minimize") is None


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12))
@example(0.0, 5e-324)
def test_ticks_are_few_and_reach_around_the_values(one: float, other: float) -> None:
    low, high = sorted((one, other))
    ticks = nice_ticks(low, high)
    assert 1 <= len(ticks) <= 7
    margin = 1e-9 * max(1.0, abs(low), abs(high))
    assert ticks[0] <= low + margin
    assert ticks[-1] >= high - margin
