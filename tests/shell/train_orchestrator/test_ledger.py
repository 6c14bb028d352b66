"""What the ledger calls durable is what rank 0 may forget, and what clients may be told."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from strata.base.clock import SystemClock
from strata.journal.memory import MemoryJournal
from strata.journal.replica import Replica
from strata.train.core import messages, ops
from strata.train.core.inputs import Abort, Accept, Answer, Dispatching, DispatchNext, GiveUp, OpenSession
from strata.train.core.machine import TrainMachine
from strata.train.core.pace import Pace
from strata.train.core.state import Rules
from strata.train.link.ports import Links, ZmqLinks
from strata.train.orchestrator.backend import RemoteBackend
from strata.train.orchestrator.conversation import Parts
from strata.train.orchestrator.ledger import Ledger, TrainReplica
from strata.train.orchestrator.questions import Questions
from strata.train.orchestrator.request_processor import RequestProcessor
from strata.train.payload import Payloads
from strata.train.settings import ServerSettings, load_settings

MODEL = "s:train:0"


async def leading() -> Ledger:
    clock = SystemClock()
    rules = Rules(initial_checkpoint=False, base_models=("tiny",))
    replica: TrainReplica = Replica(MemoryJournal(clock), "train/t", TrainMachine(rules), clock)
    await replica.lead("the-test", 60.0)
    return Ledger(replica, clock)


async def test_a_dispatch_that_is_given_up_does_not_make_the_answers_before_it_durable() -> None:
    """Rank 0 would forget the answer of the first, and whoever asks for it again would never get it."""
    ledger = await leading()
    await ledger.commit(OpenSession("alice", "s", 0.0))
    await ledger.commit(Accept("alice", ops.CreateModel(MODEL, "tiny", ops.LoraConfig()), 0.0, "s"))
    await ledger.commit(Accept("alice", ops.OptimStep(MODEL, 1, ops.AdamParams()), 0.0))
    for number in (1, 2):
        outcome = await ledger.commit(DispatchNext(1, 100, 0.0))
        assert isinstance(outcome.reply, Dispatching)
        assert outcome.reply.dispatch.number == number
    await ledger.commit(GiveUp(2, "its payload is lost", 0.0))
    assert ledger.durable == 0
    await ledger.commit(Answer(1, [ops.ModelCreated(MODEL)], 0.0))
    assert ledger.durable == 2


async def test_a_failure_is_told_only_when_it_is_durable(tmp_path: Path) -> None:
    """It is decided here and kept nowhere else: the next leader would give the operation another end."""
    ledger = await leading()
    await ledger.commit(OpenSession("alice", "s", 0.0))
    await ledger.commit(Accept("alice", ops.CreateModel(MODEL, "tiny", ops.LoraConfig()), 0.0, "s"))
    await ledger.commit(Accept("alice", ops.OptimStep(MODEL, 1, ops.AdamParams()), 0.0))
    asked = messages.OrchestratorRequest(
        "q", messages.RequestType.UTILITY, "alice", payload=messages.WatchFuture(f"{MODEL}:1", 0.0)
    )
    settings = settings_in(tmp_path)
    with closing(ZmqLinks(settings)) as links:
        questions = Questions(parts_on(ledger, settings, links), lambda: None)
        _, durable = ledger.put(Abort("alice", f"{MODEL}:1", ledger.clock.wall_s()))
        assert durable is not None
        assert not durable.done()
        output = await questions.answer(asked)
    assert isinstance(output, messages.Finished)
    assert isinstance(output.result, ops.Failed)
    assert durable.done()


def settings_in(folder: Path) -> ServerSettings:
    file = folder / "server.toml"
    file.write_text(f'[server]\ndata = "{folder}"\n[model]\npath = "tiny"\n', encoding="utf-8")
    return load_settings(file, environ={})


def parts_on(ledger: Ledger, settings: ServerSettings, links: Links) -> Parts:
    return Parts(
        settings=settings,
        journal=MemoryJournal(ledger.clock),
        ledger=ledger,
        backend=RemoteBackend(links, settings, ledger.clock, ledger.generation),
        processor=RequestProcessor(Payloads(settings.payloads), settings.checkpoints),
        pace=Pace(),
    )
