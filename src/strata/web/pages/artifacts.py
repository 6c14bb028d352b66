"""Pages of artifacts: list (50 rows), one with lineage, files (200) and pin. Words and layout are in
`templates/artifacts.html`, `artifact.html`.
"""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import quote

import msgspec

from strata.fleet.artifacts.manifest import ArtifactKind
from strata.fleet.core.objective import MetricObjective
from strata.fleet.wire.artifacts import ArtifactReply, ArtifactsReply, PinRequest
from strata.fleet.wire.hosts import Host
from strata.http.route import KIB, RESEARCHER, VIEWER, Route
from strata.identity.roles import Role
from strata.web.lineage import NODE_HEIGHT, NODE_WIDTH, draw_lineage
from strata.web.page import Form, Page, View

Word = Annotated[str, msgspec.Meta(max_length=256)]
PAGE: Final = 50
FILES: Final = 200
"""How many files of an artifact are listed."""
KINDS: Final = tuple(map(str, ArtifactKind))


class ArtifactsPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Word = ""
    model: Word = ""
    metric: Word = ""
    """Order by it."""
    lowest: bool = False
    before: Annotated[int, msgspec.Meta(ge=0)] | None = None
    project: str = ""


class ArtifactPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    metric: Word = ""
    """The one that the graph shows; empty: the one that matters."""
    project: str = ""


async def show_artifacts(page: Page, query: ArtifactsPageQuery) -> View:
    """Returns what was made, the newest first or the best by a metric."""
    reply = await page.get(
        "/v1/artifacts",
        ArtifactsReply,
        kind=query.kind if query.kind in KINDS else None,
        model=query.model,
        metric=query.metric,
        lowest=query.lowest,
        before=None if query.metric else query.before,
        limit=PAGE,
    )
    metrics = sorted({name for made in reply.artifacts for name in made.lineage.metrics})
    shown = query.metric or (reply.objective.metric if reply.objective else "")
    return page.render(
        "artifacts.html",
        title="Artifacts",
        topics=["artifacts"],
        section="/artifacts",
        query=query,
        reply=reply,
        kinds=KINDS,
        metrics=metrics,
        shown=shown,
    )


async def show_artifact(page: Page, query: ArtifactPageQuery) -> View:
    """One artifact."""
    path = f"/v1/artifact/{page.path['id']}"
    lineage = await page.get(f"{path}/lineage", ArtifactsReply, descendants=True)
    own = lineage.artifacts[0]
    metrics = sorted({name for made in lineage.artifacts for name in made.lineage.metrics})
    objective = lineage.objective
    if query.metric in metrics:
        objective = MetricObjective(metric=query.metric, direction="maximize")
    content = None
    if own.removed_at_s is None:
        content = await page.find(path, ArtifactReply)
    host_id = own.lineage.host_id
    host = await page.find(f"/v1/host/{quote(host_id, safe='')}", Host) if host_id else None
    return page.render(
        "artifact.html",
        title=f"{own.lineage.model or own.lineage.kind} {own.lineage.mode}".strip(),
        topics=[f"artifact:{own.artifact_id}"],
        section="/artifacts",
        own=own,
        host=host.name if host else own.lineage.host_id,
        graph=draw_lineage(lineage.artifacts, own.artifact_id, objective),
        lineage=lineage.artifacts,
        metrics=metrics,
        objective=objective,
        content=content,
        files=() if content is None else content.manifest.files[:FILES],
        node_width=NODE_WIDTH,
        node_height=NODE_HEIGHT,
        may_pin=own.removed_at_s is None
        and page.may(Role.RESEARCHER if own.owner == page.call.caller.owner else Role.OPERATOR),
    )


async def pin(page: Page, form: Form) -> str:
    """Keep an artifact whatever the retention says, or let the retention decide again."""
    reason = "" if form.get("unpin") else (form.get("reason", "").strip() or "pinned on the dashboard")
    await page.post(f"/v1/artifact/{page.path['id']}/pin", PinRequest(reason=reason[:256]))
    return f"/artifacts/{quote(page.path['id'], safe='')}"


ROUTES = (
    Route("GET", "/artifacts", VIEWER, show_artifacts),
    Route("GET", "/artifacts/{id}", VIEWER, show_artifact),
    Route("POST", "/artifacts/{id}/pin", RESEARCHER, pin, 4 * KIB, owner="artifact"),
)
