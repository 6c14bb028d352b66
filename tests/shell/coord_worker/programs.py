"""Worker programs for the tests: one argument says what to do, lines of JSON say what happens."""

from __future__ import annotations

import asyncio
import ctypes
import json
import multiprocessing
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

import strata.coord.worker as strata


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, "at_s": time.monotonic(), **fields}), flush=True)


def hold(event: str = "held") -> None:
    """Until the test writes a line."""
    say(event)
    sys.stdin.readline()


def say_joined(worker: strata.Worker | strata.AsyncWorker) -> None:
    say("joined", incarnation=worker.incarnation, rank=worker.rank, world_size=worker.world_size)


class Counting:
    """Counts words; in the middle of its shard number `hold_at` it waits for the test."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.hold_at = given.get("hold_at")
        self.shards = 0

    def count(self, shard: strata.Shard) -> None:
        words: Counter[str] = Counter()
        for index, line in enumerate(shard.open()):
            words.update(line.split())
            if (self.shards, index) == (self.hold_at, 1):
                hold()
        self.shards += 1
        say("shard", lease_id=shard.lease_id, epoch=shard.epoch, start=shard.start, end=shard.end, words=words)


def count_words(given: dict[str, Any]) -> None:
    counting = Counting(given)
    with strata.join(**given["join"]) as worker:
        say_joined(worker)
        worker.dataset("corpus", given["files"], shard_size=given["shard_size"])
        for epoch in worker.epochs(given["epochs"]):
            again = True
            while again:
                again = False
                try:
                    for shard in worker.shards("corpus", epoch, prefetch=given.get("prefetch", 0)):
                        counting.count(shard)
                except strata.StrataError as error:
                    # Its shards are somebody else's; this worker may go on with others.
                    again = strata.reason_of(error) is strata.Reason.LEASE_LOST
                    if not again:
                        raise
                    say("lost", leases=error.detail["leases"])
            worker.barrier(f"epoch_{epoch}")
        say("finished", incarnation=worker.incarnation)


async def count_words_async(given: dict[str, Any]) -> None:
    counting = Counting(given)
    async with strata.join_async(**given["join"]) as worker:
        say_joined(worker)
        await worker.dataset("corpus", given["files"], shard_size=given["shard_size"])
        for epoch in worker.epochs(given["epochs"]):
            async for shard in worker.shards("corpus", epoch, prefetch=given.get("prefetch", 0)):
                counting.count(shard)
            await worker.barrier(f"epoch_{epoch}")
        say("finished", incarnation=worker.incarnation)


def meet(given: dict[str, Any]) -> None:
    with strata.join(**given["join"]) as worker:
        say_joined(worker)
        if given.get("hold"):
            hold()
        say("arriving")
        worker.barrier("here")
        say("met")


def step_together(given: dict[str, Any]) -> None:
    """In every step all wait for the slowest, at a barrier of the coordinator."""
    with strata.join(**given["join"]) as worker:
        wait_for_all(worker, given["world_size"])
        for number in range(given["steps"]):
            time.sleep(given["compute_s"])
            worker.barrier(f"step-{number}")
            worker.step(number)
            say("step", number=number)


def wait_for_all(worker: strata.Worker, world_size: int) -> None:
    """Nothing has begun, so a new generation undoes nothing."""
    while worker.world_size < world_size:
        time.sleep(0.02)
        worker.follow()


class Training:
    """A model is the list of samples in it. All parts of a checkpoint together are the model: rank 0 carries on what
    a recovery brought back."""

    def __init__(self, worker: strata.Worker, given: dict[str, Any]) -> None:
        self.worker = worker
        self.given = given
        self.part: list[tuple[int, int]] = []
        self.reported: set[int] = set()

    def run(self) -> None:
        for epoch in self.worker.epochs(self.given["epochs"]):
            for shard in self.worker.shards("corpus", epoch, prefetch=self.given.get("prefetch", 0)):
                middle = (shard.start + shard.end) // 2
                self.part += [(epoch, index) for index in range(shard.start, middle)]
                if epoch not in self.reported:
                    shard.progress(middle)
                    self.save(epoch)
                elif self.given.get("hold_in") == epoch:
                    hold()
                self.part += [(epoch, index) for index in range(middle, shard.end)]
            if epoch not in self.reported:
                self.save(epoch)
        self.worker.barrier("end")

    def save(self, epoch: int) -> None:
        self.reported.add(epoch)
        path = Path(self.given["out"]) / f"{self.worker.worker_id}-{epoch}-{self.worker.generation}.json"
        capture = self.worker.begin_checkpoint(epoch)
        path.write_text(json.dumps(self.part), encoding="utf-8")
        found = self.worker.report_checkpoint(capture, path)
        say("reported", epoch=epoch, committed=found.committed)

    def go_back(self) -> None:
        manifest = self.worker.recover("a member is gone")
        say("recovered", step=manifest.step if manifest else None, generation=self.worker.generation)
        self.part = []
        self.reported = set(range(manifest.step + 1)) if manifest else set()
        for each in manifest.parts if manifest else ():
            strata.verify_part(each.uri, each.digest)
            if self.worker.rank == 0:
                self.part += [(epoch, index) for epoch, index in json.loads(Path(each.uri).read_text("utf-8"))]


def train(given: dict[str, Any]) -> None:
    with strata.join(**given["join"]) as worker:
        say_joined(worker)
        wait_for_all(worker, given["world_size"])
        worker.dataset("corpus", samples=given["samples"], shard_size=given["shard_size"])
        training = Training(worker, given)
        while True:
            try:
                training.run()
            except strata.StrataError as error:
                if strata.reason_of(error) is not strata.Reason.MEMBERSHIP_CHANGED:
                    raise
                training.go_back()
            else:
                break
        say("trained", part=training.part)


def train_with_loader(given: dict[str, Any]) -> None:
    """A model is the list of samples in it, read by loader processes and saved after every fifth step."""
    from strata.coord.worker.torch_dataset import ShardDataset, ShardLoader

    with strata.join(**given["join"]) as worker:
        worker.dataset("corpus", given["files"], shard_size=given["shard_size"])

        def train(start: strata.Manifest | None) -> list[str]:
            model: list[str] = []
            step = 0
            if start is not None:
                model, step = json.loads(Path(start.parts[0].uri).read_text("utf-8")), start.step
            say("started", step=step)
            for epoch in worker.epochs(given["epochs"]):
                dataset = ShardDataset(worker, "corpus", epoch)
                loader = ShardLoader(dataset, given["batch_size"], collate_fn=list, num_workers=2)
                while not dataset.is_over:
                    for batch in loader:
                        model += [f"{epoch} {line}" for line in batch]
                        dataset.consumed()
                        step += 1
                        if step % 5 == 0:
                            part = Path(given["out"], f"{worker.generation}-{step}.json")
                            part.write_text(json.dumps(model), encoding="utf-8")
                            worker.checkpoint(step, part)
                        if step == given["hold_at"]:
                            say("loaders", pids=[each.pid for each in multiprocessing.active_children()])
                            hold()
            return model

        say("trained", model=worker.run(train))


def pace(given: dict[str, Any]) -> None:
    """Steps at its own pace until it is told to stop; a checkpoint whenever an operator wants one.

    It reports every `report_every`-th step, and asks after those of every `ask_every`-th, counted from `ask_from`.
    """
    report_every, ask_every, ask_from = (
        given.get("report_every", 1),
        given.get("ask_every", 1),
        given.get("ask_from", 0),
    )
    with strata.join(**given["join"]) as worker:
        step = 0
        while not worker.should_stop:
            time.sleep(given["step_s"])
            step += 1
            if step % report_every == 0:
                worker.step(step)
            if (step - ask_from) % ask_every == 0 and worker.checkpoint_due():
                part = Path(given["out"], f"{worker.worker_id}-{step}")
                part.write_text(str(step), encoding="utf-8")
                worker.checkpoint(step, part, commit_within_s=60)
                say("saved", step=step)
            if step == 5 * max(report_every, ask_every):
                say("stepping")


def hold_the_gil(given: dict[str, Any]) -> None:
    """A call that returns late and keeps the GIL: no other thread of Python runs meanwhile."""
    with strata.join(**given["join"]) as worker:
        say_joined(worker)
        worker.step(1)
        hold()
        ctypes.PyDLL(None).usleep(int(given["seconds"] * 1e6))
        worker.barrier("after")
        say("finished", incarnation=worker.incarnation)


def come_and_go(given: dict[str, Any]) -> None:
    """What is left of threads and connections after several incarnations."""
    left = []
    for _ in range(4):
        with strata.join(**given["join"]) as worker:
            worker.dataset("corpus", samples=10, shard_size=5)
            worker.barrier("here")
        connections = [each for each in psutil.Process().net_connections("tcp") if each.status == "ESTABLISHED"]
        left.append(
            {
                "threads": sorted(each.name for each in threading.enumerate()),
                "connections": len(connections),
            }
        )
    say("left", left=left, files=psutil.Process().num_fds())


PROGRAMS: Final[dict[str, Callable[[dict[str, Any]], None]]] = {
    "count": count_words,
    "count-async": lambda given: asyncio.run(count_words_async(given)),
    "meet": meet,
    "train": train,
    "train-with-loader": train_with_loader,
    "step-together": step_together,
    "pace": pace,
    "hold-the-gil": hold_the_gil,
    "come-and-go": come_and_go,
}


def main() -> None:
    given = json.loads(sys.argv[1])
    try:
        PROGRAMS[given["program"]](given)
    except strata.StrataError as error:
        say("error", code=error.code.value, reason=error.detail.get("reason"), message=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
