"""The endpoints at work: weights are pushed to them and samples asked of them, beside everything else that goes on.

Everything here is a task with a timeout. The orchestrator decides and dispatches without ever waiting for an engine,
and what comes of a task is one more input. A process that dies in between does it again when it leads again: under the
same name the same weights are harmless, and a sample that was not given has changed nothing.
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
from strata.train.core.sampling import Sample, SampleResult, encode_result
from strata.train.core.state import InferenceEndpoint, Publication, Push, TrainState
from strata.train.endpoints.client import EngineClient
from strata.train.endpoints.engine import Engine, Version, stale
from strata.train.endpoints.transformers_serve import TransformersEngine
from strata.train.endpoints.vllm import VllmEngine
from strata.train.settings import ServerSettings

LOOK_S: Final = 3.0
"""For an endpoint to say what it has, when somebody looks."""
AGAIN_S: Final = 5.0
_log = log.get(__name__)

Keep = Callable[[ops.Result], Awaitable[ops.Result]]


class StateStorePort(Protocol):
    """What is decided and made durable, and the moment at which something was."""

    @property
    def state(self) -> TrainState: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def publishable(self) -> asyncio.Event: ...
    def submit_nowait(self, given: Input) -> tuple[Decision, asyncio.Future[int] | None]: ...
    async def commit(self, given: Input) -> Decision: ...


class Publisher:
    def __init__(self, settings: ServerSettings, store: StateStorePort, keep: Keep) -> None:
        self._settings = settings
        self._store = store
        self._keep = keep
        self._route = RouteSamples(settings.inference.max_samples)
        self._engines: dict[str, tuple[InferenceEndpoint, Engine]] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Of each endpoint: weights come to it one after the other, in the order in which they were saved."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._store.publishable.clear()
                await self.run_once()
                await self._store.publishable.wait()
        finally:
            # One that ends with an error begins another.
            while self._tasks:
                for task in self._tasks.values():
                    task.cancel()
                await asyncio.wait(self._tasks.values())
            for _, engine in self._engines.values():
                await engine.close()

    async def run_once(self) -> None:
        """Begin what is to be done, and give up what nobody waits for any more."""
        state = self._store.state
        for path, push in list(state.pushes.items()):
            self._begin(f"push {path}", lambda push=push: self._push(push))  # type: ignore[misc]
        # Need not be durable: a sample whose way is forgotten finds it again.
        while state.rules.route and state.waiting and self._store.submit_nowait(self._route)[0].facts:
            pass
        for future_id, (endpoint, sample) in list(state.routed.items()):
            self._begin(
                f"sample {future_id}",
                lambda future_id=future_id, endpoint=endpoint, sample=sample: self._sample(  # type: ignore[misc]
                    future_id, endpoint, sample
                ),
            )
        for name, task in self._tasks.items():
            if name.startswith("sample ") and name.removeprefix("sample ") not in state.routed:
                task.cancel()
        for name in [each for each in self._engines if each not in state.endpoints]:
            _, engine = self._engines.pop(name)
            await engine.close()

    def _begin(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        if name in self._tasks:
            return

        async def run() -> None:
            await work()

        task = self._tasks[name] = asyncio.create_task(run(), name=name)
        task.add_done_callback(lambda done: self._ended(name, done))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("an inference endpoint was not told", what=name, reason=repr(error))
            self._begin("again", self._look_again)

    async def _look_again(self) -> None:
        """What went wrong in a way that nobody foresaw is still to be done, and perhaps no fact comes to say so."""
        await self._store.clock.sleep(AGAIN_S)
        self._store.publishable.set()

    # Weights

    async def _push(self, push: Push) -> None:
        outcomes = await asyncio.gather(*(self._tell(name, push) for name in push.endpoints))
        await self._store.commit(CompletePush(push.path, outcomes, self._store.clock.wall_s()))

    async def _tell(self, name: str, push: Push) -> ops.EndpointOutcome:
        clock = self._store.clock
        async with self._turns[name]:
            began_s = clock.monotonic_s()
            noticed = ""
            retired: Sequence[str] = ()
            try:
                async with asyncio.timeout(self._settings.inference.push_timeout_s):
                    noticed, retired = await self._give(name, push)
            except (StrataError, TimeoutError, OSError, msgspec.MsgspecError) as error:
                reason = str(error) or "it took too long"
                _log.warning("an inference endpoint has no new weights", endpoint=name, reason=reason)
                return ops.EndpointOutcome(name, ok=False, seconds=clock.monotonic_s() - began_s, message=reason)
        seconds = clock.monotonic_s() - began_s
        _log.info("weights pushed", endpoint=name, version=push.version, seconds=round(seconds, 4))
        return ops.EndpointOutcome(name, ok=True, seconds=seconds, message=noticed, retired=retired)

    async def _give(self, name: str, push: Push) -> tuple[str, Sequence[str]]:
        """The new version, and whatever a restarted engine has lost; then the old ones go."""
        engine = self._engine(name)
        there = await engine.versions()
        lost = [each for each in self._newest(name, push) if each.version not in there]
        if push.version not in there:
            await engine.take(self._version(push))
        for each in lost:
            await engine.take(self._version(each))
        retired = [each for each in stale(there, push.version, self._kept) if each in there and each != push.version]
        for old in retired:
            await engine.drop(old)
        noticed = f"it had lost {', '.join(each.version for each in lost)}" if lost else ""
        return noticed, retired

    def _newest(self, name: str, push: Push) -> list[Publication]:
        """What the endpoint was told of other models last. A whole model has the engine for itself."""
        if self._whole:
            return []
        newest: dict[str, Publication] = {}
        for each in self._store.state.published.values():
            if name in each.endpoints and each.model_id != push.model_id:
                known = newest.get(each.model_id)
                newest[each.model_id] = each if known is None or each.seq_id > known.seq_id else known
        return list(newest.values())

    # Samples

    async def _sample(self, future_id: str, endpoint: str, sample: Sample) -> None:
        try:
            result = await self._ask(future_id, endpoint, sample)
            kept = await self._keep(ops.SampleDone(ops.InlinePayload(encode_result(result))))
        except (StrataError, OSError) as error:
            _log.warning("an inference endpoint gave no sample", endpoint=endpoint, reason=str(error))
            await self._store.commit(RequeueRouted(future_id))
            return
        assert isinstance(kept, ops.SampleDone)
        await self._store.commit(CompleteRouted(future_id, kept, self._store.clock.wall_s()))

    async def _ask(self, future_id: str, endpoint: str, sample: Sample) -> SampleResult:
        """An engine that was started anew has lost the weights: it gets them again, and is asked once more."""
        state = self._store.state
        sampler = state.samplers.get(sample.sampler_id)
        publication = state.published.get(sampler.folder) if sampler else None
        if publication is None:
            raise StrataError(Code.NOT_FOUND, "newer weights have taken the place of these")
        engine, version = self._engine(endpoint), self._version(publication)
        # Without a seed, chance comes from the request's own name, as with the ranks.
        given = sample.params.seed
        seed = int(sha256_hex(future_id.encode())[:15], 16) if given is None else given & (2**63 - 1)
        try:
            return await engine.sample(version, sample, seed)
        except StrataError as error:
            if error.code is not Code.NOT_FOUND:
                raise
        async with self._turns[endpoint]:
            # A whole model takes the place of another: only an engine that has none is told of this one again.
            if publication.path not in state.published or (self._whole and await engine.versions()):
                raise StrataError(Code.NOT_FOUND, "newer weights have taken the place of these")
            await engine.take(version)
        _log.info("an inference endpoint had lost weights and has them again", endpoint=endpoint, version=version.name)
        return await engine.sample(version, sample, seed)

    # Looking

    async def look(self) -> messages.EndpointList:
        state = self._store.state
        return messages.EndpointList(
            await asyncio.gather(*(self._view(each) for each in list(state.endpoints.values())))
        )

    async def _view(self, endpoint: InferenceEndpoint) -> messages.EndpointView:
        versions: Sequence[str] = ()
        message = ""
        try:
            async with asyncio.timeout(LOOK_S):
                versions = await self._engine(endpoint.name).versions()
        except (StrataError, TimeoutError) as error:
            message = str(error) or f"it did not answer within {LOOK_S:g} seconds"
        told = [each.version for each in self._store.state.published.values() if endpoint.name in each.endpoints]
        return messages.EndpointView(
            name=endpoint.name,
            url=endpoint.url,
            address=endpoint.address,
            engine=endpoint.engine,
            added_at_s=endpoint.added_at_s,
            reachable=not message,
            message=message,
            versions=versions,
            published=told,
        )

    # Engines

    @property
    def _whole(self) -> bool:
        return self._settings.model.training == "full"

    @property
    def _kept(self) -> int:
        return self._store.state.rules.keep_versions

    def _version(self, of: Push | Publication) -> Version:
        return Version(of.version, self._settings.checkpoints / of.path, whole=self._whole)

    def _engine(self, name: str) -> Engine:
        """FORBIDDEN if the settings do not allow it any more, NOT_FOUND if it was removed."""
        endpoint = self._store.state.endpoints.get(name)
        if endpoint is None:
            raise StrataError(Code.NOT_FOUND, f"there is no inference endpoint {name!r} any more")
        known = self._engines.get(name)
        if known is not None and known[0] == endpoint:
            return known[1]
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
