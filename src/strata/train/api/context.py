"""What the handlers of the API server share: the orchestrator with its reply timeout (10 s), payloads, keys, the
caller's tenant, and the API server's Prometheus metrics (`ApiMetrics`).

Nothing here remembers a client: any API server can take any request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar, cast

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from strata.base import trace
from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.http.auth_failures import AuthFailures
from strata.http.body import BodyPace
from strata.http.budget import BodyBudget
from strata.http.metrics import new_registry
from strata.http.request_metrics import RequestMetrics
from strata.http.route import HttpCall
from strata.identity.authenticate import Authenticator
from strata.identity.roles import CallerKind, Principal
from strata.identity.store import IdentityStore
from strata.train.api.front import model_from_front
from strata.train.api.sampler_cache import SamplerCache
from strata.train.api.template_process import TemplateRenderer
from strata.train.api.text import TextLoader
from strata.train.core import client_commands, ops
from strata.train.images import ImageForm
from strata.train.link import messages
from strata.train.link.messages import OrchestratorRequest
from strata.train.payload import Payloads
from strata.train.settings import METRICS_PREFIX, ServerSettings
from strata.train.status import queries, views
from strata.train.wire.images import NO_IMAGES

T = TypeVar("T", bound=messages.Output)


REPLY_TIMEOUT_S: Final = 10.0
"""How long the orchestrator may take for a reply that waits for nothing; then the client is told to retry."""
_NAMES: Final = 10_000


class ApiMetrics:
    """`number` is this server's among the API servers of a machine: any of them may be scraped."""

    def __init__(self, number: int = 0) -> None:
        self._registry: CollectorRegistry = new_registry()
        self.requests = RequestMetrics(METRICS_PREFIX, self._registry, {"server": str(number)})

    def expose(self) -> bytes:
        return generate_latest(self._registry)


class OrchestratorPort(Protocol):
    async def request(self, request: OrchestratorRequest, *, timeout_s: float) -> messages.Output: ...


