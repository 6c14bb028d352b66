"""The elastic training example with all going wrong: a rank dies, a checkpoint is damaged, the coordinator dies.

One run serves all tests here. The log, the model and the coordinator's journal are three witnesses of it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from examples.elastic_sft.check import Run, judge, survivors
from strata.base.clock import SystemClock
from strata.coord.core.facts import CheckpointCommitted, Fact, GenerationFormed, Recovered, ShardsGranted
from strata.coord.core.machine import decode_fact
from strata.journal.open import open_journal

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "elastic_sft"
EPOCHS: Final = 2
SAMPLES: Final = 192
CHECKPOINT_EVERY: Final = 6
KILL_RANK_AT: Final = 13
KILL_COORDINATOR_AT: Final = 30
UNTRAINED: Final = 5.0
"""Nats per byte. Of 257 equally likely tokens each costs 5.55; the first step of every run is worse than this."""
TRAINED: Final = 3.5
WITHIN_S: Final = 280
"""The run takes 20 s on two idle cores; other work on them can make that several times as long."""

pytestmark = pytest.mark.timeout(WITHIN_S + 20)
Line = dict[str, Any]


@dataclass(frozen=True)
class Ran:
    folder: Path
    status: int
    shown: str
    events: list[Line]
    facts: list[Fact]

    def of(self, event: str) -> list[Line]:
        return [line for line in self.events if line["event"] == event]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("sft")
    command = [sys.executable, str(EXAMPLE / "run.py"), "--out", str(folder), "--spoil-checkpoint"]
    numbers = {
        "--epochs": EPOCHS,
        "--samples": SAMPLES,
        "--checkpoint-every": CHECKPOINT_EVERY,
        "--kill-rank-at": KILL_RANK_AT,
        "--kill-coordinator-at": KILL_COORDINATOR_AT,
        "--loss-below": TRAINED,
    }
    command += [str(word) for pair in numbers.items() for word in pair]
    began_s = time.monotonic()
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        shown, _ = running.communicate(timeout=WITHIN_S)
    finally:
        # Told to end, it ends its coordinator and its ranks; killed, it could not.
        running.terminate()
        running.wait(60)
    print(shown, (folder / "ranks.log").read_text("utf-8")[-4000:], f"{time.monotonic() - began_s:.1f} s")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text("utf-8").splitlines()]
    return Ran(folder, running.returncode, shown, events, asyncio.run(facts(folder)))


async def facts(folder: Path) -> list[Fact]:
    found: list[Fact] = []
    async with await open_journal(f"sqlite:{folder / 'coordinator.db'}", SystemClock()) as journal:
        position = 0
        while batches := await journal.read("coord/0", position):
            found += [decode_fact(fact) for batch in batches for fact in batch.facts]
            position = batches[-1].last
    return found


def test_every_sample_is_in_the_surviving_model_once_per_epoch_and_the_loss_fell(ran: Ran) -> None:
    assert ran.status == 0, ran.shown
    run = Run.read(ran.folder)
    verdict = judge(run, epochs=EPOCHS, loss_below=TRAINED)
    assert verdict.problems == []
    assert run.samples == SAMPLES
    first = [line["loss"] for line in survivors(run.log) if line["step"] == 1]
    assert min(first) > UNTRAINED


def test_the_rank_was_killed_and_the_job_went_back_behind_the_damaged_checkpoint(ran: Ran) -> None:
    (killed,) = [line for line in ran.of("killed") if line["what"] == "rank 1"]
    (spoilt,) = ran.of("spoilt")
    run = Run.read(ran.folder)
    starts = [line for line in run.log if line["event"] == "started" and line["rank"] == 1]
    before, after = (next(each for each in starts if (each["pid"] == killed["pid"]) == old) for old in (True, False))
    assert after["generation"] > before["generation"]
    bad = [each.bad_checkpoint_id for each in ran.facts if isinstance(each, Recovered) and each.bad_checkpoint_id]
    assert len(bad) == 1
    (step,) = [f.step for f in ran.facts if isinstance(f, CheckpointCommitted) and f.checkpoint_id == bad[0]]
    assert spoilt["checkpoint"] == f"{before['generation']}-{step}"
    assert after["step"] == step - CHECKPOINT_EVERY
    # What the ranks did after the step they went back to is in the log and not in the lineage.
    gone = [line for line in run.log if line["event"] == "step" and line not in survivors(run.log)]
    assert {line["step"] for line in gone} >= set(range(after["step"] + 1, KILL_RANK_AT + 1))


def test_the_coordinator_was_killed_and_another_process_carried_on_with_its_journal(ran: Ran) -> None:
    (killed,) = [line for line in ran.of("killed") if line["what"] == "coordinator"]
    first, second = (line["pid"] for line in ran.of("coordinator"))
    assert killed["pid"] == first != second
    granted = [grant.lease_id >> 32 for f in ran.facts if isinstance(f, ShardsGranted) for grant in f.grants]
    assert len({*granted}) > 1, "both have handed out shards"
    assert granted == sorted(granted)
    # The ranks did not even notice: no generation was formed because of it. A process on a busy machine that does not
    # renew its lease in time leads again in a later term, so terms are not counted from 1.
    last_term = granted[-1]
    since = next(
        i for i, f in enumerate(ran.facts) if isinstance(f, ShardsGranted) and f.grants[0].lease_id >> 32 == last_term
    )
    last = max(i for i, f in enumerate(ran.facts) if isinstance(f, ShardsGranted))
    assert not [f for f in ran.facts[since:last] if isinstance(f, GenerationFormed)]


def duplicate(lines: list[Line]) -> None:
    """A sample that is learnt from twice in one epoch."""
    steps = [line for line in lines if line["event"] == "step" and line["ids"]]
    steps[-1]["ids"].append(steps[-1]["ids"][0])


def lose(lines: list[Line]) -> None:
    """A sample that is never learnt from; the last step is in the lineage whatever was discarded."""
    [line for line in lines if line["event"] == "step" and line["ids"]][-1]["ids"].pop()


def survive(lines: list[Line]) -> None:
    """What was discarded counts after all, as if nobody had gone back."""
    lines[:] = [line for line in lines if line["event"] != "started"]


def learn_nothing(lines: list[Line]) -> None:
    steps = [line for line in lines if line["event"] == "step"]
    for line in steps:
        line["loss"] = steps[0]["loss"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (duplicate, "log: sample"),
        (lose, "log: sample"),
        (survive, "log: sample"),
        (learn_nothing, "the loss is"),
    ],
)
def test_a_log_in_which_something_is_wrong_is_refused(
    ran: Ran, tmp_path: Path, change: Callable[[list[Line]], None], complaint: str
) -> None:
    copy(ran, tmp_path)
    for path in tmp_path.glob("rank-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        change(lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert complaint in refused(tmp_path)


@pytest.mark.parametrize("times", [0, 2])
def test_a_model_that_lacks_a_sample_or_has_it_twice_is_refused(ran: Ran, tmp_path: Path, times: int) -> None:
    copy(ran, tmp_path)
    model = json.loads((tmp_path / "model.json").read_text("utf-8"))
    model["seen"][1][17] = times
    (tmp_path / "model.json").write_text(json.dumps(model), encoding="utf-8")
    assert f"model: sample 17 is in epoch 1 {times} times" in refused(tmp_path)


def test_the_log_as_it_was_written_is_accepted(ran: Ran, tmp_path: Path) -> None:
    copy(ran, tmp_path)
    checked = check(tmp_path)
    assert checked.returncode == 0, checked.stdout
    assert "every sample once per epoch" in checked.stdout


def copy(ran: Ran, to: Path) -> None:
    for name in ("rank-0.jsonl", "rank-1.jsonl", "corpus.jsonl", "model.json"):
        shutil.copy(ran.folder / name, to / name)


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "check.py"), str(folder), "--epochs", str(EPOCHS)]
    return subprocess.run([*command, "--loss-below", str(TRAINED)], capture_output=True, text=True, check=False)


def refused(folder: Path) -> str:
    checked = check(folder)
    assert checked.returncode == 1, checked.stderr
    return checked.stdout
