"""An orchestrator's store without its process: what is done with files is tried on it alone."""

from __future__ import annotations

from pathlib import Path

from strata.base.clock import Clock, SystemClock
from strata.journal.replica import Replica
from strata.train.core import model_options, ops
from strata.train.core.client_commands import OpenSession, SubmitOperation
from strata.train.core.inputs import ClientCommand
from strata.train.core.machine import TrainMachine
from strata.train.core.state import Rules
from strata.train.orchestrator.state_store import StateStore, TrainReplica
from strata.train.settings import ServerSettings, load_settings
from tests.support.memory_journal import MemoryJournal

RUN = "s-train-0"


async def leading(journal: MemoryJournal, clock: Clock | None = None) -> StateStore:
    """The ranks have caught up. Whoever led before does not any more, and has not heard of it."""
    clock = clock or SystemClock()
    rules = Rules(initial_checkpoint=False, base_models=("tiny",))
    replica: TrainReplica = Replica(journal, "train/t", TrainMachine(rules), clock)
    await replica.lead("the-test", 60.0)
    store = StateStore(replica, clock)
    store.replayed = True
    return store


async def with_a_model(journal: MemoryJournal) -> StateStore:
    store = await leading(journal)
    await store.commit(ClientCommand("alice", OpenSession("s"), 0.0))
    await store.commit(
        ClientCommand(
            "alice", SubmitOperation(ops.CreateModel("s:train:0", "tiny", model_options.LoraConfig()), "s"), 0.0
        )
    )
    return store


def settings_in(folder: Path) -> ServerSettings:
    file = folder / "server.toml"
    file.write_text(f'[server]\ndata = "{folder}"\n[model]\npath = "tiny"\n', encoding="utf-8")
    return load_settings(file, environ={})
