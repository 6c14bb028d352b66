"""Publisher: pushes weights to inference endpoints and routes samples to them, in background tasks.

Every task has a timeout. The orchestrator decides and dispatches without ever waiting for an engine, and the outcome of
a task is one more input. After a crash the next leader repeats the tasks: pushing the same version again is idempotent,
and a sample without a result has changed nothing.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from strata.base import log
from strata.base.clock import Clock
from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.train.core import messages, ops
from strata.train.core.inputs import CompletePush, CompleteRouted, Decision, Input, RequeueRouted, RouteSamples
from strata.train.core.sampling import SampleOperation, SampleResult, encode_result
from strata.train.core.state import InferenceEndpoint, Publication, Push, TrainState
from strata.train.endpoints.client import EngineClient
from strata.train.endpoints.engine import Engine, ModelVersion, stale_versions
from strata.train.endpoints.transformers_serve import TransformersEngine
from strata.train.endpoints.vllm import VllmEngine
from strata.train.settings import ServerSettings

LIST_S: Final = 3.0
"""How long an endpoint may take to list its versions for a status query."""
RETRY_S: Final = 5.0
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


class Publisher:
    def __init__(self, settings: ServerSettings, store: StateStorePort, store_result: StoreResult) -> None:
        self._settings = settings
        self._store = store
        self._store_result = store_result
        self._route = RouteSamples(settings.inference.max_samples)
        self._engines: dict[str, tuple[InferenceEndpoint, Engine]] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By endpoint: versions are pushed to it one after the other, in the order in which they were saved."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Run until cancelled."""
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
        for path, push in list(state.pushes.items()):
            self._start_task(f"push {path}", lambda push=push: self._push(push))  # type: ignore[misc]
        # Routing need not be durable: a sample whose route is lost is routed again.
        while state.rules.route and state.waiting and self._store.submit_nowait(self._route)[0].facts:
            pass
        for future_id, (endpoint, sample) in list(state.routed.items()):
            self._start_task(
                f"sample {future_id}",
                lambda future_id=future_id, endpoint=endpoint, sample=sample: self._sample(  # type: ignore[misc]
                    future_id, endpoint, sample
                ),
            )
        for name, task in self._tasks.items():
            if name.startswith("sample ") and name.removeprefix("sample ") not in state.routed:
                task.cancel()
        await self._close_removed()

    async def _close_removed(self) -> None:
        """Close the clients of endpoints that were removed."""
        for name in [name for name in self._engines if name not in self._store.state.endpoints]:
            _, engine = self._engines.pop(name)
            await engine.close()

    def _start_task(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        if name in self._tasks:
            return

        async def run() -> None:
            await work()

        task = self._tasks[name] = asyncio.create_task(run(), name=name)
        task.add_done_callback(lambda done: self._on_task_done(name, done))

    def _on_task_done(self, name: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("publish_task_failed", task=name, reason=repr(error))
            self._start_task("retry", self._retry)

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
            stored = await self._store_result(ops.SampleDone(ops.InlinePayload(encode_result(result))))
        except (StrataError, OSError) as error:
            _log.warning("routed_sample_failed", endpoint=endpoint, reason=str(error))
            await self._store.commit(RequeueRouted(future_id))
            return
        assert isinstance(stored, ops.SampleDone)
        await self._store.commit(CompleteRouted(future_id, stored, self._store.clock.wall_s()))

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
        try:
            return await engine.sample(version, sample, seed)
        except StrataError as error:
            if error.code is not Code.NOT_FOUND:
                raise
        async with self._locks[endpoint]:
            # A full model replaces another one: it is loaded again only into an engine that has none.
            if publication.path not in state.published or (self._full and await engine.versions()):
                raise StrataError(Code.NOT_FOUND, "newer weights have replaced these")
            await engine.load_version(version)
        _log.info("lost_weights_reloaded", endpoint=endpoint, version=version.name)
        return await engine.sample(version, sample, seed)

    # Status

    async def list_endpoints(self) -> messages.EndpointList:
        state = self._store.state
        return messages.EndpointList(
            await asyncio.gather(*(self._view(endpoint) for endpoint in list(state.endpoints.values())))
        )

    async def _view(self, endpoint: InferenceEndpoint) -> messages.EndpointView:
        versions: Sequence[str] = ()
        message = ""
        try:
            async with asyncio.timeout(LIST_S):
                versions = await self._engine(endpoint.name).versions()
        except (StrataError, TimeoutError) as error:
            message = str(error) or f"it did not reply within {LIST_S:g} seconds"
        published = self._store.state.published.values()
        pushed = [publication.version for publication in published if endpoint.name in publication.endpoints]
        return messages.EndpointView(
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

    @property
    def _full(self) -> bool:
        return self._settings.model.training == "full"

    @property
    def _keep_versions(self) -> int:
        return self._store.state.rules.keep_versions

    def _version(self, publication: Push | Publication) -> ModelVersion:
        folder = self._settings.checkpoints / publication.path
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
        client = EngineClient(endpoint, settings)
        engine: Engine
        match endpoint.engine:
            case "vllm":
                engine = VllmEngine(client, settings)
            case "transformers":
                base = Path(self._settings.model.path).expanduser().absolute()
                engine = TransformersEngine(client, settings, self._settings.published, base)
        self._engines[name] = endpoint, engine
        return engine
