"""Routes of gangs, read from their coordinator as an operator: page sizes, incidents shown (20), tokens valid for an
hour.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Final, Protocol

import msgspec

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.settings import Secret
from strata.coord.core.facts import nodes_job
from strata.coord.server.tokens import ALL_JOBS, Claims, TokenRole, Tokens
from strata.coord.view import GangEventsView, GangsView, GangView, JobView
from strata.fleet.artifacts.manifest import Word
from strata.fleet.wire.base import Message, Text
from strata.http.route import VIEWER, HttpCall, Route
from strata.hub.settings import GangCoordinatorSettings

if TYPE_CHECKING:
    from strata.coord.operator import Operator
    from strata.coord.worker.settings import Tls

OPERATORS_KEPT: Final = 32
TOKEN_S: Final = 3_600.0
"""How long a token is good that the hub signs for itself. A connection is used for half of that."""
INCIDENTS: Final = 20
INCIDENT_KINDS: Final = (
    "worker_lost", "worker_replaced", "straggler", "hang", "shard_quarantined", "barrier_slow", "barrier_timed_out",
    "checkpoint_bad", "recovery", "failover",
)  # fmt: skip


class GangQuery(Message, frozen=True, kw_only=True):
    search: Text = ""
    """A text to find in the names and hosts of workers."""
    offset: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50


class GangEventsQuery(Message, frozen=True, kw_only=True):
    kind: tuple[Word, ...] = ()
    search: Text = ""
    before: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


def open_gangs(settings: GangCoordinatorSettings, clock: Clock) -> CoordinatorGangs:
    """Reads the hub's coordinator with tokens that the hub signs for itself. ModuleNotFoundError without gRPC."""
    from strata.coord.worker.settings import Tls

    tokens = None if settings.token_secret is None else Tokens(settings.token_secret)
    tls = None if settings.ca is None else Tls(ca=settings.ca.expanduser())
    return CoordinatorGangs(settings.address, clock, tls=tls, tokens=tokens)


class CoordinatorGangs:
    """The gangs of a coordinator. Connections to it are kept, one for each job."""

    def __init__(
        self,
        address: str,
        clock: Clock,
        *,
        tls: Tls | None = None,
        tokens: Tokens | None = None,
        signs_as: str = "hub",
    ) -> None:
        """`tokens`: signs for an operator of all jobs, with the id `signs_as`."""
        self._address = address
        self._clock = clock
        self._tls = tls
        self._tokens = tokens
        self._signs_as = signs_as
        self._operators: dict[str, tuple[Operator, float]] = {}
        """The operator of each job, and when it was made; the one used last comes last."""
        self._closing: set[asyncio.Task[None]] = set()

    async def listed(self) -> GangsView:
        jobs = await self._operator("").jobs()
        # The launchers of a job's workers are a job of the coordinator too.
        launchers = {nodes_job(each.job_id) for each in jobs}
        return GangsView(gangs=tuple(each for each in jobs if each.job_id not in launchers), coordinator=self._address)

    async def described(self, gang_id: str, query: GangQuery) -> GangView:
        from strata.coord.operator import WorkerPage

        operator = self._operator(gang_id)
        wanted = WorkerPage(
            limit=query.limit, offset=query.offset, search=query.search, attention_first=True, lanes=True
        )
        page, incidents = await asyncio.gather(
            operator.page(wanted), operator.events(kinds=INCIDENT_KINDS, limit=INCIDENTS)
        )
        return GangView(**{**msgspec.structs.asdict(page), "job": _for_viewers(page.job)}, incidents=incidents.events)

    async def events(self, gang_id: str, query: GangEventsQuery) -> GangEventsView:
        return await self._operator(gang_id).events(query.kind, query.search, query.before, query.limit)

    async def close(self) -> None:
        for job in list(self._operators):
            self._discard(job)
        if self._closing:
            await asyncio.wait(self._closing)

    def _operator(self, job: str) -> Operator:
        from strata.coord.operator import Operator, OperatorSettings

        now_s = self._clock.monotonic_s()
        operator, made_s = self._operators.pop(job, (None, now_s))
        if operator is not None and self._tokens is not None and now_s - made_s >= TOKEN_S / 2:
            self._operators[job] = operator, made_s
            self._discard(job)
            operator = None
        if operator is None:
            settings = OperatorSettings(address=self._address, job=job, token=self._sign(), tls=self._tls)
            operator, made_s = Operator(settings, self._clock), now_s
        self._operators[job] = operator, made_s
        if len(self._operators) > OPERATORS_KEPT:
            self._discard(next(iter(self._operators)))
        return operator

    def _sign(self) -> Secret | None:
        if self._tokens is None:
            return None
        expires_s = round(self._clock.wall_s() + TOKEN_S)
        return Secret(
            self._tokens.issue(Claims(job=ALL_JOBS, role=TokenRole.OPERATOR, expires_s=expires_s, id=self._signs_as))
        )

    def _discard(self, job: str) -> None:
        operator, _ = self._operators.pop(job)
        task = asyncio.create_task(operator.__aexit__(None, None, None))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _for_viewers(job: JobView) -> JobView:
    """The job without what operators set and where its programs listen: every caller with a key may read a gang."""
    workers = tuple(msgspec.structs.replace(each, ip="", port=0) for each in job.workers)
    return msgspec.structs.replace(job, workers=workers, training_parameters={}, commands=(), refused_commands=())


class GangsContext(Protocol):
    """What the routes of gangs need of a server."""

    @property
    def gangs(self) -> CoordinatorGangs | None: ...


async def listed(call: HttpCall[GangsContext]) -> GangsView:
    """The jobs of the coordinator; none where the hub has no coordinator."""
    gangs = call.context.gangs
    return GangsView(gangs=(), coordinator="") if gangs is None else await gangs.listed()


async def described(call: HttpCall[GangsContext], query: GangQuery) -> GangView:
    """One gang with a page of its workers; first come those that may need a person."""
    return await _gangs(call).described(call.path["id"], query)


async def events(call: HttpCall[GangsContext], query: GangEventsQuery) -> GangEventsView:
    """Returns what happened to a gang and what it cost, the latest first."""
    return await _gangs(call).events(call.path["id"], query)


def _gangs(call: HttpCall[GangsContext]) -> CoordinatorGangs:
    if call.context.gangs is None:
        raise StrataError(Code.NOT_FOUND, "this hub has no coordinator of gangs", hint="set hub.coordinator")
    return call.context.gangs


ROUTES: Final = (
    Route("GET", "/v1/gangs", VIEWER, listed),
    Route("GET", "/v1/gang/{id}", VIEWER, described),
    Route("GET", "/v1/gang/{id}/events", VIEWER, events),
)
