"""What the ledger calls durable is what rank 0 may forget."""

from __future__ import annotations

from strata.base.clock import SystemClock
from strata.journal.memory import MemoryJournal
from strata.journal.replica import Replica
from strata.train.core import ops
from strata.train.core.inputs import Accept, Answer, Dispatching, DispatchNext, GiveUp, OpenSession
from strata.train.core.machine import TrainMachine
from strata.train.core.state import Rules
from strata.train.orchestrator.ledger import Ledger, TrainReplica

MODEL = "s:train:0"


async def leading() -> Ledger:
    clock = SystemClock()
    replica: TrainReplica = Replica(
        MemoryJournal(clock), "train/t", TrainMachine(Rules(initial_checkpoint=False)), clock
    )
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
