"""What the state store calls durable is what rank 0 may forget, and what clients may be told."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import get_args

from strata.base.clock import SystemClock
from strata.journal.replica import Replica
from strata.train.core import model_options, ops
from strata.train.core.client_commands import AbortOperation, OpenSession, SubmitOperation
from strata.train.core.inputs import ClientCommand, CompleteDispatch, Dispatching, DispatchNext, FailDispatch
from strata.train.core.machine import TrainMachine
from strata.train.core.state import Rules
from strata.train.link import messages
from strata.train.link.ports import Links, ZmqLinks
from strata.train.orchestrator.backend import RemoteBackend
from strata.train.orchestrator.rank_session import OrchestratorContext
from strata.train.orchestrator.request_handler import RequestHandler
from strata.train.orchestrator.request_processor import RequestProcessor
from strata.train.orchestrator.state_store import StateStore, TrainReplica
from strata.train.payload import Payloads
from strata.train.settings import ServerSettings, load_settings
from strata.train.status import queries, views
from strata.train.status.throughput import ThroughputEstimate
from tests.support.memory_journal import MemoryJournal

MODEL = "s:train:0"


async def leading() -> StateStore:
    clock = SystemClock()
    rules = Rules(initial_checkpoint=False, base_models=("tiny",))
    replica: TrainReplica = Replica(MemoryJournal(clock), "train/t", TrainMachine(rules), clock)
    await replica.lead("the-test", 60.0)
    return StateStore(replica, clock)


async def test_a_dispatch_that_is_given_up_does_not_make_the_answers_before_it_durable() -> None:
    """Rank 0 would forget the answer of the first, and whoever asks for it again would never get it."""
    store = await leading()
    await store.commit(ClientCommand("alice", OpenSession("s"), 0.0))
    await store.commit(
        ClientCommand("alice", SubmitOperation(ops.CreateModel(MODEL, "tiny", model_options.LoraConfig()), "s"), 0.0)
    )
    await store.commit(
        ClientCommand("alice", SubmitOperation(ops.OptimStep(MODEL, 1, model_options.AdamParams())), 0.0)
    )
    for number in (1, 2):
        outcome = await store.commit(DispatchNext(1, 100, 0.0))
        assert isinstance(outcome.reply, Dispatching)
        assert outcome.reply.dispatch.number == number
    await store.commit(FailDispatch(2, "its payload is lost", 0.0))
    assert store.durable_through == 0
    await store.commit(CompleteDispatch(1, [ops.ModelCreated(MODEL)], 0.0))
    assert store.durable_through == 2


async def test_a_failure_is_told_only_when_it_is_durable(tmp_path: Path) -> None:
    """It is decided here and kept nowhere else: the next leader would give the operation another end."""
    store = await leading()
    await store.commit(ClientCommand("alice", OpenSession("s"), 0.0))
    await store.commit(
        ClientCommand("alice", SubmitOperation(ops.CreateModel(MODEL, "tiny", model_options.LoraConfig()), "s"), 0.0)
    )
    await store.commit(
        ClientCommand("alice", SubmitOperation(ops.OptimStep(MODEL, 1, model_options.AdamParams())), 0.0)
    )
    request = messages.OrchestratorRequest("q", "alice", queries.WatchFuture(f"{MODEL}:1", 0.0))
    settings = settings_in(tmp_path)
    with closing(ZmqLinks(settings)) as links:
        handler = RequestHandler(context_on(store, settings, links))
        _, durable = store.submit_nowait(ClientCommand("alice", AbortOperation(f"{MODEL}:1"), store.clock.wall_s()))
        assert durable is not None
        assert not durable.done()
        output = await handler.handle(request)
    assert isinstance(output, views.FutureResult)
    assert isinstance(output.result, ops.Failed)
    assert durable.done()


async def test_every_query_has_a_handler(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    with closing(ZmqLinks(settings)) as links:
        handler = RequestHandler(context_on(await leading(), settings, links))
    assert set(handler.queries) == set(get_args(queries.Query))


def settings_in(folder: Path) -> ServerSettings:
    file = folder / "server.toml"
    file.write_text(f'[server]\ndata = "{folder}"\n[model]\npath = "tiny"\n', encoding="utf-8")
    return load_settings(file, environ={})


def context_on(store: StateStore, settings: ServerSettings, links: Links) -> OrchestratorContext:
    return OrchestratorContext(
        settings=settings,
        journal=MemoryJournal(store.clock),
        store=store,
        backend=RemoteBackend(links, settings, store.clock, store.leader_epoch),
        processor=RequestProcessor(Payloads(settings.payloads), settings.checkpoint_folder),
        throughput=ThroughputEstimate(),
    )
