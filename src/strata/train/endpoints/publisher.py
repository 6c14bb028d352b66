"""Pushes weights to engines and routes samples to them in background tasks: timeouts, retries (every 5 s, 5 failures),
when an engine is suspect, and when a sample goes back to the ranks.

Every task has a timeout. The orchestrator decides and dispatches without ever waiting for an engine, and the outcome of
a task is one more input. After a crash the next leader repeats the tasks: pushing the same version again is idempotent,
and a sample without a result has changed nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from strata.base import log
from strata.base.clock import Clock
from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.train.core import client_commands, ops
from strata.train.core.inputs import (
    ClientCommand,
    CompletePush,
    CompleteRouted,
    Decision,
    Input,
    RequeueRouted,
    RouteSamples,
)
from strata.train.core.sampling import SampledPart, SampleOperation, SampleResult, encode_result
from strata.train.core.state import InferenceEndpoint, Publication, Push, TrainState
from strata.train.endpoints.client import EngineClient, LocalEngine
from strata.train.endpoints.engine import Engine, ModelVersion, stale_versions
from strata.train.endpoints.shared_engines import SharedEngines
from strata.train.endpoints.transformers_serve import TransformersEngine
from strata.train.endpoints.vllm import VllmEngine
from strata.train.settings import ServerSettings
from strata.train.status import views

LOCAL: Final = "unix:"
"""Stands in front of the name of an engine that the launcher supervises, in the place of a URL."""
LIST_S: Final = 3.0
"""How long an endpoint may take to list its versions for a status query."""
RETRY_S: Final = 5.0
REVIVE_S: Final = 0.5
SUSPECT: Final = 2
"""Failed attempts after which a sample is drawn alone, so that those beside it do not fail with it."""
MAX_FAILURES: Final = 5
"""An engine may die of a sample: one in which so many attempts failed is not sent to another."""
_IN_VAIN: Final = (Code.NOT_FOUND, Code.UNSUPPORTED, Code.DEADLINE)
"""Errors after which another attempt ends the same: weights that were replaced, a request that the engine rejects, one
that takes longer than it may."""
_log = log.get(__name__)

StoreResult = Callable[[ops.Result], Awaitable[ops.Result]]


class StateStorePort(Protocol):
    """The state, how to decide an input and make it durable, and the event that something can be published."""

    @property
    def state(self) -> TrainState: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def publishable(self) -> asyncio.Event: ...
    def submit_nowait(self, request: Input) -> tuple[Decision, asyncio.Future[int] | None]: ...
    async def commit(self, request: Input) -> Decision: ...
    def record_tokens(self, future_id: str, part: SampledPart) -> None: ...


class Publisher:
    def __init__(self, settings: ServerSettings, store: StateStorePort, store_result: StoreResult) -> None:
        self._settings = settings
        self._store = store
        self._store_result = store_result
        self._engines: dict[str, tuple[InferenceEndpoint, Engine]] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks by endpoint: versions are pushed to it one after the other, in the order in which they were saved."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._uses: dict[str, frozenset[str]] = {}
        """The endpoints that each of them uses."""
        self._down: set[str] = set()
        """Engines of the server that failed and have not replied since: no sample is routed to them."""
        shared = settings.inference.engines if settings.inference.takes_turns else ()
        self.shared = SharedEngines(shared, self._engine, self._locks, store.publishable.set)
        self._failures: Counter[str] = Counter()
        """How often an engine of the server failed while it drew each sample."""

    async def run(self) -> None:
        """Run until cancelled."""
        await self._register_engines()
        try:
            while True:
                self._store.publishable.clear()
                await self.run_once()
                await self._store.publishable.wait()
        finally:
            # A loop, because a task that ends with an error starts another one.
            while self._tasks:
                for task in self._tasks.values():
                    task.cancel()
                await asyncio.wait(self._tasks.values())
            for _, engine in self._engines.values():
                await engine.close()

    async def run_once(self) -> None:
        """Start the tasks that are due, and cancel those whose sample is not routed any more."""
        state = self._store.state
        closed = self.shared.asleep.union(() if state.may_begin("engines") else state.rules.engines)
        for path, push in list(state.pushes.items()):
            if not closed.intersection(push.endpoints):
                self._start_task(
                    f"push {path}",
                    lambda push=push: self._push(push),  # type: ignore[misc]
                    frozenset(push.endpoints),
                )
        # Routing need not be durable: a sample whose route is lost is routed again.
        route = RouteSamples(self._settings.inference.max_samples, self.shared.asleep.union(self._down))
        while state.rules.route and state.waiting and self._store.submit_nowait(route)[0].facts:
            pass
        for future_id in [each for each in self._failures if each not in state.waiting and each not in state.routed]:
            del self._failures[future_id]
        for future_id, endpoint, sample in self._due_samples():
            self._start_task(
                f"sample {future_id}",
                lambda future_id=future_id, endpoint=endpoint, sample=sample: self._sample(  # type: ignore[misc]
                    future_id, endpoint, sample
                ),
                frozenset({endpoint}),
            )
        for name, task in self._tasks.items():
            if name.startswith("sample ") and name.removeprefix("sample ") not in state.routed:
                task.cancel()
        await self._close_removed()

    def _due_samples(self) -> Iterator[tuple[str, str, SampleOperation]]:
        """All samples of an endpoint. While engines may die of some, one of these alone, and the others wait."""
        by_endpoint: defaultdict[str, dict[str, SampleOperation]] = defaultdict(dict)
        for future_id, (endpoint, sample) in self._store.state.routed.items():
            by_endpoint[endpoint][future_id] = sample
        for endpoint, samples in by_endpoint.items():
            if endpoint in self._down or endpoint in self.shared.asleep:
                continue
            suspects = [future_id for future_id in samples if self._failures[future_id] >= SUSPECT]
            is_busy = any(f"sample {future_id}" in self._tasks for future_id in samples)
            for future_id in suspects[: 0 if is_busy else 1] if suspects else list(samples):
                yield future_id, endpoint, samples[future_id]

    async def _close_removed(self) -> None:
        """Close the clients of endpoints that were removed."""
        for name in [name for name in self._engines if name not in self._store.state.endpoints]:
            _, engine = self._engines.pop(name)
            await engine.close()

    def _start_task(self, name: str, work: Callable[[], Awaitable[None]], uses: frozenset[str] = frozenset()) -> None:
        if name in self._tasks:
            return
        self._uses[name] = uses

        async def run() -> None:
            await work()

        task = self._tasks[name] = asyncio.create_task(run(), name=name)
        task.add_done_callback(lambda done: self._on_task_done(name, done))

    def _on_task_done(self, name: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(name, None)
        self._uses.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("publish_task_failed", task=name, reason=repr(error))
            self._start_task("retry", self._retry)
        elif name.startswith("sample ") and any(
            f"sample {each}" not in self._tasks for each in self._store.state.routed
        ):
            # It was routed to another engine before this task had ended, or others waited until it had.
            self._store.publishable.set()

    async def _retry(self) -> None:
        """Retry after an unexpected error: the task is still due, and perhaps no further fact triggers it."""
        await self._store.clock.sleep(RETRY_S)
        self._store.publishable.set()

    # Weights

    async def _push(self, push: Push) -> None:
        outcomes = await asyncio.gather(*(self._push_to(name, push) for name in push.endpoints))
        await self._store.commit(CompletePush(push.path, outcomes, self._store.clock.wall_s()))

    async def _push_to(self, name: str, push: Push) -> ops.EndpointOutcome:
        clock = self._store.clock
        async with self._locks[name]:
            started_s = clock.monotonic_s()
            message = ""
            retired: Sequence[str] = ()
            try:
                async with asyncio.timeout(self._settings.inference.push_timeout_s):
                    message, retired = await self._load_versions(name, push)
            except (StrataError, TimeoutError, OSError, msgspec.MsgspecError) as error:
                reason = str(error) or "it took too long"
                _log.warning("weights_push_failed", endpoint=name, reason=reason)
                return ops.EndpointOutcome(name, ok=False, seconds=clock.monotonic_s() - started_s, message=reason)
        seconds = clock.monotonic_s() - started_s
        _log.info("weights_pushed", endpoint=name, version=push.version, seconds=round(seconds, 4))
        return ops.EndpointOutcome(name, ok=True, seconds=seconds, message=message, retired=retired)

    async def _load_versions(self, name: str, push: Push) -> tuple[str, Sequence[str]]:
        """Load the new version and whatever a restarted engine has lost; then unload the stale ones."""
        engine = self._engine(name)
        loaded = await engine.versions()
        lost = self._lost(name, push, loaded)
        if push.version not in loaded:
            await engine.load_version(self._version(push))
        for publication in lost:
            await engine.load_version(self._version(publication))
        stale = stale_versions(loaded, push.version, self._keep_versions)
        retired = [version for version in stale if version in loaded and version != push.version]
        for old in retired:
            await engine.unload_version(old)
        message = f"it had lost {', '.join(publication.version for publication in lost)}" if lost else ""
        return message, retired

    def _lost(self, name: str, push: Push, loaded: Sequence[str]) -> list[Publication]:
        return [publication for publication in self._newest(name, push) if publication.version not in loaded]

    def _newest(self, name: str, push: Push) -> list[Publication]:
        """The newest version of every other model on this endpoint. A full model occupies an engine alone."""
        if self._full:
            return []
        newest: dict[str, Publication] = {}
        for publication in self._store.state.published.values():
            if name in publication.endpoints and publication.model_id != push.model_id:
                other = newest.get(publication.model_id)
                newest[publication.model_id] = (
                    publication if other is None or publication.seq_id > other.seq_id else other
                )
        return list(newest.values())

    # Samples

    async def _sample(self, future_id: str, endpoint: str, sample: SampleOperation) -> None:
        try:
            result = await self._sample_from(future_id, endpoint, sample)
            stored = await self._store_result(
                ops.SampleDone(ops.InlinePayload(encode_result(result)), result.sampled_tokens)
            )
        except (StrataError, OSError) as error:
            _log.warning("routed_sample_failed", endpoint=endpoint, reason=str(error))
            await self._store.commit(self._after_failure(future_id, endpoint, error))
            return
        assert isinstance(stored, ops.SampleDone)
        await self._store.commit(CompleteRouted(future_id, stored, self._store.clock.wall_s()))

    def _after_failure(
        self, future_id: str, endpoint: str, error: StrataError | OSError
    ) -> RequeueRouted | CompleteRouted:
        """The ranks draw what an endpoint of an operator fails to, what no engine would draw, and all if the settings
        say so; or it fails, where the ranks are to draw nothing of engines. Else the sample waits for an engine, and
        fails when engines failed with it too often: it may be what they die of."""
        inference = self._settings.inference
        in_vain = isinstance(error, StrataError) and error.code in _IN_VAIN
        if endpoint not in inference.engines or inference.fallback or in_vain:
            if inference.unroutable == "ranks" or (inference.fallback and not in_vain):
                return RequeueRouted(future_id)
            unsupported = isinstance(error, StrataError) and error.code is Code.UNSUPPORTED
            failed = ops.Failed("user" if unsupported else "server", f"an inference engine failed to draw it: {error}")
            return CompleteRouted(future_id, failed, self._store.clock.wall_s())
        # An engine that was down already has not seen the sample.
        self._failures[future_id] += isinstance(error, StrataError) and bool(error.detail.get("connected", True))
        if self._failures[future_id] >= MAX_FAILURES:
            failed = ops.Failed("server", f"inference engines failed {MAX_FAILURES} times to draw it: {error}")
            return CompleteRouted(future_id, failed, self._store.clock.wall_s())
        self._down.add(endpoint)
        self._start_task(f"revive {endpoint}", lambda: self._revive(endpoint))
        return RequeueRouted(future_id, again=True)

    async def _revive(self, endpoint: str) -> None:
        """Return when the engine replies: samples are routed to it again."""
        while True:
            await self._store.clock.sleep(REVIVE_S)
            try:
                async with asyncio.timeout(LIST_S):
                    await self._engine(endpoint).versions()
            except (StrataError, TimeoutError):
                continue
            _log.info("engine_replies_again", endpoint=endpoint)
            self._down.discard(endpoint)
            self._store.publishable.set()
            return

    async def _sample_from(self, future_id: str, endpoint: str, sample: SampleOperation) -> SampleResult:
        """A restarted engine has lost the weights: they are loaded again, and the request is retried once."""
        state = self._store.state
        sampler = state.samplers.get(sample.sampler_id)
        publication = state.published.get(sampler.folder) if sampler else None
        if publication is None:
            raise StrataError(Code.NOT_FOUND, "newer weights have replaced these")
        engine, version = self._engine(endpoint), self._version(publication)
        # Without a seed, the request's own id is the seed, as on the ranks.
        requested = sample.params.seed
        seed = int(sha256_hex(future_id.encode())[:15], 16) if requested is None else requested & (2**63 - 1)

        def report(part: SampledPart) -> None:
            self._store.record_tokens(future_id, part)

        try:
            return await engine.sample(version, sample, seed, report)
        except StrataError as error:
            if error.code is not Code.NOT_FOUND:
                raise
        async with self._locks[endpoint]:
            loaded = await engine.versions()
            # A full model replaces another one: it is loaded again only into an engine that has none.
            if publication.path not in state.published or (self._full and loaded and version.name not in loaded):
                raise StrataError(Code.NOT_FOUND, "newer weights have replaced these")
            # Another sample may have found this out before.
            if version.name not in loaded:
                await engine.load_version(version)
                _log.info("lost_weights_reloaded", endpoint=endpoint, version=version.name)
        try:
            return await engine.sample(version, sample, seed, report)
        except StrataError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            raise StrataError(Code.UNAVAILABLE, "the engine has lost the weights again") from None

    @property
    def is_idle(self) -> bool:
        """Says whether no task uses an engine of the server. None begins while they leave devices that they share."""
        engines = self._settings.inference.engines
        return all(uses.isdisjoint(engines) for uses in self._uses.values())

    # Status

    async def list_endpoints(self) -> views.EndpointList:
        state = self._store.state
        return views.EndpointList(
            await asyncio.gather(*(self._view(endpoint) for endpoint in list(state.endpoints.values())))
        )

    async def _view(self, endpoint: InferenceEndpoint) -> views.EndpointView:
        versions: Sequence[str] = ()
        message = ""
        try:
            async with asyncio.timeout(LIST_S):
                versions = await self._engine(endpoint.name).versions()
        except (StrataError, TimeoutError) as error:
            message = str(error) or f"it did not reply within {LIST_S:g} seconds"
        published = self._store.state.published.values()
        pushed = [publication.version for publication in published if endpoint.name in publication.endpoints]
        return views.EndpointView(
            name=endpoint.name,
            url=endpoint.url,
            address=endpoint.address,
            engine=endpoint.engine,
            added_at_s=endpoint.added_at_s,
            reachable=not message,
            message=message,
            versions=versions,
            published=pushed,
        )

    # Engines

    async def _register_engines(self) -> None:
        """Make endpoints of the engines that the launcher supervises today, and of no others."""
        names, now_s = self._settings.inference.engines, self._store.clock.wall_s()
        for endpoint in list(self._store.state.endpoints.values()):
            if endpoint.url.startswith(LOCAL) != (endpoint.name in names):
                # An endpoint of an operator that has the name of an engine makes room for it.
                _log.info("endpoint_replaced", endpoint=endpoint.name, url=endpoint.url)
                await self._store.commit(ClientCommand("", client_commands.RemoveEndpoint(endpoint.name), now_s))
        for name in names:
            add = client_commands.AddEndpoint(name, f"{LOCAL}{name}", "vllm")
            await self._store.commit(ClientCommand("", add, now_s))

    def _local_engine(self, endpoint: InferenceEndpoint) -> LocalEngine | None:
        if endpoint.name not in self._settings.inference.engines:
            return None
        return LocalEngine(self._settings.engine_socket(endpoint.name), self._settings.engine_key)

    @property
    def _full(self) -> bool:
        return self._settings.model.training == "full"

    @property
    def _keep_versions(self) -> int:
        return self._store.state.rules.keep_versions

    def _version(self, publication: Push | Publication) -> ModelVersion:
        folder = self._settings.checkpoint_folder / publication.path
        return ModelVersion(publication.version, folder, full=self._full)

    def _engine(self, name: str) -> Engine:
        """FORBIDDEN if the settings do not allow the endpoint any more, NOT_FOUND if it was removed."""
        endpoint = self._store.state.endpoints.get(name)
        if endpoint is None:
            raise StrataError(Code.NOT_FOUND, f"there is no inference endpoint {name!r} any more")
        cached = self._engines.get(name)
        if cached is not None and cached[0] == endpoint:
            return cached[1]
        settings = self._settings.inference
        client = EngineClient(endpoint, settings, self._local_engine(endpoint))
        engine: Engine
        match endpoint.engine:
            case "vllm":
                engine = VllmEngine(client, settings)
            case "transformers":
                base = Path(self._settings.model.path).expanduser().absolute()
                engine = TransformersEngine(client, settings, self._settings.published, base)
        self._engines[name] = endpoint, engine
        return engine