@dataclass(frozen=True, kw_only=True)
class ApiContext:
    settings: ServerSettings
    orchestrator: OrchestratorPort
    payloads: Payloads
    identity: IdentityStore
    authenticator: Authenticator
    clock: Clock
    ids: Ids
    text: TextLoader
    templates: TemplateRenderer
    grammars: TemplateRenderer
    """A process of its own: schemas are of clients, and are not to hold up chats without one."""
    reply_timeout_s: float = REPLY_TIMEOUT_S
    pace: BodyPace = field(default_factory=BodyPace)
    names: dict[str, str] = field(default_factory=dict)
    signing_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """Signs the URLs of archives, which are valid for minutes."""
    metrics: ApiMetrics = field(default_factory=ApiMetrics)
    failures: AuthFailures = field(default_factory=AuthFailures)
    bodies: BodyBudget = field(default_factory=BodyBudget)
    number: int = 0
    """The number among the API servers of this machine."""
    samplers: SamplerCache = field(default_factory=SamplerCache)
    images: ImageForm | str = NO_IMAGES
    """How the model takes images, or why it takes none."""
    decoding: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the request whose images are decoded."""

    async def tenant(self, caller: Principal) -> str:
        """Keys of one name are one tenant, so that a key can be replaced by a new one. A name never changes."""
        if caller.kind is CallerKind.TENANT:
            return f"key:{caller.id}"
        if caller.kind is not CallerKind.KEY:
            return str(caller.actor)
        name = self.names.get(caller.id)
        if name is None:
            key = await self.identity.key(caller.id)
            if key is None:
                raise StrataError(Code.UNAUTHENTICATED, "these credentials are not known here")
            if len(self.names) >= _NAMES:
                self.names.clear()
            name = self.names[caller.id] = key.name
        return f"key:{name}"


@dataclass(slots=True)
class ApiCall(HttpCall[ApiContext]):
    """One request, after its caller is known, and the requests it may send to the orchestrator."""

    async def submit(self, operation: ops.Operation, session_id: str = "") -> client_commands.Accepted:
        """Returns when the operation is durable."""
        return await self.request(client_commands.SubmitOperation(operation, session_id), client_commands.Accepted)

    async def abort(self, future_id: str) -> None:
        await self.request(client_commands.AbortOperation(future_id), client_commands.Done)

    async def request(self, message: client_commands.Command | queries.Query, kind: type[T]) -> T:
        """The response to a command or a query that does not wait."""
        return _expect(await self._exchange(message, 0.0), kind)

    async def resolve_replay(self, command: client_commands.ResolveReplay) -> client_commands.Accepted | None:
        """Returns the load of a roll back, when it is accepted; None: the new numbers are."""
        output = await self._exchange(command, 0.0)
        if isinstance(output, client_commands.Accepted):
            return output
        _expect(output, client_commands.Done)
        return None

    async def watch(self, future_id: str, wait_s: float) -> views.FutureResult | views.QueuePosition:
        """The result of an operation, or where it stands when the time is over."""
        output = await self._exchange(queries.WatchFuture(future_id, wait_s), wait_s)
        return output if isinstance(output, views.QueuePosition) else _expect(output, views.FutureResult)

    async def watch_tokens(
        self, future_id: str, counts: Sequence[int], wait_s: float
    ) -> views.FutureResult | views.QueuePosition | views.TokensSampled:
        """Watches as `watch` does, or returns before that tokens of a streamed sample beyond these counts."""
        output = await self._exchange(queries.WatchTokens(future_id, counts, wait_s), wait_s)
        if isinstance(output, views.QueuePosition | views.TokensSampled):
            return output
        return _expect(output, views.FutureResult)

    async def watch_samples(self, watch: queries.WatchSamples) -> views.SamplesEnded:
        """Samples of one sampler that ended meanwhile, none if the time is over."""
        return _expect(await self._exchange(watch, watch.wait_s), views.SamplesEnded)

    async def request_as(self, tenant: str, message: queries.Query, kind: type[T]) -> T:
        """The response to a query of another tenant, which has granted it."""
        return _expect(await self._exchange(message, 0.0, tenant), kind)

    async def _exchange(
        self, message: client_commands.Command | queries.Query, wait_s: float, tenant: str | None = None
    ) -> messages.Output:
        tenant = await self.context.tenant(self.caller) if tenant is None else tenant
        message = _with_own_id(message, *model_from_front(self.caller, self.headers))
        request = OrchestratorRequest(secrets.token_hex(12), tenant, message, trace.traceparent())
        output = await self.context.orchestrator.request(request, timeout_s=self.context.reply_timeout_s + wait_s)
        if isinstance(output, views.ErrorResponse):
            lost = self.context.settings.server.lost if output.code is Code.NOT_FOUND else ""
            raise StrataError(output.code, output.message, hint=lost or output.hint)
        return output


def _with_own_id(
    message: client_commands.Command | queries.Query, composed: str, own: str
) -> client_commands.Command | queries.Query:
    """The message with the id that a model has here, where it has the one that its client composed."""
    subject: Any = message.operation if isinstance(message, client_commands.SubmitOperation) else message
    if not composed or getattr(subject, "model_id", "") != composed:
        return message
    renamed = msgspec.structs.replace(subject, model_id=own)
    if isinstance(message, client_commands.SubmitOperation):
        return msgspec.structs.replace(message, operation=renamed)
    return cast("client_commands.Command | queries.Query", renamed)


def project_of(tenant: str) -> str:
    """The id of a tenant's project: each has one, of its own name."""
    return tenant.removeprefix("key:")


def _expect(output: messages.Output, kind: type[T]) -> T:
    if not isinstance(output, kind):
        raise StrataError(Code.INTERNAL, f"the orchestrator replied with {type(output).__name__}")
    return output
