"""Geometry of an artifact's lineage graph: columns, sizes of nodes, at most 200, titles, curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from strata.fleet.core.objective import MetricObjective
from strata.fleet.wire.artifacts import ArtifactRecord

NODE_WIDTH: Final = 200
NODE_HEIGHT: Final = 64
GAP_X: Final = 56
GAP_Y: Final = 16
MARGIN: Final = 8
MAX_NODES: Final = 200
_CHARACTERS: Final = 24
"""Characters of the monospace text that fits into a node."""
_TITLE: Final = 21
"""Characters of the wider text of a title."""


class GraphNode(NamedTuple):
    id: str
    x: int
    y: int
    made: ArtifactRecord
    title: str
    """What it is: model and mode, or the kind."""
    metric: str
    """Name and value of the metric that matters; empty where it has none."""
    current: bool


class GraphEdge(NamedTuple):
    path: str
    """The path as the `d` of an SVG path."""
    near: bool
    """It begins or ends at the current artifact."""


class LineageGraph(NamedTuple):
    nodes: Sequence[GraphNode]
    edges: Sequence[GraphEdge]
    width: int
    height: int
    left_out: int
    """Artifacts that are not drawn: those that are furthest away."""


def draw_lineage(rows: Sequence[ArtifactRecord], current: str, objective: MetricObjective | None) -> LineageGraph:
    """`rows` come nearest first."""
    made: dict[str, ArtifactRecord] = {}
    parents: dict[str, set[str]] = {}
    for row in rows:
        made.setdefault(row.artifact_id, row)
        parents.setdefault(row.artifact_id, set()).update(row.lineage.parents)
    shown = list(made)[:MAX_NODES]
    edges = [(parent, child) for child in shown for parent in sorted(parents[child]) if parent in shown]
    columns = assign_columns(shown, edges)
    order = _order_rows(columns, edges)
    width = MARGIN * 2 + len(order) * NODE_WIDTH + max(0, len(order) - 1) * GAP_X
    rows_high = max(map(len, order), default=0)
    height = MARGIN * 2 + rows_high * NODE_HEIGHT + max(0, rows_high - 1) * GAP_Y
    places = {
        id_: _place(column, row, len(ids), height) for column, ids in enumerate(order) for row, id_ in enumerate(ids)
    }
    nodes = [
        GraphNode(id_, *places[id_], made[id_], _title(made[id_]), _metric(made[id_], objective), id_ == current)
        for id_ in shown
    ]
    return LineageGraph(
        nodes=nodes,
        edges=[GraphEdge(_curve(places[a], places[b]), current in (a, b)) for a, b in edges],
        width=width,
        height=height,
        left_out=len(made) - len(shown),
    )


def assign_columns(ids: Sequence[str], edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Each artifact is right of all that it was made from. Equal bits can make a circle: there one edge goes back."""
    children: dict[str, list[str]] = {id_: [] for id_ in ids}
    waiting: dict[str, int] = dict.fromkeys(ids, 0)
    for parent, child in edges:
        children[parent].append(child)
        waiting[child] += 1
    column: dict[str, int] = {}
    ready = [id_ for id_ in ids if not waiting[id_]]
    depth: dict[str, int] = dict.fromkeys(ids, 0)
    left = dict.fromkeys(ids)
    while left:
        if not ready:
            ready = [next(iter(left))]
        id_ = ready.pop()
        if id_ in column:
            continue
        column[id_] = depth[id_]
        del left[id_]
        for child in children[id_]:
            depth[child] = max(depth[child], depth[id_] + 1)
            waiting[child] -= 1
            if not waiting[child] and child not in column:
                ready.append(child)
    columns: list[list[str]] = [[] for _ in range(max(column.values(), default=-1) + 1)]
    for id_ in ids:
        columns[column[id_]].append(id_)
    return [each for each in columns if each]


def _order_rows(columns: list[list[str]], edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Places each near the middle of what it was made from, so that few curves cross."""
    parents: dict[str, list[str]] = {}
    for parent, child in edges:
        parents.setdefault(child, []).append(parent)
    placed: dict[str, float] = {}
    ordered = []
    for column in columns:
        ids = sorted(column, key=lambda id_: _middle(parents.get(id_, ()), placed))
        placed |= {id_: (row + 0.5) / len(ids) for row, id_ in enumerate(ids)}
        ordered.append(ids)
    return ordered


def _middle(ids: Sequence[str], placed: Mapping[str, float]) -> float:
    known = [placed[id_] for id_ in ids if id_ in placed]
    return sum(known) / len(known) if known else 0.5


def _place(column: int, row: int, rows: int, height: int) -> tuple[int, int]:
    own = rows * NODE_HEIGHT + (rows - 1) * GAP_Y
    return MARGIN + column * (NODE_WIDTH + GAP_X), (height - own) // 2 + row * (NODE_HEIGHT + GAP_Y)


def _curve(start: tuple[int, int], end: tuple[int, int]) -> str:
    x1, y1 = start[0] + NODE_WIDTH, start[1] + NODE_HEIGHT // 2
    x2, y2 = end[0], end[1] + NODE_HEIGHT // 2
    bend = max(24, (x2 - x1) // 2)
    return f"M{x1} {y1}C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"


def _title(made: ArtifactRecord) -> str:
    name = f"{made.lineage.model} {made.lineage.mode}".strip() if made.lineage.model else str(made.lineage.kind)
    return name if len(name) <= _TITLE else f"{name[: _TITLE - 1]}…"


def _metric(made: ArtifactRecord, objective: MetricObjective | None) -> str:
    if objective is None or objective.metric not in made.lineage.metrics:
        return ""
    value = f"{made.lineage.metrics[objective.metric]:.4g}"
    room = _CHARACTERS - len(value) - 1
    name = objective.metric if len(objective.metric) <= room else f"{objective.metric[: room - 1]}…"
    return f"{name} {value}"
