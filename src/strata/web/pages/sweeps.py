"""Pages of sweeps: list (25), one with parallel coordinates (12 axes), plot and table of trials."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from strata.fleet.wire.sweeps import SweepReply, SweepsReply, SweepTrial
from strata.http.route import VIEWER, Route
from strata.web.page import Page, View
from strata.web.trial_plot import plot_trials

Word = Annotated[str, msgspec.Meta(max_length=256)]
PAGE: Final = 25
MAX_AXES: Final = 12
"""How many parameters the parallel coordinates show."""


class SweepsPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    q: Word = ""
    project: Word = ""
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0


class SweepPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    metric: Word = ""
    lowest: Word = ""
    """`true` or `false`; empty: as the sweep has it."""
    project: str = ""


async def show_sweeps(page: Page, query: SweepsPageQuery) -> View:
    """All sweeps with their best run so far."""
    reply = await page.get(
        "/v1/sweeps",
        SweepsReply,
        search=query.q,
        project=query.project,
        offset=query.offset,
        limit=PAGE,
    )
    return page.render(
        "sweeps.html",
        title="Sweeps",
        topics=["jobs", "sweeps"],
        section="/sweeps",
        query=query,
        reply=reply,
        limit=PAGE,
        cell=format_value,
    )


async def show_sweep(page: Page, query: SweepPageQuery) -> View:
    """One sweep."""
    project, name = page.path["project"], page.path["name"]
    lowest = query.lowest if query.lowest in ("true", "false") else None
    reply = await page.get(f"/v1/sweep/{project}/{name}", SweepReply, metric=query.metric, lowest=lowest)
    objective = reply.sweep.objective
    metric = "" if objective is None else objective.metric
    best = reply.sweep.best
    plot = None if objective is None else plot_trials(reply.trials, metric, objective.direction)
    return page.render(
        "sweep.html",
        title=name,
        topics=["jobs"],
        section="/sweeps",
        reply=reply,
        sweep=reply.sweep,
        metric=metric,
        best=best,
        axes=reply.axes[:MAX_AXES],
        left_out=reply.axes[MAX_AXES:],
        trials=_ranked(reply, metric),
        plot=plot,
        as_json=lambda value: msgspec.json.encode(value).decode(),
        cell=format_value,
    )


def _ranked(reply: SweepReply, metric: str) -> list[SweepTrial]:
    """The best first; those without the metric last, in their order. Pruned ones after all that completed."""
    sign = -1.0 if reply.sweep.objective is not None and reply.sweep.objective.direction == "maximize" else 1.0

    def rank(trial: SweepTrial) -> tuple[int, float]:
        value = trial.metrics.get(metric)
        group = 0 if trial.status == "completed" else 2 if trial.status in ("failed", "cancelled") else 1
        return (3, 0.0) if value is None else (group, sign * value)

    return sorted(reply.trials, key=rank)


def format_value(value: Any) -> str:
    """A parameter or a metric, short enough for a cell."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int | str):
        return str(value)
    return msgspec.json.encode(value).decode()


ROUTES = (
    Route("GET", "/sweeps", VIEWER, show_sweeps),
    Route("GET", "/sweeps/{project}/{name:path}", VIEWER, show_sweep),
)
