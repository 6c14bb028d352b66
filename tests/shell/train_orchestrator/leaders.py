"""An orchestrator's ledger without its process: what is done with files is tried on it alone."""

from __future__ import annotations

from pathlib import Path

from strata.base.clock import Clock, SystemClock
from strata.journal.memory import MemoryJournal
from strata.journal.replica import Replica
from strata.train.core import ops
from strata.train.core.inputs import Accept, OpenSession
from strata.train.core.machine import TrainMachine
from strata.train.core.state import Rules
from strata.train.orchestrator.ledger import Ledger, TrainReplica
from strata.train.settings import ServerSettings, load_settings

RUN = "s-train-0"


async def leading(journal: MemoryJournal, clock: Clock | None = None) -> Ledger:
    """The ranks have caught up. Whoever led before does not any more, and has not heard of it."""
    clock = clock or SystemClock()
    rules = Rules(initial_checkpoint=False, base_models=("tiny",))
    replica: TrainReplica = Replica(journal, "train/t", TrainMachine(rules), clock)
    await replica.lead("the-test", 60.0)
    ledger = Ledger(replica, clock)
    ledger.caught_up = True
    return ledger


async def with_a_model(journal: MemoryJournal) -> Ledger:
    ledger = await leading(journal)
    await ledger.commit(OpenSession("alice", "s", 0.0))
    await ledger.commit(Accept("alice", ops.CreateModel("s:train:0", "tiny", ops.LoraConfig()), 0.0, "s"))
    return ledger


def settings_in(folder: Path) -> ServerSettings:
    file = folder / "server.toml"
    file.write_text(f'[server]\ndata = "{folder}"\n[model]\npath = "tiny"\n', encoding="utf-8")
    return load_settings(file, environ={})
