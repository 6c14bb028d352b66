"""What the handlers of the API server work with: the link to the orchestrator, payloads, keys, and one request.

Nothing here remembers a client: any API server can take any request.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from strata.base.clock import Clock
from strata.base.errors import Code, StrataError
from strata.base.ids import Ids
from strata.http.auth_failures import AuthFailures
from strata.http.body import BodyPace
from strata.http.budget import BodyBudget
from strata.http.route import HttpCall
from strata.identity.authenticate import Authenticator
from strata.identity.ports import IdentityStore
from strata.identity.roles import Kind, Principal
from strata.train.api.request_metrics import RequestMetrics
from strata.train.core import messages, ops
from strata.train.core.messages import OrchestratorRequest, RequestType
from strata.train.payload import Payloads
from strata.train.settings import ServerSettings

T = TypeVar("T", bound=messages.Output)

ANSWER_S: Final = 10.0
"""How long the orchestrator may take for an answer that waits for nothing. Beyond, the client is told to come back."""
_NAMES: Final = 10_000


class Orchestrator(Protocol):
    async def ask(self, request: OrchestratorRequest, *, timeout_s: float) -> messages.Output: ...


@dataclass(frozen=True, kw_only=True)
class Site:
    settings: ServerSettings
    orchestrator: Orchestrator
    payloads: Payloads
    identity: IdentityStore
    authenticator: Authenticator
    clock: Clock
    ids: Ids
    answer_s: float = ANSWER_S
    pace: BodyPace = field(default_factory=BodyPace)
    names: dict[str, str] = field(default_factory=dict)
    signing_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """Of addresses that live for minutes."""
    requests: RequestMetrics = field(default_factory=RequestMetrics)
    failures: AuthFailures = field(default_factory=AuthFailures)
    bodies: BodyBudget = field(default_factory=BodyBudget)
    number: int = 0
    """Among the API servers of this machine."""

    async def tenant(self, caller: Principal) -> str:
        """Keys of one name are one tenant, so that a key can be replaced by a new one. A name never changes."""
        if caller.kind is not Kind.KEY:
            return caller.actor
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
class Call(HttpCall[Site]):
    """One request, after its caller is known, with what it may ask of the orchestrator."""

    async def submit(self, operation: ops.Operation, session_id: str = "") -> messages.Accepted:
        """Returns when the operation is durable."""
        request = await self._request(RequestType.ADD, operation=operation, session_id=session_id)
        return await self._ask(request, messages.Accepted)

    async def abort(self, future_id: str) -> None:
        await self._ask(await self._request(RequestType.ABORT, messages.Abort(future_id)), messages.Done)

    async def look(self, question: messages.Utility, kind: type[T]) -> T:
        """The answer to a question that is no operation."""
        return await self._ask(await self._request(RequestType.UTILITY, question), kind)

    async def watch(self, future_id: str, wait_s: float) -> messages.FutureResult | messages.QueuePosition:
        """The result of an operation, or where it stands when the time is over."""
        request = await self._request(RequestType.UTILITY, messages.WatchFuture(future_id, wait_s))
        output = await self._answer(request, wait_s)
        return output if isinstance(output, messages.QueuePosition) else _expected(output, messages.FutureResult)

    async def watch_samples(self, question: messages.WatchSamples) -> messages.SamplesEnded:
        """Samples of one sampler that ended meanwhile, none if the time is over."""
        output = await self._answer(await self._request(RequestType.UTILITY, question), question.wait_s)
        return _expected(output, messages.SamplesEnded)

    async def _request(
        self,
        request_type: RequestType,
        payload: messages.Abort | messages.Utility | None = None,
        *,
        operation: ops.Operation | None = None,
        session_id: str = "",
    ) -> OrchestratorRequest:
        return OrchestratorRequest(
            request_id=secrets.token_hex(12),
            request_type=request_type,
            tenant=await self.site.tenant(self.caller),
            operation=operation,
            payload=payload,
            session_id=session_id,
        )

    async def _ask(self, request: OrchestratorRequest, kind: type[T]) -> T:
        return _expected(await self._answer(request, 0.0), kind)

    async def _answer(self, request: OrchestratorRequest, wait_s: float) -> messages.Output:
        output = await self.site.orchestrator.ask(request, timeout_s=self.site.answer_s + wait_s)
        if isinstance(output, messages.ErrorResponse):
            raise StrataError(output.code, output.message, hint=output.hint)
        return output


def _expected(output: messages.Output, kind: type[T]) -> T:
    if not isinstance(output, kind):
        raise StrataError(Code.INTERNAL, f"the orchestrator answered with {type(output).__name__}")
    return output
