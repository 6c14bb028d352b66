"""Pages of training servers: list, one with tenants, operations (80, of 600 s), models (50), plots (8), recoveries,
endpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeVar
from urllib.parse import quote

import msgspec

from strata.base.errors import Code, StrataError
from strata.fleet.wire.jobs import Job, JobReply
from strata.fleet.wire.servers import ServersReply
from strata.http.route import VIEWER, RawReply, Route
from strata.identity.roles import Role
from strata.train.status.reports import ModelStatus, ServerActivity, ServerStatus, Timeline
from strata.web.bars import WIDTH, Bar
from strata.web.page import Page, View
from strata.web.render import duration

T = TypeVar("T", bound=msgspec.Struct)
OPERATIONS: Final = 80
WINDOW_S: Final = 600.0
"""How far before the last operation the lanes begin at most."""
LANES: Final = ("queue", "pack", "forward", "backward", "optimizer", "publish", "sample")
MODELS: Final = 50
COMPARED: Final = 4
MAX_PLOTS: Final = 8
FIRST: Final = ("loss", "reward", "tokens", "grad_norm", "same_weights_gap", "sampler_gap", "sampler_kl", "lr")
"""The order of plots; other metrics come after these."""
_AWAY: Final = frozenset({Code.UNAVAILABLE, Code.PRECONDITION, Code.NOT_FOUND, Code.UNSUPPORTED})
"""Errors of a server that is away for a moment, or of an earlier version."""


class TrainingPageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, msgspec.Meta(max_length=200)] = ""
    """The model whose metrics are shown; empty: the one that stepped last."""


@dataclass(frozen=True)
class ServerPlace:
    """Where the pages and the API of a training server are."""

    pages: str
    api: str
    title: str
    crumbs: Sequence[tuple[str, str]]
    section: str
    job: Job | None = None
    """None for a server without a hub."""

    def rollout_path(self, rollout_id: str) -> str:
        return f"{self.pages}/rollouts/{quote(rollout_id, safe=':')}"

    def rollout_api(self, rollout_id: str) -> str:
        name = "rollouts" if self.api.startswith("/api/") else "rollout"
        return f"{self.api}/{name}/{quote(rollout_id, safe=':')}"

    @property
    def models_api(self) -> str:
        return "/v1/models" if self.api.startswith("/api/") else f"{self.api}/models"

    def completions_api(self, name: Literal["completions", "chat/completions"]) -> str:
        return f"/v1/{name}" if self.api.startswith("/api/") else f"{self.api}/{name}"


LONE: Final = ServerPlace("", "/api/v1", "Training server", [("/", "Training server")], "/")


@dataclass(frozen=True)
class ModelPlot:
    title: str
    src: str
    name: str
    """The name of the metric."""
    labels: str = ""


@dataclass(frozen=True)
class PhaseLane:
    phase: str
    bars: Sequence[Bar]
    seconds: float
    """The time of all its bars together."""


@dataclass(frozen=True)
class PhaseLanes:
    begin_s: float
    end_s: float
    operations: int
    lanes: Sequence[PhaseLane]


async def servers(page: Page) -> View:
    """The training servers of this hub."""
    reply = await page.get("/v1/servers", ServersReply)
    return page.render(
        "training.html",
        title="Training",
        section="/training",
        topics=["jobs"],
        every_s=5,
        servers=reply.servers,
        host_names=reply.hosts,
    )


async def place_of(page: Page) -> ServerPlace:
    """Returns the place of the training server at a hub that the path names, or of the one that shows this page."""
    if "id" not in page.path:
        return LONE
    job = (await page.get(f"/v1/job/{page.path['id']}", JobReply)).job
    if job.spec.kind != "server":
        raise StrataError(Code.NOT_FOUND, f"{job.spec.label} is no training server")
    pages = f"/training/{job.id}"
    crumbs = [("/training", "Training"), (pages, job.spec.label)]
    return ServerPlace(pages, f"/v1/server/{job.id}", job.spec.label, crumbs, "/training", job)


async def server(page: Page, query: TrainingPageQuery) -> View:
    """One training server, and what it does for whom."""
    place = await place_of(page)
    job, api = place.job, place.api
    serving, failure = job is None or job.serving == "serving", ""
    status: ServerStatus | None = None
    activity: ServerActivity | None = None
    if serving:
        try:
            status = await read(page, f"{api}/status", ServerStatus)
            activity = await read(page, f"{api}/activity", ServerActivity, operations=OPERATIONS)
        except StrataError as error:
            if error.code not in _AWAY:
                raise
            failure = error.message
    models = () if activity is None else activity.models
    stepped = sorted((each for each in models if each.stepped_at_s), key=lambda each: -(each.stepped_at_s or 0.0))
    model = next((each for each in models if each.model_id == query.model), stepped[0] if stepped else None)
    return page.render(
        "training_server.html",
        title=place.title,
        section=place.section,
        topics=[] if job is None else [f"job:{job.id}"],
        every_s=5 if serving else 0,
        crumbs=place.crumbs[:-1],
        job=job,
        failure=failure,
        brief=brief,
        model_label=model_label,
        api=api,
        pages=place.pages,
        status=status,
        activity=activity,
        models=models[:MODELS],
        shares=token_shares(activity.operations) if activity is not None and page.may(Role.OPERATOR) else {},
        lanes=phase_lanes(activity.operations, activity.now_s) if activity is not None else None,
        model=model,
        plots=list(model_plots(api, model, stepped[:COMPARED])),
    )


async def read(page: Page, path: str, kind: type[T], **query: object) -> T:
    """Returns what a training server says: in its own words where a hub passes them on."""
    return read_reply(await page.site.api.request(page.call, "GET", path, query, None), kind)


def read_reply(reply: object, kind: type[T]) -> T:
    if isinstance(reply, kind):
        return reply
    assert isinstance(reply, RawReply), f"a {kind.__name__} is expected, and no {type(reply).__name__}"
    assert isinstance(reply.content, bytes), f"a {kind.__name__} is read whole"
    try:
        return msgspec.json.decode(reply.content, type=kind)
    except msgspec.DecodeError as error:
        raise StrataError(Code.UNSUPPORTED, f"this training server has another version: {error}") from None


def model_plots(api: str, model: ModelStatus | None, compared: Sequence[ModelStatus]) -> Iterator[ModelPlot]:
    """The loss of the models that stepped last, and the metrics of one of them: what people look at first."""
    if len(compared) > 1:
        paths = " ".join(curve_path(api, each.model_id) for each in compared)
        yield ModelPlot(
            "loss of the last models", paths, "loss", "\n".join(model_label(each.model_id) for each in compared)
        )
    if model is not None:
        # The last step may have had no tokens to compare.
        names = {*model.values, *model.evaluation, *(() if model.gap is None else ("same_weights_gap",))}
        known = [name for name in FIRST if name in names]
        for name in [*known, *sorted(names - set(known))][:MAX_PLOTS]:
            yield ModelPlot(name.replace("_", " "), curve_path(api, model.model_id), name)


def token_shares(operations: Sequence[Timeline]) -> dict[str, float]:
    """Returns each tenant's part of the tokens of these operations."""
    counts: Counter[str] = Counter()
    for each in operations:
        counts[each.tenant] += each.tokens
    total = counts.total()
    return {tenant: count / total for tenant, count in counts.items()} if total else {}


def phase_lanes(operations: Sequence[Timeline], now_s: float) -> PhaseLanes | None:
    """Returns when the operations were in which phase, one lane for each; None if there was none."""
    if not operations:
        return None
    end_s = max(each.ended_at_s or now_s for each in operations)
    begin_s = max(min(each.accepted_at_s for each in operations), end_s - WINDOW_S)
    scale = WIDTH / max(end_s - begin_s, 1e-3)
    bars: dict[str, list[Bar]] = {phase: [] for phase in LANES}
    seconds = dict.fromkeys(LANES, 0.0)
    for phase, start_s, until_s, words in _spans(operations, now_s):
        if until_s > begin_s:
            x = max(start_s - begin_s, 0.0) * scale
            bars[phase].append(Bar(phase, x, max((until_s - begin_s) * scale - x, 1.5), words))
            seconds[phase] += until_s - start_s
    lanes = [PhaseLane(phase, bars[phase], seconds[phase]) for phase in LANES if bars[phase] or phase != "sample"]
    return PhaseLanes(begin_s, end_s, len(operations), lanes)


def _spans(operations: Sequence[Timeline], now_s: float) -> Iterator[tuple[str, float, float, str]]:
    """Phase, begin, end and words of each. What operations of one dispatch share is there once."""
    dispatches: set[int] = set()
    for each in operations:
        words = f"{each.kind} of {each.tenant.removeprefix('key:')}"
        moments = (("queue", each.ready_at_s, each.dispatched_at_s), ("pack", each.dispatched_at_s, each.sent_at_s))
        for phase, start_s, then_s in moments:
            until_s = then_s if then_s is not None or each.ended_at_s is not None else now_s
            if start_s is not None and until_s is not None and until_s > start_s:
                yield phase, start_s, until_s, f"{words}: {until_s - start_s:.3f} s"
        if each.kind == "sample" and each.begun_at_s is not None:
            until_s = each.answered_at_s or now_s
            yield "sample", each.begun_at_s, until_s, f"{words}: {until_s - each.begun_at_s:.3f} s"
        if each.begun_at_s is None or each.number in dispatches or each.kind == "sample":
            continue
        dispatches.add(each.number)
        yield from _at_the_ranks(each, words)


def _at_the_ranks(line: Timeline, words: str) -> Iterator[tuple[str, float, float, str]]:
    """Rows alternate between forward and backward: only the sum of each is known, so they are drawn in turn."""
    at_s = line.begun_at_s or 0.0
    phases = line.phases()
    for phase in ("forward", "backward", "optimizer", "publish"):
        took_s = phases.get(phase, 0.0)
        if took_s > 0:
            yield phase, at_s, at_s + took_s, f"{words}, dispatch {line.number}: {took_s:.3f} s"
            at_s += took_s


def model_label(model_id: str) -> str:
    """A model in a few letters: the end of its session's id, and its number there."""
    session, _, number = model_id.partition(":")
    return f"{session.partition('.')[0][-6:]}:{number.rpartition(':')[2]}"


def brief(seconds: float) -> str:
    """A time inside a server, where milliseconds count."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else duration(seconds)


def curve_path(api: str, model_id: str) -> str:
    """The route of a model's metrics."""
    run = "training_runs" if api.startswith("/api/") else "run"
    return f"{api}/{run}/{quote(model_id, safe=':')}/curves"


ROUTES = (
    Route("GET", "/training", VIEWER, servers),
    Route("GET", "/training/{id}", VIEWER, server),
)
